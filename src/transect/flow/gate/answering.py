"""Questions with answers, and checkers that decide exactly if an answer is right."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ...train.data.files import find
from ...train.data.layouts import prompt_of
from ...train.data.messages import Messages

Checker = Callable[[str, Mapping[str, Any]], float | None]
QUESTIONS = ("question", "query", "instruction")
ANSWERS = ("completion", "response", "output")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")


def read_questions(path: Path) -> list[tuple[Messages, dict[str, Any]]]:
    """Read the rows of a file: the conversation before the answer, and the row with its ``answer``.

    Raises:
        ValueError: the file cannot be read, or a row has no question; its place is named.
    """
    found = []
    for file in find([str(path)], "gate"):
        for where, row in file.rows():
            try:
                if isinstance(row, ValueError):
                    raise row
                values = dict(row)
                for key in QUESTIONS:
                    if key in values and "prompt" not in values:
                        values["prompt"] = values[key]
                for key in ANSWERS:
                    if key in values and "answer" not in values:
                        values["answer"] = values[key]
                found.append((prompt_of(values)[0], values))
            except ValueError as error:
                raise ValueError(f"{where}: {error}") from None
    if not found:
        raise ValueError(f"{path} holds no questions: give a file that has some")
    return found


def exact(answer: str, record: Mapping[str, Any]) -> float:
    """Return 1 if the answer, stripped, equals the row's ``answer``."""
    return float(answer.strip() == str(record.get("answer", "")).strip())


def contains(answer: str, record: Mapping[str, Any]) -> float:
    """Return 1 if the row's ``answer`` is in the answer, in any case of letters."""
    return float(str(record.get("answer", "")).strip().lower() in answer.lower())


def number(answer: str, record: Mapping[str, Any]) -> float:
    """Return 1 if the first number of the answer equals the first one of the row's ``answer``."""
    mine, right = NUMBER.search(answer), NUMBER.search(str(record.get("answer", "")))
    return float(mine is not None and right is not None and _value(mine[0]) == _value(right[0]))


def _value(text: str) -> float:
    return float(text.replace(",", ""))


CHECKERS: dict[str, Checker] = {"exact": exact, "contains": contains, "number": number}


def checker_of(name: str, path: Callable[[str], Path]) -> Checker:
    """Return a checker by name, or the function that ``path/to/file.py:function`` names, as for rewards of GRPO.

    Raises:
        ValueError: there is none.
    """
    if name in CHECKERS:
        return CHECKERS[name]
    place, _, function = name.rpartition(":")
    if not place:
        raise ValueError(f"check must be one of {', '.join(CHECKERS)} or FILE.py:FUNCTION, not {name!r}")
    from ...train.objectives.rewards import reward_function

    return reward_function(f"{path(place)}:{function}" if place.endswith(".py") else name)


def program_of(name: str) -> tuple[str, ...]:
    """Return the Python file that ``checker_of`` would read; empty for a built-in checker or a module."""
    place = name.rpartition(":")[0]
    return (place,) if place.endswith(".py") else ()


def verdict_of(checker: Checker, answer: str, record: Mapping[str, Any]) -> int:
    """Return 1 if a checker calls an answer right, else 0. Raises ValueError if the checker fails."""
    try:
        return int((checker(answer, record) or 0) > 0.5)
    except Exception as error:  # the function is the user's: anything may happen in it
        raise ValueError(f"check failed on {answer!r:.200} ({type(error).__name__}: {error}): correct it") from error
