"""Rows of training data in the layouts that people have: told apart by their keys, and brought into one of five forms.

| layout | keys | form |
|---|---|---|
| preferences | ``chosen``, ``rejected``, with or without ``prompt``: strings or messages | ``Preference`` |
| judged answers | ``prompt``, ``completion``: strings or messages; ``label``: true or false | ``Rated`` |
| chat | ``messages``, with or without ``tools`` | ``Chat`` |
| ShareGPT | ``conversations`` of ``from`` and ``value``, with or without ``system`` | ``Chat`` |
| Alpaca | ``instruction``, ``output``, with or without ``input`` and ``system`` | ``Chat`` |
| prompt and completion | ``prompt``, ``completion``: strings, or messages | ``Completion``, or ``Chat`` |
| question and answer | ``question`` and ``answer``, ``prompt`` or ``query`` and ``response`` | ``Chat`` |
| text | ``text`` | ``Text`` |
"""

from __future__ import annotations

import difflib
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Messages = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Text:
    """A document; every token is trained on."""

    text: str


@dataclass(frozen=True, slots=True)
class Completion:
    """Plain text, of which what follows the prompt is trained on."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class Chat:
    """A conversation; what the assistant says from message ``first`` on is trained on. ``tools``: for the template."""

    messages: Messages
    tools: list[Any] | None = None
    first: int = 0


@dataclass(frozen=True, slots=True)
class Preference:
    """Two ways to go on after the same messages."""

    prompt: Messages
    chosen: Messages
    rejected: Messages
    tools: list[Any] | None = None


@dataclass(frozen=True, slots=True)
class Rated:
    """An answer that was judged good or bad."""

    prompt: Messages
    completion: Messages
    good: bool
    tools: list[Any] | None = None


Form = Text | Completion | Chat | Preference | Rated


@dataclass(frozen=True, slots=True)
class Layout:
    """A way to lay out rows. ``trained`` says in words what is trained on."""

    name: str
    trained: str
    matches: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Mapping[str, Any]], Form]


ROLES = {
    **dict.fromkeys(("human", "user"), "user"),
    **dict.fromkeys(("gpt", "assistant", "chatgpt", "bing", "bard", "model"), "assistant"),
    "system": "system",
    **dict.fromkeys(("tool", "function", "observation", "function_response"), "tool"),
}
"""Whom ShareGPT's ``from`` means."""
PAIRS = (("question", "answer"), ("prompt", "response"), ("query", "response"), ("instruction", "response"))


def _string(row: Mapping[str, Any], key: str, *, empty: bool = False) -> str:
    value = row.get(key)
    if not isinstance(value, str) or not (value or empty):
        raise ValueError(f'"{key}" must be {"a string" if empty else "text"}, not {value!r:.60}')
    return value


def _messages(row: Mapping[str, Any], key: str) -> Messages:
    value = row.get(key)
    if isinstance(value, str):  # a CSV or parquet file may hold them as JSON
        try:
            value = json.loads(value)
        except ValueError:
            raise ValueError(f'"{key}" must be a list of messages, not text') from None
    if not isinstance(value, Sequence) or not value or not all(isinstance(message, Mapping) for message in value):
        raise ValueError(f'"{key}" must be a list of messages')
    # Columns of a table hold null where a message has no such key.
    return [{k: v for k, v in message.items() if v is not None or k == "content"} for message in value]


def _tools(row: Mapping[str, Any]) -> list[Any] | None:
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except ValueError as error:
            raise ValueError(f'"tools" is not JSON: {error}') from None
    if not tools:
        return None
    if not isinstance(tools, list):
        raise ValueError('"tools" must be a list')
    return tools


def _turns(row: Mapping[str, Any], user: str, assistant: str) -> Messages:
    system = row.get("system")
    before = [{"role": "system", "content": system}] if isinstance(system, str) and system else []
    return [*before, {"role": "user", "content": user}, {"role": "assistant", "content": assistant}]


def _chat(row: Mapping[str, Any]) -> Chat:
    return Chat(_messages(row, "messages"), _tools(row))


def _sharegpt(row: Mapping[str, Any]) -> Chat:
    messages: Messages = []
    system = row.get("system")
    if isinstance(system, str) and system:
        messages.append({"role": "system", "content": system})
    for number, turn in enumerate(_messages(row, "conversations")):
        if "from" not in turn and "role" in turn:
            messages.append(turn)
            continue
        role = ROLES.get(str(turn.get("from", "")).lower())
        if role is None:
            raise ValueError(f'conversations[{number}] is "from" {turn.get("from")!r}; known are {", ".join(ROLES)}')
        messages.append({"role": role, "content": _string(turn, "value", empty=True)})
    return Chat(messages, _tools(row))


def _alpaca(row: Mapping[str, Any]) -> Chat:
    asked, more = _string(row, "instruction"), row.get("input") or ""
    if not isinstance(more, str):
        raise ValueError(f'"input" must be a string, not {more!r:.60}')
    return Chat(_turns(row, f"{asked}\n\n{more}" if more else asked, _string(row, "output")))


def _completion(row: Mapping[str, Any]) -> Form:
    if isinstance(row["prompt"], str) and isinstance(row["completion"], str):
        return Completion(_string(row, "prompt", empty=True), _string(row, "completion"))
    prompt = _messages(row, "prompt")
    return Chat([*prompt, *_messages(row, "completion")], _tools(row), first=len(prompt))


def _pair(row: Mapping[str, Any]) -> Chat:
    asked, answered = next((a, b) for a, b in PAIRS if a in row and b in row)
    return Chat(_turns(row, _string(row, asked), _string(row, answered)))


def _text(row: Mapping[str, Any]) -> Text:
    return Text(_string(row, "text", empty=True))


def _preference(row: Mapping[str, Any]) -> Preference:
    sides = []
    for key in ("chosen", "rejected"):
        if isinstance(row[key], str):
            sides.append([{"role": "assistant", "content": _string(row, key)}])
        else:
            sides.append(_messages(row, key))
    shared = [a for a, _ in itertools.takewhile(lambda both: both[0] == both[1], zip(*sides, strict=False))]
    if "prompt" not in row:
        prompt = shared
        if not prompt:
            raise ValueError('there is no "prompt", and "chosen" and "rejected" do not begin alike')
    elif not isinstance(row["prompt"], str):
        prompt = _messages(row, "prompt")
    elif any(message.get("role") == "user" for message in shared):
        prompt = shared  # UltraFeedback: whole conversations, beside a question that they hold too
    else:
        prompt = [{"role": "user", "content": row["prompt"]}]
    if shared[: len(prompt)] == prompt:
        sides = [side[len(prompt) :] for side in sides]
    for key, side in zip(("chosen", "rejected"), sides, strict=True):
        if not side or side[-1].get("role") != "assistant":
            raise ValueError(f'"{key}" must end with a message of the assistant')
    return Preference(prompt, sides[0], sides[1], _tools(row))


def prompt_of(row: Mapping[str, Any]) -> tuple[Messages, list[Any] | None]:
    """The prompt of a row that needs no answer, and its tools. ValueError if there is none."""
    if "prompt" not in row:
        raise ValueError(f'the row needs a "prompt"; its keys are {", ".join(map(str, row))}')
    if isinstance(row["prompt"], str):
        return [{"role": "user", "content": _string(row, "prompt")}], _tools(row)
    return _messages(row, "prompt"), _tools(row)


VERDICTS = {"true": True, "false": False}


def _is_rated(row: Mapping[str, Any]) -> bool:
    """A label that is no verdict belongs to a row for something else."""
    return "prompt" in row and "completion" in row and str(row.get("label")).lower() in VERDICTS


def _rated(row: Mapping[str, Any]) -> Rated:
    sides = []
    for key, role in (("prompt", "user"), ("completion", "assistant")):
        value = row[key]
        sides.append([{"role": role, "content": _string(row, key)}] if isinstance(value, str) else _messages(row, key))
    prompt, completion = sides
    if completion[-1].get("role") != "assistant":
        raise ValueError('"completion" must end with a message of the assistant')
    return Rated(prompt, completion, VERDICTS[str(row["label"]).lower()], _tools(row))


def _has(*keys: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda row: all(key in row for key in keys)


LAYOUTS = (
    Layout("preferences (chosen, rejected)", "the better answer", _has("chosen", "rejected"), _preference),
    Layout("judged answers (prompt, completion, label)", "the answer, by its label", _is_rated, _rated),
    Layout("chat (messages)", "the assistant's messages", _has("messages"), _chat),
    Layout("ShareGPT (conversations)", "the assistant's messages", _has("conversations"), _sharegpt),
    Layout("Alpaca (instruction, input, output)", "the output", _has("instruction", "output"), _alpaca),
    Layout("prompt and completion", "the completion", _has("prompt", "completion"), _completion),
    Layout("question and answer", "the answer", lambda row: any(a in row and b in row for a, b in PAIRS), _pair),
    Layout("text", "every token", _has("text"), _text),
)
"""In the order in which they are tried."""

KEYS = ("messages", "conversations", "instruction", "output", "prompt", "completion", "response", "question", "answer",
        "text", "chosen", "rejected", "label")  # fmt: skip


def detect(row: Mapping[str, Any]) -> Layout:
    """The layout of a row.

    Raises:
        ValueError: none is known by these keys; the message names them and what would be.
    """
    for layout in LAYOUTS:
        if layout.matches(row):
            return layout
    names = [str(key) for key in row]
    strange = [name for name in names if name not in KEYS]
    near = [f"{name} is near {found[0]}" for name in strange if (found := difflib.get_close_matches(name, KEYS, 1))]
    hint = f" ({'; '.join(near)})" if near else ""
    known = "; ".join(layout.name for layout in LAYOUTS)
    keys = ", ".join(names) or "of an empty row"
    raise ValueError(f"no layout is known with the keys {keys}{hint}; known are {known}")
