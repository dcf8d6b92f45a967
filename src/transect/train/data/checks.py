"""A check of files before a run: layout, rows and tokens of each, unusable rows, unread keys."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...text.chat_template import ChatTemplate
from ...text.tokenizer import Tokenizer
from .documents import (
    Forms,
    RenderedAnewError,
    answers_apart,
    chat_tokens,
    completion_tokens,
    last_answer,
    pair_documents,
    text_tokens,
)
from .files import DataFile, find
from .layouts import ChatExample, CompletionExample, Form, Preference, Rated, Text


@dataclass(slots=True)
class FileCheck:
    """The content of a file. ``problems``: reasons why rows, or the whole file, cannot be used, with a count.
    ``unread``: keys that are not used."""

    name: str
    layout: str = ""
    trained: str = ""
    rows: int = 0
    tokens: int = 0
    problems: list[str] = field(default_factory=list)
    unread: str = ""


def check_files(
    names: Sequence[str],
    tokenizer: Tokenizer,
    template: ChatTemplate | None,
    columns: Mapping[str, str] | None = None,
) -> Iterator[FileCheck]:
    """Check each file; an error in one does not stop the check of the others. ``columns``: of ``Forms``."""
    for name in names:
        try:
            files = find([name])
        except ValueError as error:
            yield FileCheck(name, problems=[str(error)])
            continue
        for file in files:
            yield _check(file, tokenizer, template, columns)


def _check(
    file: DataFile, tokenizer: Tokenizer, template: ChatTemplate | None, columns: Mapping[str, str] | None
) -> FileCheck:
    found = FileCheck(str(file.path), layout=file.kind, trained="every token")
    forms = Forms(skip=True, some=False, columns=columns, template=template)
    try:
        if file.kind == "text":
            text = file.text()
            if not text.strip():
                raise ValueError(f"{found.name} holds no text")
            found.rows, found.tokens = 1, len(text_tokens(text, tokenizer))
        elif file.kind != "tokens":
            for size in forms.read(found.name, file.rows(), lambda form: _tokens(form, tokenizer, template)):
                found.tokens += size
    except ValueError as error:
        found.problems.append(str(error))
    for tally in forms.tallies:
        found.layout, found.trained, found.rows = tally.layout or file.kind, tally.trained, tally.read
        found.problems += tally.problems()
        found.unread = tally.unread()
    if not found.rows and not found.problems and file.kind != "tokens":
        found.problems.append(f"{found.name} holds no rows")
    return found


def _tokens(form: Form, tokenizer: Tokenizer, template: ChatTemplate | None) -> int:
    """Count the tokens of a row. Raises ValueError if it cannot be used."""
    if isinstance(form, Text):
        return len(text_tokens(form.text, tokenizer))
    if isinstance(form, CompletionExample):
        return len(completion_tokens(form, tokenizer)[0])
    if template is None:
        raise ValueError("this is a chat and the model brings no chat template")
    if isinstance(form, Preference):
        return sum(len(ids) for ids, _ in pair_documents(form, tokenizer, template))
    if isinstance(form, Rated):
        return len(last_answer(form.prompt, form.completion, form.tools, tokenizer, template)[0])
    assert isinstance(form, ChatExample)
    chat = form.messages, tokenizer, template
    options: dict[str, Any] = {"tools": form.tools, "first": form.first, "masked": form.masked}
    try:
        return len(chat_tokens(*chat, **options)[0])
    except RenderedAnewError:
        return sum(len(ids) for ids, _ in answers_apart(*chat, **options))
