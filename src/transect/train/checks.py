"""Whether files can be trained on: how each is laid out, how many rows and tokens it gives, and what is wrong."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from ..text.chat_template import ChatTemplate
from ..text.tokenizer import Tokenizer
from .documents import Forms, answers_apart, chat_tokens, completion_tokens, text_tokens
from .files import DataFile, find
from .layouts import Chat, Completion, Form, Preference, Rated, Text


@dataclass(slots=True)
class Found:
    """What is in a file. ``problems``: reasons why rows, or the whole file, cannot be used, with a count."""

    name: str
    layout: str = ""
    trained: str = ""
    rows: int = 0
    tokens: int = 0
    problems: list[str] = field(default_factory=list)


def check_files(names: Sequence[str], tokenizer: Tokenizer, template: ChatTemplate | None) -> Iterator[Found]:
    """One ``Found`` for each file; nothing that is wrong with one keeps the others from being looked at."""
    for name in names:
        try:
            files = find([name])
        except ValueError as error:
            yield Found(name, problems=[str(error)])
            continue
        for file in files:
            yield _check(file, tokenizer, template)


def _check(file: DataFile, tokenizer: Tokenizer, template: ChatTemplate | None) -> Found:
    found = Found(str(file.path), layout=file.kind, trained="every token")
    forms = Forms(skip=True, some=False)
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
        found.problems += [
            f"{count} row{'s' * (count > 1)}: {why} (first: {tally.first[why]})"
            for why, count in tally.left_out.items()
        ]
    if not found.rows and not found.problems and file.kind != "tokens":
        found.problems.append(f"{found.name} holds no rows")
    return found


def _tokens(form: Form, tokenizer: Tokenizer, template: ChatTemplate | None) -> int:
    """How many tokens a row gives; ValueError if it cannot be used."""
    if isinstance(form, Text):
        return len(text_tokens(form.text, tokenizer))
    if isinstance(form, Completion):
        return len(completion_tokens(form, tokenizer)[0])
    if template is None:
        raise ValueError("this is a chat and the model brings no chat template")
    if isinstance(form, Preference | Rated):
        answers = (form.completion,) if isinstance(form, Rated) else (form.chosen, form.rejected)
        sides = [[*form.prompt, *answer] for answer in answers]
        return sum(
            len(ids)
            for side in sides
            for ids, _ in answers_apart(side, tokenizer, template, tools=form.tools, first=len(side) - 1)
        )
    assert isinstance(form, Chat)
    return len(chat_tokens(form.messages, tokenizer, template, tools=form.tools, first=form.first)[0])
