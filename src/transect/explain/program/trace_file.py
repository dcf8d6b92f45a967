"""Reads Chrome traces (JSON, also gzipped) as torch's profiler writes them, one event at a time.

The file is never held as a whole: text is read in pieces, and each event is decoded and forgotten. What is kept of one
is some sixty bytes in ``Trace``. Files of other programs, and of other versions of the profiler, are taken as far as
they have complete events (``"ph": "X"``) of kinds that are known; a file that ends in the middle is read up to there.
"""

from __future__ import annotations

import codecs
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec

from .nsight import is_export, read_export
from .trace import Trace, WrittenEvent

PIECE = 1 << 20
"""Characters read at a time."""
LONGEST_EVENT = 64 << 20
"""Most characters of an event."""
_DECODER = json.JSONDecoder()
_SPACE = " \t\r\n"
_BETWEEN = "\n  },\n  {"
"""Separator of two events as torch's profiler writes them. JSON strings contain no line ends."""
_WRITTEN = msgspec.json.Decoder(list[WrittenEvent])
"""Decodes many events of the form that torch's profiler writes; others raise an error."""


class _Text:
    """A window over a file of text that is decoded value by value."""

    def __init__(self, pieces: Iterator[str]) -> None:
        self._pieces = pieces
        self.buffer, self.at, self.ended = "", 0, False

    def more(self) -> bool:
        """Read another piece; False at the end."""
        piece = next(self._pieces, "")
        self.buffer, self.at = self.buffer[self.at :] + piece, 0
        self.ended = not piece
        return bool(piece)

    def peek(self) -> str:
        """Return the next character that is not a space; empty at the end."""
        while True:
            while self.at < len(self.buffer) and self.buffer[self.at] in _SPACE:
                self.at += 1
            if self.at < len(self.buffer):
                return self.buffer[self.at]
            if not self.more():
                return ""

    def value(self) -> Any:
        """Return the next JSON value.

        Raises:
            EOFError: the file ends before it does.
            ValueError: it is not JSON.
        """
        if not self.peek():
            raise EOFError
        while True:
            try:
                found, end = _DECODER.raw_decode(self.buffer, self.at)
                if end < len(self.buffer) or self.ended:  # a number may go on in the next piece
                    self.at = end
                    return found
            except ValueError as error:
                if self.ended:
                    raise EOFError from error
                if len(self.buffer) - self.at > LONGEST_EVENT:
                    raise
            if not self.more() and not self.ended:
                raise EOFError

    def many(self) -> list[WrittenEvent]:
        """Return all events of torch's profiler that end in the window, without reading on; empty if they have another
        form."""
        last = self.buffer.rfind(_BETWEEN, self.at)
        if last < 0:
            return []
        end = last + _BETWEEN.index(",")
        try:
            found = _WRITTEN.decode(f"[{self.buffer[self.at : end]}]")
        except (msgspec.DecodeError, ValueError):
            return []
        self.at = end
        return found


def events(text: _Text, head: dict[str, Any]) -> Iterator[Any]:
    """Yield the events of a trace: of a list, or of the list ``traceEvents`` of an object, whose other values are
    stored in ``head``.

    Raises:
        EOFError: the file ends too early. ValueError: this is not a trace.
    """
    first = text.peek()
    if first == "[":
        text.at += 1
        yield from _items(text)
    elif first == "{":
        text.at += 1
        while text.peek() not in ("}", ""):
            if text.peek() == ",":
                text.at += 1
                continue
            name = text.value()
            if text.peek() != ":":
                raise ValueError("a name without a value")
            text.at += 1
            if name == "traceEvents" and text.peek() == "[":
                text.at += 1
                yield from _items(text)
            else:
                head[str(name)] = text.value()
        if not text.peek():
            raise EOFError
    else:
        raise ValueError("neither an object nor a list")


def _items(text: _Text) -> Iterator[Any]:
    tried = ""
    while True:
        following = text.peek()
        if following == "]":
            text.at += 1
            return
        if following == ",":
            text.at += 1
        elif not following:
            raise EOFError
        elif text.buffer is not tried:
            tried = text.buffer
            yield from text.many()
        else:
            yield text.value()


def _pieces(raw: IO[bytes], size: int, progress: Callable[[float], None]) -> Iterator[str]:
    """Yield the text of a file, plain or gzipped, in pieces; of a truncated gzip file, the readable part."""
    first = raw.read(2)
    raw.seek(0)
    unpack = zlib.decompressobj(wbits=31) if first == b"\x1f\x8b" else None
    decode = codecs.getincrementaldecoder("utf-8")(errors="replace").decode
    while True:
        data = raw.read(PIECE if unpack is None else PIECE // 8)
        progress(raw.tell() / max(size, 1))
        if not data:
            return
        while unpack is not None and data:
            try:
                text = decode(unpack.decompress(data, PIECE))
            except zlib.error:
                return
            data = unpack.unconsumed_tail
            if text:
                yield text
        if unpack is None and (text := decode(data)):
            yield text


def read_trace(path: str | Path, progress: Callable[[float], None] | None = None) -> Trace:
    """Read the events of a trace file: a Chrome trace, or an export of Nsight Systems.

    Args:
        progress: called with the share of the file that has been read.

    Raises:
        ValueError: there is no such file, or it is not a trace with events of torch's profiler.
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        raw = path.open("rb")
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}): give a trace file") from None
    if is_export(path):
        raw.close()
        return read_export(path, progress)
    with raw:
        text = _Text(_pieces(raw, size, progress or (lambda share: None)))
        head: dict[str, Any] = {}
        trace = Trace(str(path))
        try:
            for event in events(text, head):
                if isinstance(event, WrittenEvent):
                    trace.add_written(event)
                else:
                    trace.add(event)
        except EOFError:
            trace.truncated = True
        except ValueError as error:
            raise ValueError(
                f"{path} is not a Chrome trace ({error}): give what torch.profiler's export_chrome_trace wrote"
            ) from None
        trace.head = head
    if not trace.size:
        seen = ", ".join(sorted(trace.other)[:5]) or "nothing"
        raise ValueError(
            f"{path} has no operators, kernels or ranges of torch's profiler (it has {seen}): profile with "
            "torch.profiler.profile(record_shapes=True) and export_chrome_trace"
        )
    trace.close()
    return trace
