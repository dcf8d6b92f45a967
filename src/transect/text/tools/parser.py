"""Parsing of an answer's text, in pieces of any size, into plain text and calls, in pieces too.

The grammar of a ``CallShape`` has seen to it that all but names and arguments is the shape's literal text. What is not
(a model that no grammar watched) stays text. Blanks that the literal text has or lacks do not matter.
The text of an answer is what comes before its first call.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from .arguments import ArgumentReader
from .shape import CallShape
from .spec import Tool

_NAME = re.compile(r"[A-Za-z0-9_.-]+")


@dataclass(slots=True)
class CallDelta:
    """New parts of one call: its beginning (``id`` and ``name``), or more of its arguments."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


class ToolParser:
    """Parser of one answer.

    Args:
        shape: the form of its calls.
        tools: those that may be called: their schemas say which values are strings, where that is not written.
    """

    def __init__(self, shape: CallShape, tools: Sequence[Tool] = ()) -> None:
        self._shape = shape
        self._tools = {tool.name: tool for tool in tools}
        self._held = self._raw = ""
        """Unread text, and the read part of a call that may turn out not to be one."""
        self._last = self._cut = False
        self._index = -1
        self._name = ""
        self._identity: str | None = None
        self._reader: ArgumentReader | None = None
        self._text, self._news = "", list[CallDelta]()
        self._state: Callable[[], bool] = self._free if shape.begin else self._first

    @property
    def num_calls(self) -> int:
        """Calls that have begun."""
        return self._index + 1

    def feed(self, piece: str, *, last: bool = False, cut: bool = False) -> tuple[str, list[CallDelta]]:
        """Read more of the answer; return the new text and calls.

        Args:
            last: no more will come.
            cut: the answer stops before the model ended it. What may be the beginning of a call is dropped then.
        """
        self._held += piece
        if cut:
            self._held = self._held.rstrip("\ufffd")  # half a letter
        self._last, self._cut = last, cut
        self._text, self._news = "", []
        while self._state():
            pass
        return self._text, self._news

    # States. Each returns whether it has got anywhere.

    def _free(self) -> bool:
        """Read text up to the mark; a possible beginning of a mark is held back, and blanks before the mark are
        dropped."""
        mark, held = self._shape.begin, self._held
        at = held.find(mark) if mark else -1
        if at >= 0:
            before = held[:at].rstrip()
            self._say(before)
            self._raw, self._held = held[len(before) : at], held[at:]
            self._state = self._header_first
            return True
        sizes = range(min(len(mark) - 1, len(held)), 0, -1)
        whole = self._last and not self._cut
        keep = 0 if whole else next((n for n in sizes if mark.startswith(held[-n:])), 0)
        ready = held[: len(held) - keep]
        if (mark and not self._last) or keep:
            ready = ready.rstrip()
        self._say(ready)
        self._held = held[len(ready) :] if not self._last else ""
        return False

    def _first(self) -> bool:
        """Read the beginning of an answer whose calls have no mark."""
        shape, held = self._shape, self._held
        if not self._last and (not held or held.isspace()):
            return False
        found = self._take(shape.prefix) if shape.prefix else False
        if found is not None:
            found = self._fits(shape.opening + shape.before_name)
        if found is None and (self._cut or not self._last):
            self._held = "" if self._cut else held
            return False
        if found:
            self._raw, self._state = held[: len(held) - len(self._held)], self._header_first
        else:
            self._held, self._state = held, self._free
        return True

    def _header_first(self) -> bool:
        shape = self._shape
        return self._header(shape.begin + shape.opening + shape.before_name)

    def _header_next(self) -> bool:
        shape = self._shape
        return self._header(shape.separator + shape.before_name)

    def _header(self, before: str) -> bool:
        """Read a call up to its arguments, at once."""
        shape, held = self._shape, self._held
        found = self._take(before)
        self._held = self._held.lstrip()
        name = _NAME.match(self._held) if found else None
        self._identity = None
        if name is not None:
            self._name, self._held = name[0], self._held[name.end() :]
            marked = self._take(shape.id_mark) if shape.id_mark else False
            identity = _NAME.match(self._held) if marked else None
            if identity is not None:
                self._identity, self._held = identity[0], self._held[identity.end() :]
            found = None if marked is None or not self._held else self._take(shape.after_name)
            if found and shape.arguments.begin:
                self._held = self._held.lstrip()
                found = self._fits(shape.arguments.begin)
        elif found:
            found = False if self._held else None
        if found and self.num_calls and self._tools and self._name not in self._tools:
            found = False  # text after a call that looks like another one
        if found:
            self._raw, self._state = "", self._arguments
            self._index += 1
            self._reader = shape.arguments.reader(self._tools.get(self._name))
            identity_ = shape.call_id(self._name, self._index, self._identity)
            self._news.append(CallDelta(self._index, "", identity_, self._name))
            return True
        if found is None and (self._cut or not self._last):
            self._raw, self._held = ("", "") if self._cut else (self._raw, held)
            return False
        self._say(self._raw + held[:1])  # no call after all: the rest is read as text
        self._raw, self._held = "", held[1:]
        self._state = self._free
        return True

    def _arguments(self) -> bool:
        assert self._reader is not None
        piece, self._held, done = self._reader.feed(self._held, self._last)
        if piece:
            self._news.append(CallDelta(self._index, piece))
        if done:
            self._state = self._after
        elif self._last:
            self._held = ""
        return done

    def _after(self) -> bool:
        """Read the end of a call."""
        found = self._take(self._shape.end)
        if found is None:
            self._held = "" if self._last else self._held
            return False
        self._state = self._between if found and not self._shape.begins_each else self._free
        return True

    def _between(self) -> bool:
        """Read the start of another call of the same list, or the list's end."""
        shape = self._shape
        another = self._fits(shape.separator + shape.before_name)
        close = self._fits(shape.close) if shape.close else False
        if another:
            self._state = self._header_next
        elif close:
            self._take(shape.close)
            self._state = self._free
        elif None in (another, close):
            self._held = "" if self._last else self._held
            return False
        else:
            self._state = self._free
        return True

    def _say(self, text: str) -> None:
        if not self.num_calls:
            self._text += text

    def _fits(self, literal: str) -> bool | None:
        """Return True if ``held`` begins with this text; None if more text must decide."""
        return _end_of(literal, self._held)[1]

    def _take(self, literal: str) -> bool | None:
        """Consume the literal if ``held`` begins with it; result as of ``_fits``."""
        size, found = _end_of(literal, self._held)
        if found:
            self._held = self._held[size:]
        return found


def _end_of(literal: str, held: str) -> tuple[int, bool | None]:
    """Match ``literal`` with the start of ``held``, ignoring blanks.

    Returns the number of matched letters, and True if all of ``literal`` is there, None if more text must decide.
    """
    at = 0
    for letter in literal:
        if letter.isspace():
            continue
        while at < len(held) and held[at].isspace():
            at += 1
        if at == len(held):
            return at, None
        if held[at] != letter:
            return at, False
        at += 1
    return at, True
