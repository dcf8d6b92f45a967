"""Read records of captures as observations: what was asked, what was answered.

Tests of drift need independent observations. Later turns of a conversation repeat earlier ones, and a user repeats
herself; ``independent`` keeps one observation of each user and of each conversation.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..rows.reading import read_rows
from .captures import read, segments


@dataclass(frozen=True, slots=True)
class Observation:
    """A captured request with its first answer.

    Attributes:
        prompt: last message of the user, or the prompt.
        answer: text of the answer, without thoughts and calls.
        form: requested form of the answer; empty for free text.
        valid: the answer has that form; True for free text.
        user: hash of the user's id; empty if it is unknown.
        conversation: hash of the first message; empty for a conversation of one turn.
        time: seconds since 1970.
        model: version that answered.
        called: the answer calls tools.
    """

    prompt: str
    answer: str
    form: str = ""
    valid: bool = True
    user: str = ""
    conversation: str = ""
    time: float = 0.0
    model: str = ""
    called: bool = False


def observation_of(record: Mapping[str, Any]) -> Observation | None:
    """Read a record; None if it is not a request with an answer."""
    answers = record.get("answers")
    if record.get("kind") != "request" or not answers:
        return None
    first, messages = answers[0], record.get("messages")
    turns = [each for each in messages or () if each.get("role") == "user"]
    if messages is None:
        prompt = str((record.get("prompts") or [""])[0])
    else:
        prompt = text_of(turns[-1]) if turns else ""
    conversation = hashlib.sha256(text_of(turns[0]).encode()).hexdigest()[:32] if len(turns) > 1 else ""
    return Observation(
        prompt,
        str(first.get("text") or ""),
        str(record.get("form") or ""),
        first.get("valid") is not False,
        str(record.get("user") or ""),
        conversation,
        float(record.get("time") or 0.0),
        str(record.get("model") or ""),
        bool(first.get("calls")),
    )


def text_of(message: Mapping[str, Any]) -> str:
    """Return the text of a message."""
    content = message.get("content")
    if isinstance(content, list):
        return "\n".join(str(part.get("text", "")) for part in content if isinstance(part, dict))
    return content if isinstance(content, str) else ""


def observations(records: Iterable[Mapping[str, Any]], model: str = "", after: float = 0.0) -> list[Observation]:
    """List the observations among records, oldest first.

    Args:
        model: only of this version; empty for all.
        after: only later ones, in seconds since 1970.
    """
    found = (observation_of(record) for record in records)
    return [each for each in found if each is not None and model in ("", each.model) and each.time > after]


def independent(found: Sequence[Observation]) -> list[Observation]:
    """Keep the newest observation of each user and of each conversation of several turns, oldest first."""
    kept: list[Observation] = []
    seen: set[str] = set()
    for each in reversed(found):
        keys = {f"user:{each.user}"} if each.user else set()
        keys |= {f"conversation:{each.conversation}"} if each.conversation else set()
        if not keys & seen:
            kept.append(each)
            seen |= keys
    return kept[::-1]


def reference_in(path: Path) -> list[Observation]:
    """Read a reference: a directory of captures, or files of training data with prompts and answers.

    Raises:
        ValueError: it cannot be read.
    """
    if path.is_dir() and segments(path):
        return independent(observations(read(path)))
    rows = read_rows([str(path)], {}, "", Counter())
    return [Observation(row.prompt if row.answer != row.prompt else "", row.answer) for row in rows]
