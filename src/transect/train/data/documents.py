"""Conversion of rows and text to documents: token ids, and a mask of the trained ones.

A chat is tokenized as the model will meet it when it serves. Trained on is what the assistant says, up to and with the
token that ends it.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ...text.chat_template import ChatTemplate
from ...text.inert import ChatRendering
from ...text.tokenizer import Tokenizer
from .files import DataFile, Row
from .layouts import (
    ALIKE,
    ChatExample,
    CompletionExample,
    Form,
    Layout,
    Preference,
    Rated,
    Text,
    check_columns,
    form_of,
    renamed,
)
from .messages import USED, Messages

Document = tuple[list[int], list[bool] | None]
"""(token ids, mask of trained tokens; None if all are trained)."""
MOST_PLACES = 5
THOUGHTS, THOUGHTS_END = "reasoning_content", "</think>"


@dataclass(slots=True)
class RowCounts:
    """The content of a file: its layout, rows that were read, and rows that were left out by reason."""

    name: str
    layout: str = ""
    trained: str = ""
    read: int = 0
    left_out: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[str]] = field(default_factory=dict)
    """Locations of the first ``MOST_PLACES`` rows that were left out, by reason."""
    ignored: Counter[str] = field(default_factory=Counter)
    """Number of rows with each ignored key."""
    absent: dict[str, str] = field(default_factory=dict)
    """Entries of ``data.columns`` that no row so far contains."""
    apart: int = 0
    """Chats that became a document for each answer, because the template renders earlier turns differently."""

    def leave_out(self, where: str, why: ValueError, *, skip: bool) -> None:
        """Count a row that cannot be used. Raises ValueError with its location, unless ``skip``."""
        if not skip:
            raise ValueError(f'{where}: {why}; data.on_bad_row = "skip" leaves such rows out and counts them') from None
        self.left_out[str(why)] += 1
        places = self.places.setdefault(str(why), [])
        if len(places) < MOST_PLACES:
            places.append(where)

    def problems(self) -> list[str]:
        """Return a line for each reason for leaving out rows, with the locations of the first."""
        return [self._problem(why, count) for why, count in self.left_out.items()]

    def _problem(self, why: str, count: int) -> str:
        first, *others = self.places[why]
        places = ", ".join([first, *(place.removeprefix(f"{self.name}, ") for place in others)])
        return f"{count} row{'s' * (count > 1)}: {why} (first: {places})"

    def unread(self) -> str:
        """Describe ignored keys, and columns that no row has, in one line; empty if there are none."""
        parts = [f"{key} ({count} row{'s' * (count > 1)})" for key, count in sorted(self.ignored.items())]
        found = [f"ignored keys: {', '.join(parts)}"] if parts else []
        if self.absent:
            names = ", ".join(f"{own!r} (data.columns.{key})" for key, own in self.absent.items())
            found.append(f"no row has the column {names}")
        return "; ".join(found)

    def __str__(self) -> str:
        what = f"{self.read} rows, {self.layout}; trained on: {self.trained}" if self.layout else "one text"
        what = "no row that can be used" if self.left_out and not self.read else what
        parts = [f"{self.name}: {what}", *(f"left out {problem}" for problem in self.problems()), self.unread()]
        if self.apart:
            why = "since the chat template changes earlier turns"
            parts.append(f"{self.apart} chats become a document for each answer, {why}")
        return "; ".join(filter(None, parts))


class Forms:
    """Reads the rows of files into their forms.

    Args:
        skip: leave rows out that cannot be used, and count them; False: the first one is an error.
        some: require a usable row if rows are left out; False if the rows may be a bad stretch of a file.
        columns: a file's name of a column by the name that layouts know.
        template: that will render chats; keys of messages that it does not mention count as ignored.

    Raises:
        ValueError: ``columns`` names a column that no layout reads.
    """

    def __init__(
        self,
        *,
        skip: bool = False,
        some: bool = True,
        columns: Mapping[str, str] | None = None,
        template: ChatTemplate | None = None,
    ) -> None:
        self._skip, self._some, self._columns = skip, some, columns or {}
        check_columns(self._columns)
        self._template = template
        self.tallies: list[RowCounts] = []

    def read(self, name: str, rows: Iterable[Row], use: Callable[[Form], Any]) -> Iterator[Any]:
        """Yield the result of ``use`` for each row.

        Raises:
            ValueError: a row that cannot be used, or one in another layout than those before it; the place is named.
        """
        tally = RowCounts(name, absent=dict(self._columns))
        self.tallies.append(tally)
        layout: Layout | None = None
        for where, row in rows:
            try:
                if isinstance(row, ValueError):
                    raise row
                tally.absent = {key: own for key, own in tally.absent.items() if own not in row}
                replaced = row.keys() & self._columns.keys() - set(self._columns.values())
                row = renamed(row, self._columns)
                found, form = form_of(row)
                if layout is not None and found is not layout:
                    raise ValueError(f"this row is {found.name}, and those before are {layout.name}")
                made = use(form)
            except ValueError as error:
                tally.leave_out(where, error, skip=self._skip)
                continue
            if layout is None:
                layout = found
                tally.layout, tally.trained = layout.name, layout.trained
            tally.read += 1
            tally.ignored.update(found.ignored(row))
            tally.ignored.update(replaced)
            tally.ignored.update(f"{key} of messages" for key in self._unread_keys(form))
            yield made
        if layout is None and tally.left_out and self._some:
            raise ValueError(str(tally))

    @cached_property
    def _thoughts(self) -> bool:
        """True if the template prints the thoughts of an answer without calls."""
        return self._template is not None and prints_thoughts(self._template)

    def _unread_keys(self, form: Form) -> set[str]:
        """Find nonempty keys of a form's messages that the template does not print."""
        if isinstance(form, Text | CompletionExample):
            return set()
        if isinstance(form, ChatExample):
            messages = form.messages
        else:
            answers = (form.completion,) if isinstance(form, Rated) else (form.chosen, form.rejected)
            messages = [*form.prompt, *(message for answer in answers for message in answer)]
        template = "" if self._template is None else self._template.sources
        keys = {key for message in messages for key, value in message.items() if value not in (None, "", [], {})} - USED
        found = {key for key in keys - {THOUGHTS} if key not in template}
        thinking = [message for message in messages if message.get(THOUGHTS)]
        beside_calls = self._thoughts or any(mark in template for mark in (THOUGHTS, "thinking", THOUGHTS_END))
        if any(not (beside_calls if message.get("tool_calls") else self._thoughts) for message in thinking):
            found.add(THOUGHTS)
        return found


def prints_thoughts(template: ChatTemplate) -> bool:
    """Return True if a template prints the thoughts of an answer without calls."""
    from ...text.tools.registry import for_template

    probe = "thoughts of a probe"
    messages = [{"role": "user", "content": "0"}, {"role": "assistant", "content": "1", THOUGHTS: probe}]
    told, variables = for_template(template.source, with_thoughts(messages, template.source), {}, apart=False)
    try:
        return probe in template.render(told, add_generation_prompt=False, **variables)
    except ValueError:  # it refuses the probe; rows will tell
        return True


def with_thoughts(messages: Any, template: str) -> Any:
    """Move thoughts to the beginning of the content, if the template expects them there."""
    if THOUGHTS in template or "thinking" in template or THOUGHTS_END not in template or not isinstance(messages, list):
        return messages
    return [
        {**message, "content": f"<think>\n{message[THOUGHTS]}\n{THOUGHTS_END}\n\n{message.get('content') or ''}"}
        if isinstance(message, Mapping) and message.get(THOUGHTS) and isinstance(message.get("content"), str | None)
        else message
        for message in messages
    ]


class Reader:
    """Reads documents for next-token prediction, with a model's tokenizer and chat template.

    ``skip``, ``some`` and ``columns`` are those of ``Forms``, ``turns`` that of ``DataConfig``. ``tallies`` has the
    rows that were found, a file at a time.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        template: ChatTemplate | None,
        *,
        skip: bool = False,
        some: bool = True,
        turns: str = "auto",
        columns: Mapping[str, str] | None = None,
    ) -> None:
        self._tokenizer, self._template, self._turns = tokenizer, template, turns
        self._forms = Forms(skip=skip, some=some, columns=columns, template=template)

    @property
    def tallies(self) -> list[RowCounts]:
        return self._forms.tallies

    def file(self, file: DataFile) -> Iterator[Document]:
        """Yield every document of a file that is not a token file. Raises ValueError, with the location, if it cannot
        be read."""
        if file.kind == "text":
            self.tallies.append(RowCounts(os.fspath(file.path), read=1))
            yield text_tokens(file.text(), self._tokenizer), None
        else:
            yield from self.rows(os.fspath(file.path), file.rows())

    def rows(self, name: str, rows: Iterable[Row]) -> Iterator[Document]:
        """Yield the documents of rows that were read already."""
        for documents in self._forms.read(name, rows, self._documents):
            yield from documents

    def _documents(self, form: Form) -> Sequence[Document]:
        if isinstance(form, Text):
            return [(text_tokens(form.text, self._tokenizer), None)]
        if isinstance(form, CompletionExample):
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
        options: dict[str, Any] = {"tools": form.tools, "first": form.first, "masked": form.masked}
        if self._turns != "apart":
            try:
                return [chat_tokens(*chat, **options)]
            except RenderedAnewError:
                if self._turns == "together":
                    raise
                self.tallies[-1].apart += 1
        return answers_apart(*chat, **options)


def turns_key(turns: str) -> str:
    """Return ``data.turns`` for comparison with data made before ``auto`` existed, which equals ``together`` wherever
    that was possible."""
    return "together" if turns == "auto" else turns


class RenderedAnewError(ValueError):
    """A template does not render a conversation as the continuation of its beginning."""


def text_tokens(text: str, tokenizer: Tokenizer) -> list[int]:
    """Tokenize a document as the model expects it, closed by the end-of-text token if there is one."""
    return [*tokenizer.encode(text, add_special_tokens=True), *tokenizer.eos_token_ids[:1]]


def completion_tokens(form: CompletionExample, tokenizer: Tokenizer) -> tuple[list[int], list[bool]]:
    """Tokenize a prompt and its completion, without a chat template; the prompt is not trained on."""
    prompt = tokenizer.encode(form.prompt, add_special_tokens=True)
    answer = [*tokenizer.encode(form.completion), *tokenizer.eos_token_ids[:1]]
    return prompt + answer, [False] * len(prompt) + [True] * len(answer)


def chat_tokens(
    messages: Any,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    *,
    tools: list[Any] | None = None,
    first: int = 0,
    masked: Collection[int] = (),
) -> tuple[list[int], list[bool]]:
    """Tokenize a chat as a server renders it; also return a mask of the trained tokens.

    Trained are the assistant's messages from ``first`` on that are not among the ``masked``. Each answer is tokenized
    on its own after the text that opens it, as when a server renders the prompt and the model continues. As there, only
    the template writes special tokens: their spellings in messages are text.

    Raises:
        ValueError: malformed messages, or none of the assistant's.
        RenderedAnewError: the template does not render a conversation as a continuation of its beginning.
    """
    chat = _Rendered(messages, tokenizer, template, tools)
    ids: list[int] = []
    trained: list[bool] = []
    done = ""
    for turn in chat.answers:
        opened, answered = chat.opened(turn), chat.answered(turn)
        if not (opened.startswith(done) and answered.startswith(opened)):
            raise RenderedAnewError(
                "the chat template changes earlier turns with every answer, so answers cannot be told apart: set "
                'data.turns = "auto" or "apart", or data.chat_template to a training template'
            )
        before, answer = chat.encode(opened[len(done) :]), chat.encode(answered[len(opened) :])
        ids += before + answer
        own = turn - chat.added
        learns = own >= first and own not in masked
        if learns:
            chat.check_answer(turn, answer)
        trained += [False] * len(before) + (said(answer, tokenizer) if learns else [False] * len(answer))
        done = answered
    chat.check(trained)
    return ids, trained


def answers_apart(
    messages: Any,
    tokenizer: Tokenizer,
    template: ChatTemplate,
    *,
    tools: list[Any] | None = None,
    first: int = 0,
    masked: Collection[int] = (),
) -> list[tuple[list[int], list[bool]]]:
    """Return a document for each answer that ``chat_tokens`` trains on, after the prompt that a server would give the
    model at that turn; only the answer is trained on. Raises ValueError as ``chat_tokens`` does."""
    chat = _Rendered(messages, tokenizer, template, tools)
    made = []
    for turn in chat.answers:
        if turn - chat.added < first or turn - chat.added in masked:
            continue
        opened, answered = chat.opened(turn), chat.answered(turn)
        if not answered.startswith(opened):
            raise ValueError("the chat template does not render an answer as the continuation of its prompt")
        before, answer = chat.encode(opened), chat.encode(answered[len(opened) :])
        chat.check_answer(turn, answer)
        made.append((before + answer, [False] * len(before) + said(answer, tokenizer)))
    chat.check(made)
    return made


def last_answer(
    prompt: Messages, answer: Messages, tools: list[Any] | None, tokenizer: Tokenizer, template: ChatTemplate
) -> tuple[list[int], list[bool]]:
    """Return the document of a prompt and an answer, whose last message is trained on. Raises ValueError as above."""
    messages = [*prompt, *answer]
    return answers_apart(messages, tokenizer, template, tools=tools, first=len(messages) - 1)[0]


def pair_documents(
    pair: Preference, tokenizer: Tokenizer, template: ChatTemplate
) -> list[tuple[list[int], list[bool]]]:
    """Return the documents of the chosen and of the rejected answer. Raises ValueError as above, or if their tokens are
    equal."""
    sides = [
        last_answer(pair.prompt, answer, pair.tools, tokenizer, template) for answer in (pair.chosen, pair.rejected)
    ]
    if sides[0] == sides[1]:
        raise ValueError(f"{ALIKE} to the model: the chat template prints nothing of what differs")
    return sides


class _Rendered:
    """A chat in which messages cannot spell special tokens, and the texts of its beginnings."""

    def __init__(self, messages: Any, tokenizer: Tokenizer, template: ChatTemplate, tools: list[Any] | None) -> None:
        from ...text.tools.registry import for_template

        source = template.tool_source if tools else template.source
        messages = with_thoughts(messages, source)
        told, variables = for_template(source, messages, {"tools": tools} if tools else {}, apart=False)
        self.added = len(told) - len(messages) if told is not messages else 0
        """Messages before the chat's own: one that describes its tools."""
        self._inert = ChatRendering(tokenizer, told, variables)
        self._template, self._tokenizer = template, tokenizer
        self._messages: Any = self._inert.messages
        turns = self._messages if isinstance(self._messages, list) else []
        self.answers = [
            turn for turn, each in enumerate(turns) if isinstance(each, Mapping) and each.get("role") == "assistant"
        ]

    def opened(self, turn: int) -> str:
        """Return the text before the answer ``turn``, with the header that opens it."""
        if turn:
            return self._render(self._messages[:turn], add_generation_prompt=True)
        return self._header(self._messages[0])

    def answered(self, turn: int) -> str:
        """Return the chat up to and including the answer ``turn``."""
        return self._render(self._messages[: turn + 1], add_generation_prompt=False)

    def encode(self, text: str) -> list[int]:
        ids: list[int] = self._inert.encoder.encode(text, parse_special=True)
        return ids

    def check_answer(self, turn: int, answer: Sequence[int]) -> None:
        """Check that a trained answer is more than special tokens. Raises ValueError."""
        if not self._tokenizer.decode(answer, skip_special_tokens=True).strip():
            raise ValueError(
                f"the chat template prints nothing of the answer messages[{turn - self.added}], so that it would train "
                'the model to answer nothing: give it "weight": 0, take it out, or set data.chat_template'
            )

    def check(self, found: Any) -> None:
        """Check that some message is trained. Raises ValueError, with the error in the messages if there is one."""
        if not any(found):
            self._render(self._messages, add_generation_prompt=True)
            raise ValueError("the chat has no message of the assistant to learn from")

    def _render(self, messages: Any, *, add_generation_prompt: bool) -> str:
        try:
            return self._template.render(messages, add_generation_prompt, **self._inert.variables)
        except ValueError as error:
            raise ValueError(self._inert.shown(str(error))) from error

    def _header(self, message: Mapping[str, Any]) -> str:
        """Return a template's text before the first message, such as a default system prompt, and the message's
        role."""
        texts = [
            self._render([{**message, "content": content}], add_generation_prompt=False)
            for content in (message.get("content"), "0", "1")
            if isinstance(content, str)
        ]
        shared = zip(*texts, strict=False)
        size = next((at for at, letters in enumerate(shared) if len(set(letters)) > 1), min(map(len, texts)))
        return texts[0][:size]


def said(answer: Sequence[int], tokenizer: Tokenizer) -> list[bool]:
    """Mark the tokens of a rendered answer that the assistant generates: up to and including the last end token, or
    all."""
    ends = [i + 1 for i, token in enumerate(answer) if token in tokenizer.eos_token_ids]
    until = ends[-1] if ends else len(answer)
    return [i < until for i in range(len(answer))]
