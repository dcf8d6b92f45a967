"""Stretches of a trace: the innermost events, and events with a fixed part (loading data, compiling)."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterator, Sequence

import numpy as np

from .trace import OP, RANGE, Trace

LOADING = re.compile(r"enumerate\(DataLoader\)|DataLoader.*__next__")
COMPILING = re.compile(r"dynamo(?! cache lookup)|inductor(?!::)|compile_fx|convert_frame", re.I)
"""Names of compiling work, excluding the graph look-ups and operators in every call of a compiled function."""


def stretches(trace: Trace, lane: int | None = None) -> list[tuple[float, float, str]]:
    """Return (begin, end, part), sorted, of the stretches of a thread, or of all threads, with a fixed part."""
    found: list[tuple[float, float, str]] = []
    parts = [
        "loading" if LOADING.search(key.name) else "recompilation" if COMPILING.search(key.name) else ""
        for key in trace.keys
    ]
    owning = np.isin(trace.key, [number for number, part in enumerate(parts) if part])
    mine = True if lane is None else trace.lane == lane
    for index in np.flatnonzero(np.isin(trace.kind, (OP, RANGE)) & mine & owning):
        begin, end = float(trace.ts[index]), float(trace.ts[index] + trace.dur[index])
        begin = max(begin, found[-1][1]) if found and lane is None else begin
        if end > begin and not (found and begin < found[-1][1]):
            found.append((begin, end, parts[trace.key[index]]))
    return found


def self_segments(trace: Trace, indices: Sequence[int], begin: float, end: float) -> Iterator[tuple[float, float, int]]:
    """Yield (begin, end, event) of every stretch of a thread between two times: the innermost event, or -1 for none."""
    stack: list[tuple[float, int]] = []
    at = begin
    chosen = np.asarray(indices, dtype=np.int64)
    firsts, lasts = trace.ts[chosen], trace.ts[chosen] + trace.dur[chosen]
    columns = (chosen, np.clip(firsts, begin, end), np.minimum(lasts, end))
    for index, first, last in zip(*(column.tolist() for column in columns), strict=True):
        if last <= begin or first >= end:
            continue
        while stack and stack[-1][0] <= first:
            until, inner = stack.pop()
            if until > at:
                yield at, until, inner
                at = until
        if first > at:
            yield at, first, stack[-1][1] if stack else -1
            at = first
        if stack:
            last = min(last, stack[-1][0])
        stack.append((last, index))
    while stack:
        until, inner = stack.pop()
        if until > at:
            yield at, until, inner
            at = until
    if end > at:
        yield at, end, -1


def pieces(owners: list[tuple[float, float, str]], first: float, last: float) -> Iterator[tuple[float, float, str]]:
    """Yield (begin, end, part) of the pieces of an interval, in order; uncovered pieces have an empty part."""
    at = first
    for index in range(max(0, bisect_right(owners, (first, float("inf"), "")) - 1), len(owners)):
        begin, end, part = owners[index]
        if begin >= last:
            break
        if end <= at:
            continue
        if begin > at:
            yield at, begin, ""
        at = min(end, last)
        yield max(begin, first), at, part
    if at < last:
        yield at, last, ""
