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
from ..text.inert import ChatRendering
from ..text.tokenizer import Tokenizer
from ..text.tools.registry import for_template
from .files import DataFile, Row
from .layouts import Completion, Form, Layout, Preference, Rated, Text, detect

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

    def leave_out(self, where: str, why: ValueError, *, skip: bool) -> None:
        """Count a row that cannot be used. ValueError with its place, unless such rows are to ``skip``."""
        if not skip:
            raise ValueError(f'{where}: {why}; data.on_bad_row = "skip" leaves such rows out and counts them') from None
        self.left_out[str(why)] += 1
        self.first.setdefault(str(why), where)

    def __str__(self) -> str:
        what = f"{self.read} rows, {self.layout}; trained on: {self.trained}" if self.layout else "one text"
        what = "no row that can be used" if self.left_out and not self.read else what
        parts = [f"{self.name}: {what}"]
        for why, count in self.left_out.items():
            parts.append(f"left out {count} row{'s' * (count > 1)}: {why} (first: {self.first[why]})")
        return "; ".join(parts)


class Forms:
    """The rows of files in their forms.

    Args:
        skip: leave rows out that cannot be used, and count them; False: the first one is an error.
        some: where rows are left out, some of them must be usable; False: they may be a bad stretch of a file.
    """

    def __init__(self, *, skip: bool = False, some: bool = True) -> None:
        self._skip, self._some = skip, some
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
                tally.leave_out(where, error, skip=self._skip)
                continue
            if layout is None:
                layout = found
                tally.layout, tally.trained = layout.name, layout.trained
            tally.read += 1
            yield made
        if layout is None and tally.left_out and self._some:
            raise ValueError(str(tally))


class Reader:
    """Documents of files for next-token prediction, with a model's tokenizer and chat template.

    ``skip`` and ``some`` are those of ``Forms``. ``apart``: each answer of a chat is a document. ``tallies`` tells what
    was found, a file at a time.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        skip: bool = False,
        some: bool = True,
        apart: bool = False,
    ) -> None:
        self._tokenizer, self._template, self._apart = tokenizer, template, apart
        self._forms = Forms(skip=skip, some=some)

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
        for documents in self._forms.read(name, rows, self._documents):
            yield from documents

    def _documents(self, form: Form) -> Sequence[Document]:
        if isinstance(form, Text):
            return [(text_tokens(form.text, self._tokenizer), None)]
        if isinstance(form, Completion):
            return [completion_tokens(form, self._tokenizer)]
        if isinstance(form, Preference):
            raise ValueError('rows with "chosen" and "rejected" are preferences: set objective = "dpo"')
        if isinstance(form, Rated):
            raise ValueError(
                'rows with a "label" of true or false are judged answers: set objective = "kto", or remove the label'
            )
        if self._template is None:
            raise ValueError("this is a chat and the model brings no chat template: set data.chat_template")
        chat = form.messages, self._tokenizer, self._template
        if self._apart:
            return answers_apart(*chat, tools=form.tools, first=form.first)
        return [chat_tokens(*chat, tools=form.tools, first=form.first)]


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
    model goes on. As there, only the template writes special tokens: their spellings in messages are text.

    Raises:
        ValueError: malformed messages, none of the assistant's, or a template that does not render a conversation as a
            continuation of its beginning.
    """
    chat = _Rendered(messages, tokenizer, template, tools)
    ids: list[int] = []
    trained: list[bool] = []
    done = ""
    for turn in chat.answers:
        opened, answered = chat.opened(turn), chat.answered(turn)
        if not (opened.startswith(done) and answered.startswith(opened)):
            raise ValueError(
                "the chat template renders earlier turns anew with every answer, so answers cannot be told apart: set "
                'data.turns = "apart", or data.chat_template to a training template'
            )
        before, answer = chat.encode(opened[len(done) :]), chat.encode(answered[len(opened) :])
        ids += before + answer
        trained += [False] * len(before) + (
            said(answer, tokenizer) if turn >= first + chat.added else [False] * len(answer)
        )
        done = answered
    chat.check(trained)
    return ids, trained


def answers_apart(
    messages: Any, tokenizer: Tokenizer, template: ChatTemplate, *, tools: list[Any] | None = None, first: int = 0
) -> list[tuple[list[int], list[bool]]]:
    """A document for each answer from message ``first`` on, after what a server would show the model at that turn; only
    the answer is trained on. ValueError as for ``chat_tokens``."""
    chat = _Rendered(messages, tokenizer, template, tools)
    made = []
    for turn in chat.answers:
        if turn < first + chat.added:
            continue
        opened, answered = chat.opened(turn), chat.answered(turn)
        if not answered.startswith(opened):
            raise ValueError("the chat template does not render an answer as the continuation of its prompt")
        before, answer = chat.encode(opened), chat.encode(answered[len(opened) :])
        made.append((before + answer, [False] * len(before) + said(answer, tokenizer)))
    chat.check(made)
    return made


class _Rendered:
    """A chat whose messages can spell no special token, and the texts of its beginnings."""

    def __init__(self, messages: Any, tokenizer: Tokenizer, template: ChatTemplate, tools: list[Any] | None) -> None:
        source = template.tool_source if tools else template.source
        told, variables = for_template(source, messages, {"tools": tools} if tools else {}, apart=False)
        self.added = len(told) - len(messages) if told is not messages else 0
        """Messages before the chat's own: one that describes its tools."""
        self._inert = ChatRendering(tokenizer, told, variables)
        self._template = template
        self._messages: Any = self._inert.messages
        turns = self._messages if isinstance(self._messages, list) else []
        self.answers = [
            turn for turn, each in enumerate(turns) if isinstance(each, Mapping) and each.get("role") == "assistant"
        ]

    def opened(self, turn: int) -> str:
        """What stands before the answer ``turn``, up to where the model goes on."""
        if turn:
            return self._render(self._messages[:turn], add_generation_prompt=True)
        return self._header(self._messages[0])

    def answered(self, turn: int) -> str:
        """The chat up to and with the answer ``turn``."""
        return self._render(self._messages[: turn + 1], add_generation_prompt=False)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._inert.encoder.encode(text, parse_special=True)
        return ids

    def check(self, found: Any) -> None:
        """ValueError if there is nothing to learn from, with what is wrong with the messages, if that is it."""
        if not any(found):
            self._render(self._messages, add_generation_prompt=True)
            raise ValueError("the chat has no message of the assistant to learn from")

    def _render(self, messages: Any, *, add_generation_prompt: bool) -> str:
        try:
            return self._template.render(messages, add_generation_prompt, **self._inert.variables)
        except ValueError as error:
            raise ValueError(self._inert.shown(str(error))) from error

    def _header(self, message: Mapping[str, Any]) -> str:
        """What a template writes before the content of a first message: a default system prompt, say, and the role."""
        texts = [
            self._render([{**message, "content": content}], add_generation_prompt=False)
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
