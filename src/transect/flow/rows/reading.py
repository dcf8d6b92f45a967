"""Rows of a flow's data: read with the trainer's layouts, each with its texts and the hash of its content."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...train.data.files import DataFile, find
from ...train.data.layouts import ChatExample, CompletionExample, Form, Preference, Text, form_of, renamed
from ...train.data.messages import Messages
from ..digests import canonical, key_of


@dataclass(frozen=True, slots=True)
class DataRow:
    """A row that can be trained on.

    Attributes:
        values: its columns, by the names that layouts know.
        layout: name of its layout.
        prompt: text of its questions; of rows without a question, all text.
        answer: text of the trained answer; empty without one.
        place: file and line.
        id: hash of ``values``.
        group: value of the column that keeps rows together; empty without one.
    """

    values: Mapping[str, Any]
    layout: str
    prompt: str
    answer: str
    place: str
    id: str
    group: str = ""


def read_rows(
    names: Sequence[str], columns: Mapping[str, str], group: str, bad: Counter[str] | None
) -> Iterator[DataRow]:
    """Read the rows of files.

    Args:
        columns: as ``data.columns`` of a training run.
        group: column of ``DataRow.group``; empty for none.
        bad: counts rows that cannot be used, by reason; None makes the first one an error.

    Raises:
        ValueError: a file or row cannot be used, or rows have different layouts; its place is named.
    """
    first = ""
    for file in find(list(names), "data.files"):
        if file.kind == "tokens":
            raise ValueError(
                f"{file.path} holds tokens, and data.files needs text or rows: name the file they are from"
            )
        for where, row in _rows_of(file):
            try:
                if isinstance(row, ValueError):
                    raise row
                row = renamed(row, columns)
                layout, form = form_of(row)
                first = first or layout.name
                if layout.name != first:
                    raise ValueError(f"this row is {layout.name}, and those before are {first}")
            except ValueError as error:
                if bad is None:
                    raise ValueError(
                        f'{where}: {error}; data.on_bad_row = "skip" leaves such rows out and counts them'
                    ) from None
                bad[str(error)] += 1
                continue
            values = {key: value for key, value in row.items() if key in layout.keys}
            prompt, answer = texts_of(form)
            owner = row.get(group) if group else None
            yield DataRow(
                values,
                layout.name,
                prompt or answer,
                answer,
                where,
                key_of(values),
                "" if owner is None else str(owner),
            )


def _rows_of(file: DataFile) -> Iterator[tuple[str, Mapping[str, Any] | ValueError]]:
    """Yield rows; those of a text are its paragraphs."""
    if file.kind != "text":
        yield from file.rows()
        return
    for number, part in enumerate(filter(str.strip, file.text().split("\n\n")), 1):
        yield f"{file.path}, paragraph {number}", {"text": part.strip()}


def texts_of(form: Form) -> tuple[str, str]:
    """Return the text of a form's questions and of its trained answer; the system prompt is in neither."""
    if isinstance(form, Text):
        return "", form.text
    if isinstance(form, CompletionExample):
        return form.prompt, form.completion
    if isinstance(form, ChatExample):
        return _said(form.messages, "user"), _said(form.messages, "assistant")
    answer = form.chosen if isinstance(form, Preference) else form.completion
    return _said(form.prompt, "user"), _said(answer, "assistant")


def _said(messages: Messages, role: str) -> str:
    contents = [message.get("content") for message in messages if message.get("role") == role]
    return "\n".join(text if isinstance(text, str) else canonical(text).decode() for text in contents if text)


def write_rows(rows: Sequence[DataRow]) -> bytes:
    """Return rows as JSON lines."""
    return b"".join(canonical(dict(row.values)) + b"\n" for row in rows)


def prompts_in(path: Path) -> list[str]:
    """Read the questions of a benchmark's file: rows of a layout, or with a ``prompt`` or ``question`` alone.

    Raises:
        ValueError: the file cannot be read, or a row has no question.
    """
    found = []
    for file in find([str(path)], "data.benchmarks"):
        for where, row in _rows_of(file):
            if isinstance(row, ValueError):
                raise ValueError(f"{where}: {row}")
            asked = next((row[key] for key in ("prompt", "question", "text") if row.get(key)), None)
            if isinstance(asked, str):
                found.append(asked)
            elif isinstance(asked or row.get("messages"), list):
                found.append(_said(asked or row["messages"], "user"))
            else:
                found.append("\n".join(filter(None, texts_of(form_of(row)[1]))))
    return found
