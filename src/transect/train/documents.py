"""Rows and text to documents: token ids, and which of them are trained on.

A chat is tokenized as the model will meet it when it serves. Trained on is what the assistant says, up to and with the
token that ends it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..text.chat_template import ChatTemplate
from ..text.tokenizer import Tokenizer
from .files import DataFile, Row
from .layouts import Completion, Form, Layout, Preference, Text, detect

Document = tuple[list[int], list[bool] | None]
"""Token ids, and which of them are trained on; None: all."""


@dataclass(slots=True)
class Tally:
    """What was found in a file: its layout, rows that were read, and rows that were left out by reason."""

    name: str
    layout: str = ""
    trained: str = ""
    read: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    """The place of the first row that was left out for a reason."""

    def __str__(self) -> str:
        what = f"{self.read} rows, {self.layout}; trained on: {self.trained}" if self.layout else "one text"
        parts = [f"{self.name}: {what}"]
        parts += [f"left out {n} rows: {why} (first: {self.first[why]})" for why, n in self.left_out.items()]
        return "; ".join(parts)


class Forms:
    """The rows of files in their forms.

    Args:
        skip: leave rows out that cannot be used, and count them; False: the first one is an error.
    """

    def __init__(self, *, skip: bool = False) -> None:
        self._skip = skip
        self.tallies: list[Tally] = []

    def read(self, name: str, rows: Iterable[Row], use: Callable[[Form], Any]) -> Iterator[Any]:
        """What ``use`` makes of each row.

        Raises:
            ValueError: a row that cannot be used, or one in another layout than those before it; the place is named.
        """
        tally = Tally(name)
        self.tallies.append(tally)
        layout: Layout | None = None
        for where, row in rows:
            try:
                if isinstance(row, ValueError):
                    raise row
                found = detect(row)
                if layout is not None and found is not layout:
                    raise ValueError(f"this row is {found.name}, and those before are {layout.name}")
                made = use(found.read(row))
            except ValueError as error:
                if not self._skip:
                    raise ValueError(
                        f'{where}: {error}; data.on_bad_row = "skip" leaves such rows out and counts them'
                    ) from None
                tally.left_out[str(error)] += 1
                tally.first.setdefault(str(error), where)
                continue
            if layout is None:
                layout = found
                tally.layout, tally.trained = layout.name, layout.trained
            tally.read += 1
            yield made
        if layout is None and tally.left_out:
            raise ValueError(f"{name} has no row that can be used: {tally}")


class Reader:
    """Documents of files for next-token prediction, with a model's tokenizer and chat template.

    ``tallies`` tells what was found, a file at a time.
    """

    def __init__(self, tokenizer: Tokenizer, template: ChatTemplate | None, *, skip: bool = False) -> None:
        self._tokenizer, self._template = tokenizer, template
        self._forms = Forms(skip=skip)

    @property
    def tallies(self) -> list[Tally]:
        return self._forms.tallies

    def file(self, file: DataFile) -> Iterator[Document]:
        """Every document of a file that is no token file. ValueError where it cannot be read; the place is named."""
        if file.kind == "text":
            self.tallies.append(Tally(os.fspath(file.path), read=1))
            yield text_tokens(file.text(), self._tokenizer), None
        else:
            yield from self.rows(os.fspath(file.path), file.rows())

    def rows(self, name: str, rows: Iterable[Row]) -> Iterator[Document]:
        """Documents of rows that were read already."""
        return self._forms.read(name, rows, self._document)

    def _document(self, form: Form) -> Document:
        if isinstance(form, Text):
            return text_tokens(form.text, self._tokenizer), None
        if isinstance(form, Completion):
            return completion_tokens(form, self._tokenizer)
        if isinstance(form, Preference):
            raise ValueError('rows with "chosen" and "rejected" are preferences: set objective = "dpo"')
        if self._template is None:
            raise ValueError("this is a chat and the model brings no chat template: set data.chat_template")
        return chat_tokens(form.messages, self._tokenizer, self._template, tools=form.tools, first=form.first)


def text_tokens(text: str, tokenizer: Tokenizer) -> list[int]:
    """A document as the model expects it, closed by the end-of-text token if there is one."""
    return [*tokenizer.encode(text, add_special_tokens=True), *tokenizer.eos_token_ids[:1]]


def completion_tokens(form: Completion, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """A prompt and what follows it, without a chat template; the prompt is not trained on."""
    prompt = tokenizer.encode(form.prompt, add_special_tokens=True)
    answer = [*tokenizer.encode(form.completion), *tokenizer.eos_token_ids[:1]]
    return prompt + answer, [False] * len(prompt) + [True] * len(answer)


def chat_tokens(
    messages: Any, tokenizer: Tokenizer, template: ChatTemplate, *, tools: list[Any] | None = None, first: int = 0
) -> tuple[list[int], list[bool]]:
    """A chat as the model will meet it when it serves, and which tokens the assistant said from message ``first`` on.

    Each answer is tokenized on its own after the text that opens it, as it is when a server renders the prompt and the
    model goes on.

    Raises:
        ValueError: malformed messages, none of the assistant's, or a template that does not render a conversation as a
            continuation of its beginning.
    """
    variables: dict[str, Any] = {"tools": tools} if tools else {}
    ids: list[int] = []
    trained: list[bool] = []
    done = ""
    for turn, message in enumerate(messages if isinstance(messages, list) else []):
        if not isinstance(message, Mapping) or message.get("role") != "assistant":
            continue
        if turn:
            opened = template.render(messages[:turn], add_generation_prompt=True, **variables)
        else:
            opened = header(message, template, **variables)
        answered = template.render(messages[: turn + 1], add_generation_prompt=False, **variables)
        if not (opened.startswith(done) and answered.startswith(opened)):
            raise ValueError(
                "the chat template renders earlier turns anew with every answer, so answers cannot be told apart: set "
                "data.chat_template to a training template, or split the chats"
            )
        before = tokenizer.encode(opened[len(done) :], parse_special=True)
        answer = tokenizer.encode(answered[len(opened) :], parse_special=True)
        ids += before + answer
        trained += [False] * len(before) + (said(answer, tokenizer) if turn >= first else [False] * len(answer))
        done = answered
    if not any(trained):
        template.render(messages, **variables)  # says what is wrong with them, if that is it
        raise ValueError("the chat has no message of the assistant to learn from")
    return ids, trained


def header(message: Mapping[str, Any], template: ChatTemplate, **variables: Any) -> str:
    """What a template writes before the content of a first message: a default system prompt, say, and the role."""
    texts = [
        template.render([{**message, "content": content}], add_generation_prompt=False, **variables)
        for content in (message.get("content"), "0", "1")
        if isinstance(content, str)
    ]
    shared = zip(*texts, strict=False)
    size = next((at for at, letters in enumerate(shared) if len(set(letters)) > 1), min(map(len, texts)))
    return texts[0][:size]


def said(answer: Sequence[int], tokenizer: Tokenizer) -> list[bool]:
    """Which tokens of a rendered answer the assistant said: up to and with the last that ends one, or all."""
    ends = [i + 1 for i, token in enumerate(answer) if token in tokenizer.eos_token_ids]
    until = ends[-1] if ends else len(answer)
    return [i < until for i in range(len(answer))]
