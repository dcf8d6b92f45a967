"""Files in chunks that can be read independently: lines of JSON, row groups of parquet, else whole files."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from .documents import Document, Reader
from .files import DataFile, Row, json_object, row_group_bytes

CHUNK_BYTES = 8 * 2**20


@dataclass(frozen=True, slots=True)
class Chunk:
    """A part of a file: bytes ``start`` to before ``end`` (whole lines) of JSON lines, row groups ``start`` to before
    ``end`` of parquet, or a whole file of another kind."""

    path: str
    start: int
    end: int
    first_line: int
    """Number of the first line, for messages."""
    kind: str
    zipped: bool = False
    size: int = 0
    """Bytes of the file that the chunk covers."""

    @property
    def whole_lines(self) -> bool:
        return self.kind == "lines" and not self.zipped

    def documents(self, reader: Reader) -> Iterator[Document]:
        """Yield the documents of the chunk. Raises ValueError, with the location, if it cannot be read."""
        if self.whole_lines:
            return reader.rows(self.path, self._lines())
        groups = range(self.start, self.end) if self.kind == "parquet" else None
        return reader.file(DataFile(Path(self.path), self.kind, self.zipped, groups))

    def _lines(self) -> Iterator[Row]:
        with open(self.path, "rb") as file:
            file.seek(self.start)
            data = file.read(self.end - self.start)
        try:
            lines = data.decode("utf-8-sig" if self.start == 0 else "utf-8").split("\n")  # not at U+2028
        except UnicodeDecodeError as error:
            raise ValueError(
                f"{self.path} is not UTF-8 text ({error.reason} at byte {self.start + error.start}): convert it"
            ) from None
        for number, line in enumerate(lines, self.first_line):
            if line.strip():
                yield f"{self.path}, line {number}", json_object(line)


def cut(file: DataFile, chunk_bytes: int = CHUNK_BYTES) -> Iterator[Chunk]:
    """Split a file into chunks, of about ``chunk_bytes`` each if possible. Raises ValueError if it cannot be read."""
    path = file.path
    if file.kind == "tokens":
        raise ValueError(f"{path} is tokenized already")
    try:
        inside = path.rglob("*") if path.is_dir() else [path]
        size = sum(found.stat().st_size for found in inside if found.is_file())
        if file.kind == "parquet":
            yield from _row_groups(file, chunk_bytes)
        elif file.kind != "lines" or file.zipped:
            if size:
                yield Chunk(str(path), 0, size, 1, file.kind, file.zipped, size)
        else:
            yield from _whole_lines(path, size, chunk_bytes)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None


def _whole_lines(path: Path, size: int, chunk_bytes: int) -> Iterator[Chunk]:
    with path.open("rb") as opened:
        start, line = 0, 1
        while start < size:
            block = opened.read(chunk_bytes) + opened.readline()
            if not block:
                return
            yield Chunk(str(path), start, start + len(block), line, "lines", size=len(block))
            start += len(block)
            line += block.count(b"\n")


def _row_groups(file: DataFile, chunk_bytes: int) -> Iterator[Chunk]:
    sizes = np.array(row_group_bytes(file.path), dtype=np.int64)
    # A chunk ends with the group that fills it.
    of_chunk = (np.cumsum(sizes) - sizes) // chunk_bytes
    for number in np.unique(of_chunk):
        groups = np.flatnonzero(of_chunk == number)
        first, last = int(groups[0]), int(groups[-1]) + 1
        yield Chunk(str(file.path), first, last, 1, "parquet", size=int(sizes[first:last].sum()))
