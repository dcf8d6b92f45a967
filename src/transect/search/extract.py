"""Extract the short answer from a text, so that texts can vote: by name, because a request brings no code."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal, get_args

Extractor = Literal["auto", "number", "boxed", "line", "choice", "text"]
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_CHOICE = re.compile(r"\b([A-J])\b")
_SAID = re.compile(r"(?:answer|result)\s*(?:(?:is|:|=)\s*)+", re.IGNORECASE)
MOST_CHARACTERS = 20_000
"""Characters at the end of a text that are searched."""


def number(text: str) -> str | None:
    """Return the last number, without commas and trailing zeros; None if there is none."""
    found = _NUMBER.findall(text)
    return _plain_number(found[-1]) if found else None


def boxed(text: str) -> str | None:
    r"""Return the contents of the last ``\boxed{...}``; None if there is none."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    depth, begin = 1, start + len("\\boxed{")
    for end in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if not depth:
            return text[begin:end].strip()
    return None


def line(text: str) -> str | None:
    """Return the last line that is not blank, without marks around it; None if there is none."""
    lines = [each.strip() for each in text.splitlines() if each.strip()]
    return lines[-1].strip("*_`\"' .").strip() or None if lines else None


def choice(text: str) -> str | None:
    """Return the last single capital letter of A to J; None if there is none."""
    found = _CHOICE.findall(text)
    return found[-1] if found else None


def whole(text: str) -> str | None:
    """Return the text with single spaces; None if it is blank."""
    return " ".join(text.split()) or None


def auto(text: str) -> str | None:
    """Return what is boxed; else the rest of the line after the last "answer is" or "answer:"; else the last number;
    else the last line."""
    found = boxed(text)
    if found is not None:
        return found
    said = list(_SAID.finditer(text))
    if said:
        rest = text[said[-1].end() :].split("\n", 1)[0].strip("*_`\"' .$")
        if rest:
            return number(rest) or rest
    return number(text) or line(text)


_EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "auto": auto, "number": number, "boxed": boxed, "line": line, "choice": choice, "text": whole,
}  # fmt: skip
assert tuple(_EXTRACTORS) == get_args(Extractor)


def extract(text: str, by: str) -> str | None:
    """Return the short answer of a text by the extractor of a name; None if the text has none."""
    return _EXTRACTORS[by](text[-MOST_CHARACTERS:])


def _plain_number(text: str) -> str:
    plain = text.replace(",", "")
    return plain.rstrip("0").rstrip(".") if "." in plain else plain
