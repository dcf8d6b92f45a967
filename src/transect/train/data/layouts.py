"""Layouts of rows of training data: recognized by their keys, and converted to one of five forms.

| layout | keys | form |
|---|---|---|
| preferences | ``chosen``, ``rejected``, with or without ``prompt``: strings or messages | ``Preference`` |
| judged answers | ``prompt``, ``completion``: strings or messages; ``label``: true or false | ``Rated`` |
| chat | ``messages``, with or without ``tools`` | ``ChatExample`` |
| ShareGPT | ``conversations`` of ``from`` and ``value`` | ``ChatExample`` |
| Alpaca | ``instruction``, ``output``, with or without ``input`` | ``ChatExample`` |
| prompt and completion | ``prompt``, ``completion``: strings, or messages | ``CompletionExample``, or ``ChatExample`` |
| question and answer | ``question`` and ``answer``, ``prompt`` or ``query`` and ``response`` | ``ChatExample`` |
| text | ``text`` | ``Text`` |

``system`` beside any chat is its system prompt; ``history`` beside a single question holds earlier turns. Beside a
prompt and a completion of plain strings these make it a chat. ``data.columns`` gives the names that a file has for
these keys.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from .messages import Messages, check_calls, earlier, messages_of, sharegpt, text_of, tools_of, trained, with_system


@dataclass(frozen=True, slots=True)
class Text:
    """A document; every token is trained on."""

    text: str


@dataclass(frozen=True, slots=True)
class CompletionExample:
    """Plain text; only the completion is trained on."""

    prompt: str
    completion: str


@dataclass(frozen=True, slots=True)
class ChatExample:
    """A conversation. The assistant's messages from ``first`` on are trained on, except those in ``masked``. ``tools``
    go to the template."""

    messages: Messages
    tools: list[Any] | None = None
    first: int = 0
    masked: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class Preference:
    """Two continuations of the same messages."""

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


Form = Text | CompletionExample | ChatExample | Preference | Rated


@dataclass(frozen=True, slots=True)
class Layout:
    """A layout of rows.

    Attributes:
        trained: the part that is trained on, in words.
        keys: the columns that are read.
        answers: rows hold answers, which a label of good or bad would be about.
    """

    name: str
    trained: str
    matches: Callable[[Mapping[str, Any]], bool]
    read: Callable[[Mapping[str, Any]], Form]
    keys: Collection[str]
    answers: bool = True

    def ignored(self, row: Mapping[str, Any]) -> list[str]:
        """List nonempty columns of a row that are not read."""
        return [str(key) for key, value in row.items() if key not in self.keys and value not in (None, "", [], {})]


PAIRS = (("question", "answer"), ("prompt", "response"), ("query", "response"), ("instruction", "response"))
CONTEXT = ("system", "history")
"""Columns whose content precedes a question."""
ALIKE = '"chosen" and "rejected" are the same'


def _chat_of(row: Mapping[str, Any], messages: Messages, first: int = 0) -> ChatExample:
    """Build a checked chat with the row's system prompt and tools; ``first`` as in ``ChatExample``, of ``messages``."""
    whole = with_system(row, messages)
    first = first and first + len(whole) - len(messages)
    plain, masked = trained(whole, first)
    tools = tools_of(row)
    check_calls(plain, tools)
    return ChatExample(plain, tools, first, masked)


def _asked(row: Mapping[str, Any], question: str, answer: str) -> ChatExample:
    """Build a question and its answer, after the columns of ``CONTEXT`` and with the thoughts of
    ``reasoning_content``."""
    before = [*earlier(row), {"role": "user", "content": question}]
    thoughts = {"reasoning_content": row["reasoning_content"]} if row.get("reasoning_content") else {}
    return _chat_of(row, [*before, {"role": "assistant", "content": answer, **thoughts}], len(before))


def _chat(row: Mapping[str, Any]) -> ChatExample:
    return _chat_of(row, messages_of(row, "messages"))


def _sharegpt(row: Mapping[str, Any]) -> ChatExample:
    return _chat_of(row, sharegpt(row))


def _alpaca(row: Mapping[str, Any]) -> ChatExample:
    return _asked(row, _instruction(row, "input"), text_of(row, "output"))


def _instruction(row: Mapping[str, Any], *further: str) -> str:
    asked, more = text_of(row, "instruction"), next((row[key] for key in further if row.get(key)), "")
    if not isinstance(more, str):
        raise ValueError(f'"{further[0]}" must be a string, not {more!r:.60}')
    return f"{asked}\n\n{more}" if more else asked


def _completion(row: Mapping[str, Any]) -> Form:
    if isinstance(row["prompt"], str) and isinstance(row["completion"], str):
        return CompletionExample(text_of(row, "prompt", empty=True), text_of(row, "completion"))
    prompt = messages_of(row, "prompt")
    return _chat_of(row, [*prompt, *messages_of(row, "completion")], first=len(prompt))


def _completion_with_context(row: Mapping[str, Any]) -> Form:
    if isinstance(row["prompt"], str) and isinstance(row["completion"], str):
        return _asked(row, text_of(row, "prompt"), text_of(row, "completion"))
    return _completion(row)


def _pair(row: Mapping[str, Any]) -> ChatExample:
    asked, answered = next((a, b) for a, b in PAIRS if a in row and b in row)
    question = _instruction(row, "input", "context") if asked == "instruction" else text_of(row, asked)
    return _asked(row, question, text_of(row, answered))


def _text(row: Mapping[str, Any]) -> Text:
    return Text(text_of(row, "text", empty=True))


def _preference(row: Mapping[str, Any]) -> Preference:
    sides = []
    for key in ("chosen", "rejected"):
        if isinstance(row[key], str):
            sides.append([{"role": "assistant", "content": text_of(row, key)}])
        else:
            sides.append(messages_of(row, key))
    shared = [a for a, _ in itertools.takewhile(lambda both: both[0] == both[1], zip(*sides, strict=False))]
    asked = "question" if "question" in row and "prompt" not in row else "prompt"
    if sides[0] == sides[1]:
        raise ValueError(ALIKE)
    if asked not in row:
        prompt = shared
        if not prompt:
            raise ValueError('there is no "prompt", and "chosen" and "rejected" do not begin alike')
    elif not isinstance(row[asked], str):
        prompt = messages_of(row, asked)
    elif any(message.get("role") == "user" for message in shared):
        prompt = shared  # UltraFeedback: whole conversations, beside a question that they hold too
    else:
        prompt = [*earlier(row), {"role": "user", "content": row[asked]}]
    sides = [side[len(prompt) :] if side[: len(prompt)] == prompt else side for side in sides]
    prompt, tools = _before(with_system(row, prompt)), tools_of(row)
    chosen, rejected = (
        _answer(key, prompt, side, tools) for key, side in zip(("chosen", "rejected"), sides, strict=True)
    )
    if chosen == rejected:
        raise ValueError(ALIKE)
    return Preference(prompt, chosen, rejected, tools)


def _before(messages: Messages) -> Messages:
    """Return the messages before an answer, marked as not trained on."""
    return trained(messages, len(messages))[0]


def _answer(key: str, prompt: Messages, side: Messages, tools: list[Any] | None) -> Messages:
    """Return an answer that is compared or judged. Raises ValueError if it does not end with an answer of the
    assistant."""
    if not side or side[-1].get("role") != "assistant":
        raise ValueError(f'"{key}" must end with a message of the assistant')
    plain, masked = trained(side, len(side) - 1)
    if len(side) - 1 in masked:
        raise ValueError(f'"{key}" ends with a message that is not to be trained on: leave the row out')
    check_calls([*prompt, *plain], tools)
    return plain


def prompt_of(row: Mapping[str, Any]) -> tuple[Messages, list[Any] | None]:
    """Return the prompt of a row that needs no answer, and its tools. Raises ValueError if there is no prompt."""
    if "prompt" not in row:
        raise ValueError(f'the row needs a "prompt"; its keys are {", ".join(map(str, row))}')
    if isinstance(row["prompt"], str):
        messages = [*earlier(row), {"role": "user", "content": text_of(row, "prompt")}]
    else:
        messages = messages_of(row, "prompt")
    return _before(with_system(row, messages)), tools_of(row)


VERDICTS = {"true": True, "false": False, "1": True, "0": False, "1.0": True, "0.0": False}


def _verdict(row: Mapping[str, Any]) -> bool | None:
    """Return the row's label as True for good and False for bad; None if it is neither."""
    return VERDICTS.get(str(row.get("label")).strip().lower())


def _rated(row: Mapping[str, Any]) -> Rated:
    good = _verdict(row)
    if good is None:
        raise ValueError(
            f'"label" must be true or false (or 1 or 0), not {row["label"]!r:.60}: correct it, or take the column '
            "out if it says nothing of good or bad"
        )
    sides = []
    for key, role in (("prompt", "user"), ("completion", "assistant")):
        value = row[key]
        sides.append(
            [{"role": role, "content": text_of(row, key)}] if isinstance(value, str) else messages_of(row, key)
        )
    prompt = _before(with_system(row, sides[0]))
    tools = tools_of(row)
    return Rated(prompt, _answer("completion", prompt, sides[1], tools), good, tools)


def _has(*keys: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda row: all(key in row for key in keys)


LAYOUTS = (
    Layout(
        "preferences (chosen, rejected)",
        "the better answer",
        _has("chosen", "rejected"),
        _preference,
        ("prompt", "question", "chosen", "rejected", "tools", *CONTEXT),
    ),
    Layout(
        "judged answers (prompt, completion, label)",
        "the answer, by its label",
        lambda row: _has("prompt", "completion")(row) and row.get("label") not in (None, ""),
        _rated,
        ("prompt", "completion", "label", "tools", "system"),
    ),
    Layout("chat (messages)", "the assistant's messages", _has("messages"), _chat, ("messages", "tools", "system")),
    Layout(
        "ShareGPT (conversations)",
        "the assistant's messages",
        _has("conversations"),
        _sharegpt,
        ("conversations", "tools", "system"),
    ),
    Layout(
        "Alpaca (instruction, input, output)",
        "the output",
        _has("instruction", "output"),
        _alpaca,
        ("instruction", "input", "output", "tools", "reasoning_content", *CONTEXT),
    ),
    Layout(
        "prompt and completion after a system prompt or a history",
        "the completion",
        lambda row: _has("prompt", "completion")(row) and any(key in row for key in CONTEXT),
        _completion_with_context,
        ("prompt", "completion", "tools", "reasoning_content", *CONTEXT),
    ),
    Layout(
        "prompt and completion",
        "the completion",
        _has("prompt", "completion"),
        _completion,
        ("prompt", "completion", "tools"),
    ),
    Layout(
        "question and answer",
        "the answer",
        lambda row: any(a in row and b in row for a, b in PAIRS),
        _pair,
        (*dict.fromkeys(itertools.chain(*PAIRS)), "input", "context", "tools", "reasoning_content", *CONTEXT),
    ),
    Layout("text", "every token", _has("text"), _text, ("text",), answers=False),
)
"""Layouts, in the order in which they are tried."""

KEYS = tuple(dict.fromkeys(key for layout in LAYOUTS for key in layout.keys))
"""Columns that some layout reads."""


def check_columns(columns: Mapping[str, str]) -> None:
    """Check that ``data.columns`` names only columns that a layout reads. Raises ValueError."""
    for key in columns:
        if key not in KEYS:
            near = difflib.get_close_matches(key, KEYS, 1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise ValueError(f"data.columns names {key}; known are {', '.join(KEYS)}{hint}")


def renamed(row: Mapping[str, Any], columns: Mapping[str, str]) -> Mapping[str, Any]:
    """Rename the row's columns to the names that layouts know.

    Args:
        columns: the row's name of each, by the name that is known. A row may lack some of them.
    """
    taken = set(columns.values())
    kept = {key: value for key, value in row.items() if key not in taken}
    return kept | {key: row[own] for key, own in columns.items() if own in row}


def form_of(row: Mapping[str, Any]) -> tuple[Layout, Form]:
    """Return a row's layout, and its content as a form.

    Raises:
        ValueError: no layout has these keys, or something in the row cannot be trained on.
    """
    layout = detect(row)
    form = layout.read(row)
    if layout.answers and "label" not in layout.keys and _verdict(row) is not None:
        raise ValueError(
            f'the row has a "label" of {row["label"]!r:.20}, and training would learn bad answers as well as good '
            'ones: take out the rows with bad ones and the column, or give "prompt", "completion" and "label" and set '
            'objective = "kto"'
        )
    return layout, form


def detect(row: Mapping[str, Any]) -> Layout:
    """Find the layout of a row by its keys.

    Raises:
        ValueError: no layout has these keys; the message names the keys and the known layouts.
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
    raise ValueError(
        f"no layout is known with the keys {keys}{hint}: name the columns by data.columns (--columns question=HEADER "
        f"--columns answer=HEADER), or use one of these layouts: {known}"
    )
