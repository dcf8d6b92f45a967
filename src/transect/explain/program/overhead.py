"""Cost of profiling inside of a trace: a constant for each operator on a host, and held kernels on a GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from .trace import COPY, KERNEL, OVERHEAD, RUNTIME, SET, Trace

OWN_OVERHEAD = r"^(?:Activity Buffer Request|Instrumentation|Resource|CUPTI)"
"""Events of the profiler's own work; the driver's overhead (loading a kernel, say) is the program's."""
GIVES = r"Launch|Memcpy|Memset"
"""Driver calls that submit work to the GPU."""
HELD_S = 200e-6
"""Delay in seconds of the first kernel under a profiler from which the profiler's set-up is the cause: an idle GPU
starts within microseconds of a launch."""
LARGEST_S = 15e-6
"""Largest cost in seconds of a segment; what remains of a difference is the machine's, which was slower meanwhile."""
SLOWER = 4.0
"""Largest cost of a segment, in costs as measured for a small operator."""
KEPT = 0.05
"""Least share of a segment's time that is the program's own."""


@dataclass(slots=True)
class IdleGap:
    """A stretch between operators or kernels, and its part."""

    begin: float
    end: float
    part: str = "host"
    label: str = ""
    cost: float = 0.0
    """Seconds of it that profiling took."""

    @property
    def seconds(self) -> float:
        """Length in seconds, without the cost of profiling."""
        return self.end - self.begin - self.cost


def idle_seconds(gaps: Sequence[IdleGap]) -> float:
    """Return the length of all gaps together."""
    return sum(gap.seconds for gap in gaps)


def segment_costs(lengths: np.ndarray, constant: float, plain: float | None) -> np.ndarray:
    """Return the seconds of each segment (a stretch of one operator, or a gap) that profiling took.

    The profiler works at the begin and at the end of each operator, so each segment is longer by a constant. If the
    time without profiling is known, the constant is the one with which all segments add up to it.

    Args:
        lengths: seconds of the segments, as profiled.
        constant: seconds for each, as measured for a small operator; 0 if unknown.
        plain: seconds of all segments without profiling.
    """
    most = (1.0 - KEPT) * lengths
    if plain is None:
        return np.minimum(constant, most)
    excess = float(lengths.sum()) - plain
    low, high = 0.0, min(LARGEST_S, SLOWER * constant) if constant else LARGEST_S
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if np.minimum(middle, most).sum() < excess else (low, middle)
    return np.minimum(high if excess > 0 else 0.0, most)


def own_overhead(trace: Trace, begin: float) -> list[tuple[float, float]]:
    """Return the intervals of the profiler's own work."""
    own = [i for i in trace.where(OVERHEAD) if re.search(OWN_OVERHEAD, trace.key_of(int(i)).name)]
    return [(float(trace.ts[i]), float(trace.ts[i] + trace.dur[i])) for i in own if trace.ts[i] >= begin]


def late_start(trace: Trace, begin: float) -> list[tuple[float, float]]:
    """Return the interval from the first launch to the first kernel, if it is long (``HELD_S``)."""
    firsts = [float(trace.ts[i]) for kind in (KERNEL, COPY, SET) for i in trace.where(kind)[:1]]
    calls = [int(i) for i in trace.where(RUNTIME) if re.search(GIVES, trace.key_of(int(i)).name)]
    if not firsts or not calls or trace.ts[calls[0]] < begin:
        return []
    launched = float(trace.ts[calls[0]] + trace.dur[calls[0]])
    return [(launched, min(firsts))] if min(firsts) - launched > HELD_S else []


def without(gap: IdleGap, spans: Sequence[tuple[float, float]]) -> Iterator[IdleGap]:
    """Yield the pieces of a gap outside all of these spans."""
    at = gap.begin
    for first, last in spans:
        if last <= at or first >= gap.end:
            continue
        if first > at:
            yield IdleGap(at, first)
        at = max(at, last)
    if at < gap.end:
        yield IdleGap(at, gap.end)
