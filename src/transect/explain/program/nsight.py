"""Reads exports of Nsight Systems (``nsys export --type sqlite``) as traces.

Kernels, copies and calls of the driver are always there. Operators are where NVTX ranges are those of
``torch.autograd.profiler.emit_nvtx``: "aten::mm, seq = 3, sizes = [[8, 8], [8, 8]]". The tables and their columns are
NVIDIA's (Nsight Systems: SQLite Schema Reference); tables that had no events are missing from an export.
"""

from __future__ import annotations

import ast
import re
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from .trace import Trace

HEAD = b"SQLite format 3\0"
THREAD_MASK = 0xFFFFFF
PREFIX = "CUPTI_ACTIVITY_KIND_"
DIRECTIONS = {1: "HtoD", 2: "DtoH", 8: "DtoD", 10: "PtoP"}
"""Directions by ``copyKind``."""
MEMORY = {0: "Pageable", 1: "Pinned", 2: "Device", 3: "Array", 4: "Managed"}
"""Kinds of memory by ``srcKind`` and ``dstKind``, for exports without a table of their names."""
OPERATOR = re.compile(r"(?P<name>[\w:]*::[\w:. ]+|\w+Backward\d*|autograd::.*?)(?=, seq|, op_id|, sizes|$)")
SIZES = re.compile(r"sizes = (\[.*?\])(?:, input_op_ids.*)?$")
PROGRESS_EVENTS = 1 << 16


def is_export(path: Path) -> bool:
    """Return True if a file is an SQLite database."""
    with path.open("rb") as file:
        return file.read(len(HEAD)) == HEAD


def read_export(path: Path, progress: Callable[[float], None] | None = None) -> Trace:
    """Read the events of an export.

    Raises:
        ValueError: it is not an export of Nsight Systems, or has no events of CUDA or NVTX.
    """
    trace = Trace(str(path))
    try:
        with sqlite3.connect(f"file:{path}?mode=ro", uri=True) as database:
            export = _Export(database)
            for number, event in enumerate(export.events()):
                trace.add(event)
                if progress is not None and number % PROGRESS_EVENTS == 0:
                    progress(number / (export.count or 1))
    except sqlite3.DatabaseError as error:
        raise ValueError(
            f"{path} is not an export of Nsight Systems ({error}): give what `nsys export --type sqlite` wrote"
        ) from None
    if not trace.size:
        raise ValueError(
            f"{path} has no kernels, calls of CUDA or NVTX ranges: record with `nsys profile --trace=cuda,nvtx`"
        )
    trace.close()
    return trace


class _Export:
    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._tables = {row[0] for row in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        self._names = dict(self._rows("StringIds", "id", "value"))
        self._memory = dict(self._rows("ENUM_CUDA_MEM_KIND", "id", "label")) or MEMORY
        self._operators: dict[int, int] = {}
        """Number of the operator behind each driver call, by the call's correlation."""
        tables = ("NVTX_EVENTS", *(PREFIX + name for name in ("KERNEL", "MEMCPY", "MEMSET", "RUNTIME")))
        self.count = sum(self._count(table) for table in tables)

    def _count(self, table: str) -> int:
        return self._database.execute(f"SELECT COUNT(*) FROM {table}").fetchone()[0] if table in self._tables else 0

    def _rows(self, table: str, *columns: str, order: str = "") -> Iterator[tuple[Any, ...]]:
        """Yield rows of a table, with None for missing columns; none without the table."""
        if table not in self._tables:
            return
        there = {row[1] for row in self._database.execute(f"PRAGMA table_info({table})")}
        chosen = ", ".join(f'"{name}"' if name in there else "NULL" for name in columns)
        yield from self._database.execute(f"SELECT {chosen} FROM {table} {order}")

    def events(self) -> Iterator[dict[str, Any]]:
        """Yield all events in the form of a Chrome trace; the host's events first, because kernels refer to their
        operators."""
        yield from self._host()
        device = ("start", "end", "deviceId", "streamId", "correlationId")
        for begin, end, card, stream, call, *names in self._rows(
            PREFIX + "KERNEL", *device, "demangledName", "shortName"
        ):
            name = next((self._names[each] for each in names if each in self._names), "kernel")
            yield self._event("kernel", name, begin, end, (card, stream), call)
        for begin, end, card, stream, call, size, way, source, target in self._rows(
            PREFIX + "MEMCPY", *device, "bytes", "copyKind", "srcKind", "dstKind"
        ):
            places = f"{self._memory.get(source, 'Unknown')} -> {self._memory.get(target, 'Unknown')}"
            name = f"Memcpy {DIRECTIONS.get(way, 'Unknown')} ({places})"
            yield self._event("gpu_memcpy", name, begin, end, (card, stream), call, bytes=size)
        for begin, end, card, stream, call, size in self._rows(PREFIX + "MEMSET", *device, "bytes"):
            yield self._event("gpu_memset", "Memset (Device)", begin, end, (card, stream), call, bytes=size)

    def _host(self) -> Iterator[dict[str, Any]]:
        """Yield NVTX ranges and driver calls, sorted by start; a call belongs to the innermost operator of its
        thread."""
        ranges = self._rows("NVTX_EVENTS", "start", "end", "globalTid", "text", "textId", "eventType")
        marks = [(begin, -(end or 0), end, thread, text or self._names.get(number, ""), None)
                 for begin, end, thread, text, number, kind in ranges if end and kind in (59, 60, None)]  # fmt: skip
        calls = self._rows(PREFIX + "RUNTIME", "start", "end", "globalTid", "nameId", "correlationId")
        marks += [(begin, -end, end, thread, self._names.get(name, "call"), call)
                  for begin, end, thread, name, call in calls]  # fmt: skip
        marks.sort(key=lambda mark: mark[:2])
        open_ranges: dict[int, list[tuple[int, int]]] = {}
        for number, (begin, _, end, thread, text, call) in enumerate(marks):
            stack = open_ranges.setdefault(thread, [])
            while stack and stack[-1][0] <= begin:
                stack.pop()
            lane = ("thread", (thread or 0) & THREAD_MASK)
            if call is not None:
                if stack:
                    self._operators[call] = stack[-1][1]
                yield self._event("cuda_runtime", re.sub(r"_v\d+$", "", text), begin, end, lane)
                continue
            found = OPERATOR.match(text)
            if found is None:
                yield self._event("user_annotation", text, begin, end, lane)
                continue
            stack.append((end, number))
            arguments: dict[str, Any] = {"External id": number} | (
                {"Input Dims": sizes} if (sizes := _sizes(text)) else {}
            )
            yield self._event("cpu_op", found["name"], begin, end, lane, **arguments)

    def _event(
        self, cat: str, name: str, begin: int, end: int, lane: tuple[Any, Any], call: int | None = None, **args: Any
    ) -> dict[str, Any]:
        """Make an event; an export counts nanoseconds."""
        if call is not None and call in self._operators:
            args["External id"] = self._operators[call]
        times = {"ts": begin * 1e-3, "dur": (end - begin) * 1e-3}
        return {"ph": "X", "cat": cat, "name": name, "pid": lane[0], "tid": lane[1], **times, "args": args}


def _sizes(text: str) -> list[Any] | None:
    """Parse the shapes of an operator's inputs from the text of its range; None if there are none."""
    found = SIZES.search(text)
    try:
        return list(ast.literal_eval(found[1])) if found else None
    except (ValueError, SyntaxError):
        return None
