"""From an answer's text, in pieces of any size, to its own text and the calls in it, in pieces too.

The grammar of a ``CallShape`` has seen to it that all but names and arguments is the shape's literal text. So the
parser only counts letters and looks for the end of a JSON object; what it hands out as arguments is what was written,
letter by letter. An answer that was cut off ends in the middle of a call, with whatever of it was there.
"""

from __future__ import annotations

import uuid
from dataclasses import dataclass

from .shape import CallShape


@dataclass(slots=True)
class CallDelta:
    """News of one call: its beginning (``id`` and ``name``), or more of its arguments."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class ToolParser:
    """For one answer.

    Args:
        shape: the form of its calls.
        free_text: text may come before the calls; else the answer begins with them.
    """

    def __init__(self, shape: CallShape, *, free_text: bool) -> None:
        self._shape = shape
        self._held = ""
        self._free = free_text
        self._begun = False
        """Text has been handed out."""
        self._index = -1
        self._depth = 0
        self._in_string = self._escaped = False
        self._expect(self._opening(first=True))
        if free_text:
            self._state = "text"

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._index + 1

    def feed(self, piece: str, *, last: bool = False) -> tuple[str, list[CallDelta]]:
        """More of the answer: what it adds to its text, and to its calls. ``last``: no more will come."""
        self._held += piece
        text, news = "", []
        moving = True
        while moving and self._held:
            before = (self._state, len(self._held))
            if self._state == "text":
                text += self._text(last)
            elif self._state == "literal":
                self._literal()
            elif self._state == "name":
                news += self._name()
            elif self._state == "arguments":
                news += self._arguments()
            else:  # after the last call there is nothing to see
                self._held = ""
            moving = (self._state, len(self._held)) != before
        return text, news

    def _opening(self, first: bool) -> str:
        """The literal text before a name."""
        shape = self._shape
        if first:
            return shape.begin + shape.opening + shape.before_name
        return shape.separator + (shape.begin if shape.begins_each else "") + shape.before_name

    def _expect(self, literal: str) -> None:
        self._state, self._left = "literal", len(literal)

    def _text(self, last: bool) -> str:
        """Text up to the mark; what may be the beginning of one is held back, and blanks before it are no text."""
        mark, held = self._shape.begin, self._held
        if not mark:
            self._free = not held.startswith(self._shape.before_name[0]) or self._begun
            if not self._free:
                self._expect(self._opening(first=True))
                return ""
            self._held, self._begun = "", True
            return held
        at = held.find(mark)
        if at >= 0:
            self._held = held[at:]
            self._expect(self._opening(first=True))
            return held[:at].rstrip() if self._begun or held[:at].strip() else ""
        sizes = range(min(len(mark) - 1, len(held)), 0, -1)
        keep = 0 if last else next((n for n in sizes if mark.startswith(held[-n:])), 0)
        ready = held[: len(held) - keep]
        if not last:
            ready = ready.rstrip()
        self._held = held[len(ready) :]
        self._begun = self._begun or bool(ready)
        return ready

    def _literal(self) -> None:
        taken = min(self._left, len(self._held))
        self._held, self._left = self._held[taken:], self._left - taken
        if not self._left:
            self._state = "name"

    def _name(self) -> list[CallDelta]:
        name, found, rest = self._held.partition(self._shape.after_name)
        if not found:
            return []
        self._index += 1
        self._held, self._state = rest, "arguments"
        self._depth, self._in_string, self._escaped = 0, False, False
        unique = uuid.uuid4().hex
        identity = unique[:9] if self._shape.short_ids else f"call_{unique[:24]}"
        return [CallDelta(self._index, "", identity, name)]

    def _arguments(self) -> list[CallDelta]:
        for position, letter in enumerate(self._held):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif letter == "\\":
                    self._escaped = True
                elif letter == '"':
                    self._in_string = False
            elif letter == '"':
                self._in_string = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "}]":
                self._depth -= 1
                if not self._depth:
                    piece, self._held = self._held[: position + 1], self._held[position + 1 :]
                    self._expect(self._shape.end + self._opening(first=False))
                    return [CallDelta(self._index, piece)]
        piece, self._held = self._held, ""
        return [CallDelta(self._index, piece)]
