"""Names the gaps between operators, or between kernels, by the host's work in them.

On a host without kernels the samples of the main thread's stack show it. Gaps are mostly shorter than the time between
two samples, so samples are counted over all gaps together, and the time is divided by these counts. Gaps between
kernels are named by the calls of the driver's interface and the ranges that lie in them.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from .doing import Doing, doing_of
from .overhead import IdleGap, idle_seconds
from .sampler import Frame, StackSamples
from .split import ALLOCATES, COMMUNICATION, INTERRUPTED, LONG_GAP_S, SHORT_GAP_S, SYNC, WAITS, Split, on_the_host
from .stretches import pieces, self_segments, stretches
from .trace import OP, PYTHON, RANGE, RUNTIME, Trace

WAITING = re.compile(f"{WAITS}|{ALLOCATES}")
COMPUTED = " on the host"
"""End of the label of a gap in which an operator computed on the host."""
COMPUTES = "Python computes"
"""Label of gaps in which samples show Python that calls no operators."""
LIBRARIES = ("logging", "file", "tokenize")
"""Kinds that the stack itself attributes to a library, below the user's line."""
RARE = 0.05
"""Share of the samples in gaps between calls up to which Python of a library is part of calling."""


@dataclass(frozen=True, slots=True)
class Named:
    """Work of the host in gaps, and its seconds."""

    doing: Doing
    seconds: float


def name_gaps(split: Split, samples: StackSamples | None = None, *, steady: bool = False) -> list[Named]:
    """Move the time of gaps to their parts; returns the host's work in them.

    Args:
        samples: of the main thread, on the trace's clock.
        steady: the trace has only steps that repeat: looking for modules in them is Python work, and no start-up.
    """
    trace = split.trace
    if split.on_gpu:
        alone, events = set(on_the_host(trace)), _HostEvents(trace)
        owners = stretches(trace)
        cut = [IdleGap(*each) for gap in split.gaps for each in pieces(owners, gap.begin, gap.end)]
        split.gaps = [gap if gap.part else _between_kernels(trace, gap, events, alone) for gap in cut]
        for gap in split.gaps:
            split.parts[gap.part] += gap.seconds
        left = split.profiling
        for part in ("launch", "sync", "host"):  # it makes the gaps between kernels longer
            moved = min(left, 0.9 * split.parts[part])
            split.parts[part] -= moved
            split.parts["profiler"] += moved
            left -= moved
        return _moved(split, _named(split, samples), steady) + _inside_calls(split, samples)
    groups = _alike(split)
    _leave_interruptions_out(split, samples, groups)
    _find_python(split, samples, groups)
    short = SHORT_GAP_S
    if len(split.gaps) >= 100:
        short = min(max(short, 10 * float(np.median([gap.seconds for gap in split.gaps]))), LONG_GAP_S)
    split.gaps = list(_communicating(split, samples))
    for gap in split.gaps:
        if gap.part == "host" and gap.seconds <= (SHORT_GAP_S if gap.label == COMPUTES else short):
            gap.part = "launch"
        split.parts[gap.part] += gap.seconds
    return _moved(split, _named(split, samples), steady) + _inside_calls(split, samples)


def _alike(split: Split) -> list[list[IdleGap]]:
    """Return the gaps between the same two operators, for each two."""
    trace = split.trace
    outer = trace.outermost(split.lane)
    after = np.searchsorted(trace.ts[outer], [gap.begin for gap in split.gaps], side="left").tolist()
    numbers = [-1, *trace.key[outer].tolist(), -1]
    groups: dict[tuple[int, int], list[IdleGap]] = {}
    for gap, index in zip(split.gaps, after, strict=True):
        groups.setdefault((numbers[index], numbers[index + 1]), []).append(gap)
    return list(groups.values())


def _find_python(split: Split, samples: StackSamples | None, groups: list[list[IdleGap]]) -> None:
    """Label the gaps between the same two operators, if their samples mostly show Python that calls no operators.

    A sampler gets the interpreter's lock late, often when the next operator releases it: a sample belongs to the last
    gap, unless that is shorter than the time since its end.
    """
    begins = [gap.begin for gap in split.gaps]
    seen: Counter[int] = Counter()
    for sample in samples.samples if samples is not None else ():
        index = bisect_right(begins, sample.at) - 1
        gap = split.gaps[index]
        if index >= 0 and gap.seconds > SHORT_GAP_S and sample.at - gap.end <= gap.seconds:
            seen[id(gap)] += 1 if doing_of(sample.stack).part in ("host", "loading") else -1
    for group in groups:
        if sum(seen[id(gap)] for gap in group) > 0:
            for gap in group:
                gap.label = COMPUTES


def _leave_interruptions_out(split: Split, samples: StackSamples | None, groups: list[list[IdleGap]]) -> None:
    """Count what other programs and the sampler add to gaps as cost of profiling.

    Gaps between the same two operators are usually as long as their median. A longer one was interrupted, as far as the
    system says that the thread waited for a core. Else it was interrupted unless a sample shows work that does not
    recur in each step, or it holds several samples.
    """
    if samples is None:
        return
    times, left, found = [sample.at for sample in samples.samples], split.delayed, list[tuple[float, IdleGap]]()
    for group in groups:
        usual = float(np.median([gap.seconds for gap in group]))
        long = [gap for gap in group if gap.seconds > INTERRUPTED * usual + SHORT_GAP_S]
        found += [(gap.seconds - usual, gap) for gap in long if len(long) <= len(group) / 3]
    for extra, gap in sorted(found, key=lambda each: -each[0]):
        inside = samples.samples[bisect_left(times, gap.begin) : bisect_right(times, gap.end)]
        # In a longer gap there would be more samples, if the program had not waited for a core.
        loose = ("calls", "python") if gap.seconds < 2.5 * samples.period else ("calls",)
        if extra <= left or (len(inside) < 2 and all(doing_of(sample.stack).kind in loose for sample in inside)):
            gap.cost += extra
            split.parts["profiler"] += extra
            left -= extra


def _communicating(split: Split, samples: StackSamples | None) -> Iterator[IdleGap]:
    """Yield gaps of the main thread, split where it waits inside of torch while another thread communicates with other
    ranks."""
    trace, spans = split.trace, list[tuple[float, float, str]]()
    chosen = (
        np.isin(trace.kind, (OP, RANGE))
        & trace.having(lambda key: COMMUNICATION.search(key.name))
        & (trace.lane != split.lane)
    )
    for index in np.flatnonzero(chosen).tolist():
        begin, end = float(trace.ts[index]), float(trace.ts[index] + trace.dur[index])
        begin = max(begin, spans[-1][1]) if spans else begin
        if end > begin:
            spans.append((begin, end, "communication"))
    found = samples.samples if samples is not None and spans else []
    times = [sample.at for sample in found]
    for gap in split.gaps:
        for begin, end, part in pieces(spans, gap.begin, gap.end) if spans else ((gap.begin, gap.end, ""),):
            inside = found[bisect_left(times, begin) : bisect_right(times, end)]
            waits = sum("/torch/" in sample.stack[0].file for sample in inside)
            communicates = part and 2 * waits >= len(inside)
            cost = gap.cost * (end - begin) / (gap.end - gap.begin)
            yield IdleGap(begin, end, "communication" if communicates else gap.part, gap.label, cost)


def _inside_calls(split: Split, samples: StackSamples | None) -> list[Named]:
    """Name the work of a Python library in the gaps of a loop that calls operators.

    Examples are reading a file tensor by tensor, or calling an estimator row by row: its time is not that of calling
    operators.
    """
    gaps = [gap for gap in split.gaps if gap.part == "launch"]
    begins = [gap.begin for gap in gaps]
    counts: Counter[Doing] = Counter()
    total = 0
    for sample in samples.samples if samples is not None else ():
        index = bisect_right(begins, sample.at) - 1
        if index < 0 or sample.at > gaps[index].end:
            continue
        total += 1
        doing = doing_of(sample.stack)
        if doing.kind in (*LIBRARIES, "python") and sample.stack[0] != doing.frame:
            counts[doing] += 1
    if sum(counts.values()) < RARE * total or not total:
        return []
    seconds = min(idle_seconds(gaps), split.parts["launch"]) / total
    named = [Named(doing, seconds * count) for doing, count in counts.most_common()]
    for each in named:
        split.parts["launch"] -= each.seconds
        split.parts[each.doing.part] += each.seconds
    return named


def _moved(split: Split, named: list[Named], steady: bool) -> list[Named]:
    """Move the time of gaps that are not Python work to their parts."""
    if steady:
        python = [replace(each.doing, kind="python") if each.doing.kind == "import" else each.doing for each in named]
        named = [replace(each, doing=doing) for each, doing in zip(named, python, strict=True)]
    for each in named:
        part = "startup" if each.doing.kind == "import" else each.doing.part
        if part != "host":
            split.parts["host"] -= each.seconds
            split.parts[part] += each.seconds
    return [each for each in named if each.doing.kind != "import"]


def _named(split: Split, samples: StackSamples | None) -> list[Named]:
    """Name the work of the host in its gaps, without the profiler's own time."""
    found = _sampled(split, samples) if samples is not None and samples.samples else _called(split)
    whole = idle_seconds([gap for gap in split.gaps if gap.part == "host"])
    return [replace(each, seconds=each.seconds * split.parts["host"] / whole) for each in found]


def _of_python(split: Split) -> list[IdleGap]:
    """Return the host's gaps without those in which operators computed on the host."""
    return [gap for gap in split.gaps if gap.part == "host" and not gap.label.endswith(COMPUTED)]


def _sampled(split: Split, samples: StackSamples) -> list[Named]:
    host = _of_python(split)
    begins = [gap.begin for gap in host]
    counts: Counter[Doing] = Counter()
    for sample in samples.samples:
        index = bisect_right(begins, sample.at) - 1
        if index >= 0 and sample.at <= host[index].end:
            counts[doing_of(sample.stack)] += 1
    each = idle_seconds(host) / (sum(counts.values()) or 1)
    return [Named(doing, each * count) for doing, count in counts.most_common()]


def _called(split: Split) -> list[Named]:
    """Name gaps without samples, by the Python functions in the trace (``with_stack=True``)."""
    trace = split.trace
    indices = [int(i) for i in trace.where(PYTHON) if trace.lane[i] == split.lane]
    if not indices:
        return []
    host = _of_python(split)
    counts: Counter[str] = Counter()
    reached = 0
    for first, last, index in self_segments(trace, indices, split.begin, split.begin + split.wall):
        while reached < len(host) and host[reached].end <= first:
            reached += 1
        each = reached
        while index >= 0 and each < len(host) and host[each].begin < last:
            inside = min(last, host[each].end) - max(first, host[each].begin)
            counts[trace.key_of(index).name] += int(1e9 * inside)
            each += 1
    return [Named(_python(name), nanoseconds * 1e-9) for name, nanoseconds in counts.most_common(50)]


def _python(name: str) -> Doing:
    """Classify a ``python_function`` event, such as ``train.py(12): step``."""
    found = re.match(r"(.*)\((\d+)\): (.*)", name)
    frame = Frame(found[1], found[3], int(found[2])) if found else Frame("", name, 0)
    return doing_of((frame,))


def _between_kernels(trace: Trace, gap: IdleGap, events: _HostEvents, alone: set[int]) -> IdleGap:
    """Return a gap in which no kernel ran with its part, and the evidence.

    ``alone``: operators that compute on the host.
    """
    return IdleGap(gap.begin, gap.end, *_cause(trace, gap, events.overlapping(gap), alone))


def _cause(trace: Trace, gap: IdleGap, cache: Sequence[int], alone: set[int]) -> tuple[str, str]:
    def within(i: int) -> float:
        return max(0.0, min(gap.end, trace.ts[i] + trace.dur[i]) - max(gap.begin, trace.ts[i]))

    on_host = [i for i in cache if i in alone]
    if sum(map(within, on_host)) >= gap.seconds / 2:
        return "host", trace.key_of(max(on_host, key=within)).name + COMPUTED
    calls = [i for i in cache if trace.kind[i] in (OP, RUNTIME)]
    short = gap.seconds <= LONG_GAP_S
    issued = (sum(map(within, calls)) if short else _covered(trace, calls, gap)) >= gap.seconds / 2
    if short or issued:  # in a longer one without calls Python computes, whatever it waited for before
        for index in calls:
            name = trace.key_of(index).name
            if (trace.kind[index] == RUNTIME and WAITING.search(name)) or name in SYNC:
                return "sync", name
    if gap.seconds <= SHORT_GAP_S or issued:
        return "launch", "the host was issuing work"
    python = [i for i in cache if trace.kind[i] == PYTHON]
    if python:
        return "host", trace.key_of(max(python, key=lambda i: trace.ts[i])).name
    return ("host", "") if cache else ("unexplained", "")


def _covered(trace: Trace, calls: Sequence[int], gap: IdleGap) -> float:
    """Return the seconds of a gap that are covered by these events, sorted by start."""
    seconds, reached = 0.0, gap.begin
    for index in calls:
        last = min(float(trace.ts[index] + trace.dur[index]), gap.end)
        seconds += max(0.0, last - max(float(trace.ts[index]), reached))
        reached = max(reached, last)
    return seconds


class _HostEvents:
    """Events of the host, found by time. They are kept in classes of similar length: a range of seconds would otherwise
    make each search begin at the trace's first event."""

    BEFORE_S = 20e-6
    """Seconds before a gap in which an event may end to count as overlapping."""

    def __init__(self, trace: Trace) -> None:
        chosen = np.flatnonzero(np.isin(trace.kind, (OP, RANGE, PYTHON, RUNTIME)))
        levels = np.floor(np.log2(np.maximum(1.0, 1e6 * trace.dur[chosen])) / 2)
        self._classes: list[tuple[list[int], list[float], list[float], float]] = []
        for level in np.unique(levels):
            indices = chosen[levels == level]
            begins, lengths = trace.ts[indices], trace.dur[indices]
            ends = (begins + lengths).tolist()
            self._classes.append((indices.tolist(), begins.tolist(), ends, float(lengths.max())))

    def overlapping(self, gap: IdleGap) -> list[int]:
        """Return the events that overlap a gap, or end just before it, by their start."""
        least = gap.begin - self.BEFORE_S
        found: list[int] = []
        for indices, begins, ends, longest in self._classes:
            first, last = bisect_left(begins, least - longest), bisect_left(begins, gap.end)
            found += [indices[i] for i in range(first, last) if ends[i] >= least]
        return sorted(found)
