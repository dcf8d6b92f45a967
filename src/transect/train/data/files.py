"""Files of training data: their kinds, by suffix, and their rows.

| ending | rows |
|---|---|
| ``.jsonl``, ``.ndjson`` | a JSON object a line |
| ``.json`` | a list of objects, or an object that holds one such list |
| ``.csv``, ``.tsv`` | a line each, under a header |
| ``.parquet``, a directory that Hugging Face ``datasets`` saved | a record each |

Text is ``.txt``, ``.text``, ``.md`` and ``.rst``. A file with another ending is read as text where its name is given as
``text:NAME``. ``.gz`` may follow any ending but ``.parquet``. Upper and lower case are alike.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from .tokens import SUFFIX

TEXT = (".txt", ".text", ".md", ".rst")
LINES = (".jsonl", ".ndjson")
TABLES = {".csv": ",", ".tsv": "\t"}
FORCED = "text:"
LARGEST_CELL = 64 * 2**20
"""Bytes of one field of a CSV file."""

Row = tuple[str, Mapping[str, Any] | ValueError]
"""(location of a row for messages, its values or the reason for having none)."""


@dataclass(frozen=True, slots=True)
class DataFile:
    """A file or directory of training data.

    Attributes:
        kind: ``tokens``, ``text``, ``lines``, ``json``, ``table``, ``parquet`` or ``datasets``.
        zipped: its content is compressed with gzip.
        groups: row groups to read of a Parquet file; None for all.
    """

    path: Path
    kind: str
    zipped: bool = False
    groups: range | None = None

    def text(self) -> str:
        """Read the whole of a text file.

        Raises:
            ValueError: it cannot be read, or is not UTF-8.
        """
        try:
            with self._open() as file:
                return file.read()
        except UnicodeDecodeError as error:
            raise _not_utf8(self.path, error) from None
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"cannot read {self.path}: {error}") from None

    def rows(self) -> Iterator[Row]:
        """Yield every row, in order.

        Raises:
            ValueError: the file is damaged or no such rows can be in it; the place is named.
        """
        readers = {
            "lines": self._lines,
            "json": self._json,
            "table": self._table,
            "parquet": self._parquet,
            "datasets": self._datasets,
        }
        try:
            yield from readers[self.kind]()
        except UnicodeDecodeError as error:
            raise _not_utf8(self.path, error) from None
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"cannot read {self.path}: {error}") from None

    def _open(self) -> TextIO:
        if self.zipped:
            return io.TextIOWrapper(gzip.open(self.path, "rb"), encoding="utf-8-sig", newline="")  # type: ignore[arg-type]
        return self.path.open(encoding="utf-8-sig", newline="")

    def _lines(self) -> Iterator[Row]:
        with self._open() as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield f"{self.path}, line {number}", json_object(line)

    def _json(self) -> Iterator[Row]:
        with self._open() as file:
            try:
                found, doubled = _parsed(file.read())
            except ValueError as error:
                raise ValueError(f"{self.path} is not JSON: {error}; JSON lines belong in a .jsonl file") from None
        if isinstance(found, Mapping):
            lists = [value for value in found.values() if isinstance(value, list)]
            if len(lists) != 1:
                raise ValueError(f"{self.path} is one JSON object: give a list of rows, or an object that holds one")
            found = lists[0]
        if not isinstance(found, list):
            raise ValueError(f"{self.path} must hold a list of JSON objects")
        for number, row in enumerate(found, 1):
            where = f"{self.path}, row {number}"
            if not isinstance(row, Mapping):
                yield where, ValueError(f"a row must be a JSON object, not {type(row).__name__}")
            elif doubled and (twice := _inside(row)) is not None:
                yield where, TwiceError(twice.key)
            else:
                yield where, row

    def _table(self) -> Iterator[Row]:
        csv.field_size_limit(LARGEST_CELL)
        plain = self.path.with_suffix("") if self.zipped else self.path
        with self._open() as file:
            reader = csv.DictReader(file, delimiter=TABLES[plain.suffix.lower()], strict=True)
            try:
                header = reader.fieldnames
                if not header or len(set(header)) < len(header):
                    raise ValueError(f"{self.path} needs a first line that names each column once")
                if len(header) == 1 and (mark := re.search(r"[;,\t]", header[0])):
                    how = "save it with commas between them as .csv, or with tabs as .tsv"
                    raise ValueError(f"{self.path} has {mark[0]!r} between its columns: {how}")
                for row in reader:
                    uneven = None in row or None in row.values()
                    bad = ValueError(f"the row has another number of fields than the {len(header)} of the header")
                    yield f"{self.path}, line {reader.line_num}", bad if uneven else row
            except csv.Error as error:
                raise ValueError(f"{self.path}, line {reader.line_num} is not CSV: {error}") from None

    def _parquet(self) -> Iterator[Row]:
        pyarrow = _pyarrow(self.path)
        import pyarrow.parquet as parquet

        try:
            with parquet.ParquetFile(self.path) as file:
                groups = self.groups or range(file.num_row_groups)
                before = sum(file.metadata.row_group(group).num_rows for group in range(groups.start))
                yield from _numbered(self.path, file.iter_batches(256, row_groups=list(groups)), before)
        except pyarrow.ArrowException as error:
            raise ValueError(f"{self.path} is not a parquet file that can be read: {error}") from None

    def _datasets(self) -> Iterator[Row]:
        """Yield the rows of a directory that ``Dataset.save_to_disk`` wrote: ``state.json`` names its arrow files in
        order."""
        pyarrow = _pyarrow(self.path)
        try:
            state = json.loads((self.path / "state.json").read_text(encoding="utf-8"))
            names = [entry["filename"] for entry in state["_data_files"]]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{self.path / 'state.json'} does not name the files of a dataset ({error})") from None

        def batches() -> Iterator[Any]:
            for name in names:
                with pyarrow.memory_map(str(self.path / name)) as source:
                    yield from pyarrow.ipc.open_stream(source)

        try:
            yield from _numbered(self.path, batches())
        except pyarrow.ArrowException as error:
            raise ValueError(f"{self.path} is not a dataset that can be read: {error}") from None


def find(names: tuple[str, ...] | list[str], setting: str = "data.train") -> list[DataFile]:
    """Find the files of a setting; a directory of parquet or JSONL files means all of these.

    Raises:
        ValueError: nothing is named, something is not there, or its kind is not known.
    """
    if not names:
        raise ValueError(f"no data: name at least one file in {setting}")
    return [file for name in names for file in _find(name, setting)]


def _find(name: str, setting: str) -> list[DataFile]:
    forced = name.startswith(FORCED)
    path = Path(name.removeprefix(FORCED))
    if not path.exists():
        where = "data.train or data.validation" if setting == "data.train" else setting
        raise ValueError(f"there is no file {path}: correct {where}")
    if path.is_dir():
        return _in_directory(path)
    if forced:
        return [DataFile(path, "text")]
    zipped = path.suffix.lower() == ".gz"
    ending = (path.with_suffix("") if zipped else path).suffix.lower()
    kinds = {".json": "json", ".parquet": "parquet"}
    kinds |= dict.fromkeys(TEXT, "text") | dict.fromkeys(LINES, "lines") | dict.fromkeys(TABLES, "table")
    kind = kinds.get(ending)
    if kind is None or (zipped and kind == "parquet"):
        known = ", ".join(sorted([*kinds, SUFFIX]))
        raise ValueError(
            f"{path}: files that end in {''.join(path.suffixes[-2:]) or 'nothing'} are not known; known are {known}. "
            f"To train on it as plain text, name it {FORCED}{path}"
        )
    return [DataFile(path, kind, zipped)]


def _in_directory(path: Path) -> list[DataFile]:
    if (path / "meta.json").exists() or path.suffix == SUFFIX:
        return [DataFile(path, "tokens")]
    if (path / "state.json").exists():
        return [DataFile(path, "datasets")]
    if (path / "dataset_dict.json").exists():
        splits = ", ".join(str(child) for child in sorted(path.iterdir()) if (child / "state.json").exists())
        raise ValueError(f"{path} holds several splits: name one of {splits}")
    inside = sorted(p for p in path.rglob("*") if p.suffix.lower() in (".parquet", *LINES) and p.is_file())
    if not inside:
        raise ValueError(f"{path} holds no dataset: no state.json, and no .parquet or .jsonl file")
    return [file for found in inside for file in _find(str(found), "data")]


class TwiceError(ValueError):
    """An object in JSON has a key twice."""

    def __init__(self, key: str) -> None:
        super().__init__(f"the key {json.dumps(key, ensure_ascii=False)} is there twice in one object")


class _Doubled(dict[str, Any]):
    """A JSON object that had a key twice."""

    key = ""


def read_json(text: str) -> Any:
    """Parse a JSON value.

    Raises:
        ValueError: it is not JSON. TwiceError: an object in it has a key twice.
    """
    value, doubled = _parsed(text)
    if doubled:
        raise TwiceError(doubled[0].key)
    return value


def json_object(line: str) -> dict[str, Any] | ValueError:
    """Parse one line of JSONL; returns the reason if it is not a JSON object."""
    try:
        row = read_json(line)
    except TwiceError as error:
        return error
    except ValueError as error:
        return ValueError(f"the line is not JSON: {error}")
    return row if isinstance(row, dict) else ValueError("a line must be a JSON object")


def _parsed(text: str) -> tuple[Any, list[_Doubled]]:
    """Parse a JSON value; also return its objects with duplicate keys."""
    marked: list[_Doubled] = []

    def made(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) == len(pairs):
            return found
        names = [name for name, _ in pairs]
        doubled = _Doubled(found)
        doubled.key = next(name for name in names if names.count(name) > 1)
        marked.append(doubled)
        return doubled

    try:
        return json.loads(text, object_pairs_hook=made), marked
    except RecursionError as error:
        raise ValueError(str(error)) from None


def _inside(value: Any) -> _Doubled | None:
    """Find the first object in ``value`` with a duplicate key."""
    if isinstance(value, _Doubled):
        return value
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return next((found for part in parts if (found := _inside(part)) is not None), None)


def row_group_bytes(path: Path) -> list[int]:
    """Return the bytes of each row group of a parquet file, before compression. Raises ValueError for other files."""
    pyarrow = _pyarrow(path)
    import pyarrow.parquet as parquet

    try:
        with parquet.ParquetFile(path) as file:
            return [file.metadata.row_group(group).total_byte_size for group in range(file.num_row_groups)]
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path} is not a parquet file that can be read: {error}") from None


def _numbered(path: Path, batches: Iterator[Any], number: int = 0) -> Iterator[Row]:
    for batch in batches:
        batch.validate(full=True)  # arrow follows the offsets of a damaged file out of its memory
        for row in batch.to_pylist():
            number += 1
            # A table has every column in every row; what a row does not have is null.
            yield f"{path}, row {number}", {key: value for key, value in row.items() if value is not None}


def _pyarrow(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        raise ValueError(f"reading {path} needs pyarrow: pip install 'transect[train]'") from None
    return pyarrow


def _not_utf8(path: Path, error: UnicodeDecodeError) -> ValueError:
    return ValueError(f"{path} is not UTF-8 text ({error.reason} at byte {error.start}): convert it")
