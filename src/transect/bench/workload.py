"""Requests to send: prompts and output lengths, drawn from a seed or read from a file."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .lengths import Lengths

CHARACTERS_PER_TOKEN = 4
"""Characters per token of English text, used if a file has an answer's text and no length."""


@dataclass(frozen=True, slots=True)
class Work:
    """One request: ``prompt`` as token ids or text, number of tokens to answer, and arrival time in seconds from the
    start."""

    prompt: tuple[int, ...] | str
    output_tokens: int
    at: float = 0.0


def random_work(
    count: int, prompt: Lengths, output: Lengths, *, vocab: tuple[int, int] = (0, 10000), seed: int | str = 0
) -> list[Work]:
    """Draw prompts of random token ids, ``vocab[0] .. vocab[1]`` with both ends. Request i does not depend on
    ``count``."""
    rng = random.Random(f"work {seed}")
    result = []
    for _ in range(count):
        length, new = prompt.draw(rng), output.draw(rng)
        result.append(Work(tuple(rng.randint(*vocab) for _ in range(length)), new))
    return result


def throughput_protocol(sequences: int = 256, low: int = 100, high: int = 1024, *, highest: int = 10000) -> list[Work]:
    """Draw the workload of the benchmarks of nano-vllm and mini-sglang, token for token, or a smaller one of the same
    form.

    Python's ``random`` with seed 0 draws, for each sequence, its prompt length and then its ids from 0 to ``highest``;
    after all prompts it draws the output lengths. 256 sequences have 142,827 prompt tokens and 133,966 output tokens.
    """
    rng = random.Random(0)
    prompts = [tuple(rng.randint(0, highest) for _ in range(rng.randint(low, high))) for _ in range(sequences)]
    return [Work(prompt, rng.randint(low, high)) for prompt in prompts]


def at_times(work: Iterable[Work], arrivals: Iterable[float]) -> list[Work]:
    """Return the same work at other times."""
    return [replace(each, at=at) for each, at in zip(work, arrivals, strict=True)]


def read_conversations(path: Path, count: int, *, output: Lengths | None = None, seed: int | str = 0) -> list[Work]:
    """Read first questions of recorded conversations, ``count`` of them in an order drawn from the seed.

    The file is JSON (one list) or JSON lines; each conversation has ``conversations`` (or ``messages``): turns with
    ``from`` and ``value`` (or ``role`` and ``content``). A question's answer decides the output length, at four
    characters a token, unless ``output`` does.

    Raises:
        ValueError: no conversation in it begins with a question and an answer.
    """
    pairs = [pair for _, line in lines(path) if (pair := _first_exchange(line)) is not None]
    if not pairs:
        raise ValueError(f"{path} has no conversation that begins with a question and an answer")
    rng = random.Random(f"conversations {seed}")
    drawn: list[tuple[str, str]] = []
    while len(drawn) < count:
        drawn.extend(rng.sample(pairs, min(len(pairs), count - len(drawn))))
    return [
        Work(question, output.draw(rng) if output else max(1, len(answer) // CHARACTERS_PER_TOKEN))
        for question, answer in drawn
    ]


def _first_exchange(line: dict[str, Any]) -> tuple[str, str] | None:
    turns = line.get("conversations") or line.get("messages") or []
    texts = [
        (turn.get("from") or turn.get("role"), str(turn.get("value") or turn.get("content") or ""))
        for turn in turns
        if isinstance(turn, dict)
    ]
    texts = [turn for turn in texts if turn[0] != "system"][:2]
    if len(texts) < 2 or texts[0][0] not in ("human", "user") or not all(text for _, text in texts):
        return None
    return texts[0][1], texts[1][1]


def lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (location, object) of each element of a JSON list or of each line of a JSON lines file.

    Raises:
        ValueError: it cannot be read, or an element is not an object.
    """
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read ({error})") from None
    try:
        if text.lstrip().startswith("["):
            yield from ((f"{path}, element {i}", each) for i, each in enumerate(_objects(json.loads(text))))
            return
        for number, line in enumerate(text.splitlines(), start=1):
            if line.strip():
                yield from ((f"{path}, line {number}", each) for each in _objects([json.loads(line)]))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is neither JSON nor JSON lines ({error})") from None


def _objects(values: Sequence[Any]) -> Iterator[dict[str, Any]]:
    for value in values:
        if not isinstance(value, dict):
            raise ValueError(f"expected a JSON object, not {str(value)[:60]!r}")
        yield value
