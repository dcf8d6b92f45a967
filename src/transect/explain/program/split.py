"""Splits the wall time of a trace into causes. Every instant has one cause, so the parts add up to the whole.

Where kernels ran, an instant belongs to what the GPU did: computing, else communication, else a copy, else a gap that
is named by what the host did (``gaps.py``). Without kernels it belongs to what the main thread did: the innermost
operator, or a gap between operators. Time inside an operator is the least that its shapes need (``op_floor.py``), the
cost of the call, and the rest. Operators that only move, convert, allocate or wait belong to the part of their kind.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from ...costs.ceilings import Ceilings
from .op_floor import FREE, floor, own_floors
from .overhead import IdleGap, idle_seconds, late_start, own_overhead, segment_costs, without
from .stretches import COMPILING, LOADING, pieces, self_segments, stretches
from .trace import COPY, KERNEL, OP, RANGE, RUNTIME, SET, Key, Trace, kernel_name

WINDOW = "transect.explain"
"""Name of the range that marks the explained time; without one, the whole trace is explained."""
PARTS: Mapping[str, str] = {
    "floor": "at the floor: the least that the shapes need",
    "inefficiency": "kernels above their floor",
    "unrated": "kernels whose shapes are not in the trace, C++ kernels among them",
    "padding": "computing on padding",
    "launch": "launch-bound: calling operators, and short gaps between them",
    "host": "host-bound: Python and other work between operators",
    "sync": "synchronisation: .item(), .cpu(), allocation",
    "loading": "data loading",
    "copies": "copies, conversions and changes of layout",
    "communication": "communication that nothing hides",
    "recompilation": "compiling",
    "startup": "start-up: imports",
    "profiler": "what profiling itself cost",
    "unexplained": "unexplained",
}
LAUNCH_S = 3e-6
"""Seconds to call an operator, if nothing is measured."""
SMALL_S = 30e-6
"""Seconds up to which an operator with a floor below ``LAUNCH_S`` counts as mostly launch cost."""
TINY_S = 1.5e-6
"""Seconds up to which all time of an operator with such a floor, on a host, counts as launch cost."""
INTERRUPTED = 3.0
"""Factor above the usual time from which the time of small operators is that of interruptions, not of launches."""
SELDOM, RARE, FEW = 10.0, 0.05, 8
"""Factor above the usual time of an operator from which it was interrupted, the largest share of such calls, and calls
of which one may be."""
SLOW_CALL_S = 200e-6
"""Seconds that no launch takes: a slower operator waits for threads, or for a core."""
SHORT_GAP_S = 30e-6
"""Seconds up to which a gap between operators counts as the loop that calls them; if most gaps are longer, those count
too."""
LONG_GAP_S = 500e-6
SYNC = {"aten::item", "aten::_local_scalar_dense", "aten::nonzero", "aten::is_nonzero", "aten::equal", "aten::unique"}
COPIES = {"aten::copy_", "aten::contiguous", "aten::clone", "aten::cat", "aten::_to_copy", "aten::stack", "aten::roll"}
WAITS = r"Synchronize$|(?:cuda|hip)Memcpy$|hipMemcpyWithStream$"
"""Driver calls in which the host waits for the GPU."""
ALLOCATES = r"Malloc$|Free$|HostAlloc"
"""Driver calls that allocate or free memory."""
IDLE = 0.1
"""Least idle share of a GPU that shows a host which issues too little."""
BLOCKED_S = 100e-6
"""Seconds of a launch above which the host waited: the queue of the GPU was full."""
ISSUES = r"Launch|Memcpy|Memset|Malloc|Free|Synchronize|HostAlloc|Event"
"""Driver calls that show an operator's use of the GPU."""
HOST_OP_S = 500e-6
"""Seconds above which an operator without such a call counts as computing on the host."""
PLUMBING = ("autograd::", "Optimizer", "torch::autograd", "TorchDynamo Cache Lookup", "Pregraph bytecode")
"""Names of ranges by which autograd, optimizers and torch.compile call operators."""
COMMUNICATION = re.compile(r"nccl|rccl|all_?reduce|all_?gather|reduce_?scatter|c10d|gloo", re.I)


@dataclass(slots=True)
class OpStat:
    """All calls of one operator with the same shapes. Times are seconds inside it, without the operators it calls.

    On a GPU all launches of one kernel by such an operator; several kernels of an operator share its floor."""

    key: Key
    calls: int = 0
    seconds: float = 0.0
    floor: float | None = None
    """Floor of one call, in seconds."""
    operator: str = ""
    """Operator that launched the kernel; empty for an operator."""
    usual: float = math.inf
    """Seconds of all calls if each took as long as the median one: other programs interrupt some calls."""

    @property
    def name(self) -> str:
        """Name of the operator; for a kernel, of the operator that launched it, if known."""
        return self.operator or self.key.name

    @property
    def title(self) -> str:
        """Title: the kernel's name, after that of its operator if one launched it."""
        if not self.operator:
            return kernel_name(self.key.name, templates=True)
        return f"{self.operator}: {kernel_name(self.key.name)}"

    @property
    def tiny(self) -> bool:
        """True if the operator ran on a host and its floor is below the cost of a launch."""
        return 0 < (self.floor or 0.0) < TINY_S and not self.operator

    @property
    def launch(self) -> float:
        """Seconds of launch cost, limited to the time above the floor; for work smaller than a launch, most of it."""
        floor = self.floor or 0.0
        if self.tiny and self.seconds <= self.calls * SLOW_CALL_S:
            return max(0.0, min(self.seconds, INTERRUPTED * self.usual) - self.calls * floor)
        most = LAUNCH_S if floor > LAUNCH_S else SMALL_S
        return min(self.calls * most, max(0.0, self.seconds - self.calls * floor))


@dataclass(slots=True)
class Split:
    """The parts of a trace's wall time, in seconds, and their material."""

    wall: float
    begin: float
    parts: dict[str, float]
    ops: list[OpStat]
    gaps: list[IdleGap]
    on_gpu: bool
    lane: int
    trace: Trace
    notes: list[str] = field(default_factory=list)
    loading: list[OpStat] = field(default_factory=list)
    """Operators that a loader calls in the main thread of a host."""
    delayed: float = 0.0
    """Seconds between operators in which the main thread of a host waited for a core."""
    profiling: float = 0.0
    """Seconds that the profiler added to the main thread's driver calls and the operators around them."""
    recording: float = 0.0
    """Seconds that the profiler added to all operators and driver calls, of any thread."""
    held: float = 0.0
    """Seconds in which a GPU was idle because of the profiler."""
    held_host: float = 0.0
    """Seconds of ``held`` in which the host was held too."""

    waiting: float = 0.0
    """Share of the time without profiling in which the main thread waited for a GPU, by samples."""
    measured: bool = False
    """True if the program was also timed without profiling."""

    @property
    def source(self) -> str:
        """Description of the time without profiling."""
        return "plain" if self.measured else "plain (estimated)"

    @property
    def own(self) -> float:
        """Wall time of the program in seconds, without the cost of profiling."""
        return self.wall - self.parts.get("profiler", 0.0)

    def rate(self, least: float) -> None:
        """Divide the time of kernels without shapes into ``least`` seconds of floor, and the rest."""
        seconds, self.parts["unrated"] = self.parts["unrated"], 0.0
        self.parts["floor"] += min(least, seconds)
        self.parts["inefficiency"] += max(0.0, seconds - least)

    def share(self, part: str) -> float:
        """Return the part as a share of the wall time."""
        return self.parts.get(part, 0.0) / self.wall if self.wall else 0.0

    @property
    def busy(self) -> float:
        """Seconds in which the GPU was busy."""
        return self.wall - idle_seconds(self.gaps) - self.held

    @property
    def idle(self) -> float:
        """Seconds of the program in which the GPU was idle."""
        return max(0.0, self.own - self.busy)

    @property
    def uncovered(self) -> float:
        """Seconds in which the host issued work, beyond those in which the GPU was busy."""
        return max(0.0, self.issuing - self.busy)

    @property
    def issuing(self) -> float:
        """Seconds in which the main thread did not wait for the GPU, without the cost of profiling."""
        return self.issued(math.inf)

    def issued(self, blocked: float) -> float:
        """Return ``issuing``, without what launches take above ``blocked`` seconds, where the queue may be full. If a
        program was timed and the GPU was idle for long, the host decided how long it took."""
        calls, end = self.calls(WAITS), self.begin + self.wall
        firsts = np.maximum(self.trace.ts[calls], self.begin)
        lasts = np.minimum(self.trace.ts[calls] + self.trace.dur[calls], end)
        waited = float(np.maximum(0.0, lasts - firsts).sum())
        launches = self.trace.dur[self.calls("Launch")]
        waited += float((launches[launches > blocked] - blocked).sum())
        seen = (1.0 - self.waiting) * self.own
        if self.measured and self.idle > IDLE * self.own:
            return min(max(0.0, self.own - waited), seen)
        profiling = max(self.profiling, self.recording) if self.measured else self.profiling
        issuing = max(0.0, self.wall - waited - profiling - self.held_host)
        return min(issuing, seen)

    def calls(self, pattern: str) -> np.ndarray:
        """Return the driver calls whose names match a pattern, in the explained time."""
        trace = self.trace
        inside = (trace.ts + trace.dur > self.begin) & (trace.ts < self.begin + self.wall)
        chosen = trace.having(lambda key: re.search(pattern, key.name))
        return np.flatnonzero((trace.kind == RUNTIME) & chosen & inside)

    def named(self, *names: str) -> list[OpStat]:
        """Return the operators with these names, and the kernels that they launched."""
        return [op for op in self.ops if op.name in names]


def split_trace(
    trace: Trace,
    ceilings: Ceilings,
    *,
    profiler_s: float = 0.0,
    padding: float = 0.0,
    plain: float | None = None,
    delayed: float = 0.0,
) -> Split:
    """Split a trace; gaps are still all called "host" (``gaps.name_gaps`` says more).

    Args:
        ceilings: rates for floors.
        profiler_s: seconds that the profiler adds to each operator, if known.
        padding: the share of tokens that are padding, if that is known.
        plain: seconds of the same work without profiling, if they are known.
        delayed: seconds in which the main thread waited for a core.
    """
    begin, end, lane = window = _window(trace)
    loading: list[OpStat] = []
    if trace.on_gpu:
        ops, gaps, parts = _device(trace, ceilings, begin, end)
        stopped = own_overhead(trace, begin)
        spans = sorted([*stopped, *late_start(trace, begin)])
        idle, gaps = idle_seconds(gaps), [piece for gap in gaps for piece in without(gap, spans)]
    else:
        ops, loading, gaps, parts, delayed = _host(trace, ceilings, window, profiler_s, plain, delayed)
    computed = parts["floor"] + parts["inefficiency"]
    for part in ("floor", "inefficiency"):
        parts[part] -= parts[part] * padding
    parts["padding"] = computed * padding
    split = Split(end - begin, begin, parts, ops, gaps, trace.on_gpu, lane, trace, loading=loading, delayed=delayed)
    if trace.on_gpu:
        inside = (trace.ts >= begin) & (trace.ts < end)
        split.profiling = profiler_s * int((inside & (trace.kind == RUNTIME) & (trace.lane == lane)).sum())
        # It was measured for an operator and its launch; autograd's threads call operators, too.
        split.recording = profiler_s / 2 * int((inside & np.isin(trace.kind, (OP, RUNTIME))).sum())
        split.held = idle - idle_seconds(gaps)
        split.held_host = min(split.held, sum(min(last, end) - first for first, last in stopped if first < end))
        parts["profiler"] += split.held
    return split


def trace_seconds(trace: Trace) -> float:
    """Return the wall time of the marked range of a trace, or of the whole trace if no range is marked."""
    begin, end, _ = _window(trace)
    return end - begin


def _window(trace: Trace) -> tuple[float, float, int]:
    """Return (begin, end, main thread) of the marked range, or of the whole trace."""
    for index in trace.where(RANGE):
        if trace.key_of(index).name == WINDOW:
            return float(trace.ts[index]), float(trace.ts[index] + trace.dur[index]), int(trace.lane[index])
    counted = np.flatnonzero(np.isin(trace.kind, (OP, KERNEL, COPY, SET)))
    counted = counted if len(counted) else np.arange(len(trace.ts))
    ops = trace.where(OP)
    lane = -1
    if len(ops):
        if trace.on_gpu:  # the backward pass of what is on a GPU has a thread of its own
            engines = trace.having(lambda key: key.name.startswith("autograd::engine"))[ops]
            others = ops[~np.isin(trace.lane[ops], np.unique(trace.lane[ops[engines]]))]
            ops = others if len(others) else ops
        lanes, where = np.unique(trace.lane[ops], return_inverse=True)
        lane = int(lanes[np.argmax(np.bincount(where, weights=trace.dur[ops]))])
    return float(trace.ts[counted].min()), float((trace.ts[counted] + trace.dur[counted]).max()), lane


def _host(
    trace: Trace, ceilings: Ceilings, window: tuple[float, float, int], adds: float, plain: float | None, delayed: float
) -> tuple[list[OpStat], list[OpStat], list[IdleGap], dict[str, float], float]:
    """Split the time of the main thread, if no kernel ran on a GPU. Operators of a loader are listed apart.

    ``adds``: seconds that profiling adds to an operator. The last result is the part of ``delayed`` between operators.
    """
    begin, end, lane = window
    mine = trace.ops(lane).tolist()
    stats: dict[str, dict[int, OpStat]] = {"": {}, "loading": {}, "recompilation": {}}
    parts = dict.fromkeys(PARTS, 0.0)
    owners = stretches(trace, lane)
    least, numbers = own_floors(trace, mine, ceilings).tolist(), trace.key.tolist()
    segments = self_segments(trace, mine, begin, end)
    cut = ((*each, index) for a, b, index in segments for each in (pieces(owners, a, b) if owners else ((a, b, ""),)))
    seen: set[int] = set()
    lengths: list[float] = []
    subjects: list[tuple[str, OpStat | IdleGap]] = []
    for first, last, owner, index in cut:
        lengths.append(last - first)
        if index < 0:
            subjects.append((owner, IdleGap(first, last)))
            continue
        number = numbers[index]
        stat = stats[owner].get(number)
        if stat is None:
            known = None if least[index] != least[index] else 0.0
            stat = stats[owner][number] = OpStat(trace.keys[number], floor=known)
        subjects.append((owner, stat))
        if index not in seen:
            seen.add(index)
            stat.calls += 1
            stat.floor = stat.floor + least[index] if stat.floor is not None else None
    lost = _interrupted(subjects, np.array(lengths))
    delayed = max(0.0, delayed - float(lost.sum()))
    plain = None if plain is None else plain + delayed  # waiting for a core is no cost of profiling
    costs = (lost + segment_costs(np.array(lengths) - lost, adds / 2, plain)).tolist()
    own: dict[int, list[float]] = defaultdict(list)
    for (owner, subject), length, cost in zip(subjects, lengths, costs, strict=True):
        parts["profiler"] += cost
        if owner:
            parts[owner] += length - cost
        if isinstance(subject, OpStat):
            subject.seconds += length - cost
            own[id(subject)].append(length - cost)
        else:
            subject.cost = cost
    gaps = [gap for owner, gap in subjects if isinstance(gap, IdleGap) and not owner]
    for stat in (*stats[""].values(), *stats["loading"].values()):
        stat.usual = len(own[id(stat)]) * float(np.median(own[id(stat)]))
        stat.floor = stat.floor / (stat.calls or 1) if stat.floor is not None else None
    for stat in stats[""].values():
        _add_op(parts, stat)
    return list(stats[""].values()), list(stats["loading"].values()), gaps, parts, delayed


def _interrupted(subjects: Sequence[tuple[str, OpStat | IdleGap]], lengths: np.ndarray) -> np.ndarray:
    """Return the seconds of each segment in which other programs had the core: an operator takes as long each time."""
    lost, groups = np.zeros(len(lengths)), defaultdict[int, list[int]](list)
    for index, (_, subject) in enumerate(subjects):
        if isinstance(subject, OpStat):
            groups[id(subject)].append(index)
    for group in groups.values():
        times = lengths[group]
        late = times > SELDOM * np.median(times) + SLOW_CALL_S
        if 0 < late.sum() <= max(len(times) >= FEW, RARE * len(times)):
            lost[group] = np.where(late, times - np.median(times), 0.0)
    return lost


def of_number(key: Key) -> bool:
    """Return True if all inputs are single numbers: a Python number became a tensor."""
    return isinstance(key.shapes, list) and bool(key.shapes) and not any(key.shapes)


def _add_op(parts: dict[str, float], stat: OpStat) -> None:
    name = stat.key.name
    if COMMUNICATION.search(name):
        parts["communication"] += stat.seconds
    elif name in SYNC:
        parts["sync"] += stat.seconds
    elif name in COPIES and not of_number(stat.key) and not 0 < (stat.floor or 0.0) < TINY_S:
        parts["copies"] += stat.seconds
    elif stat.floor is None:
        launch = min(stat.calls * LAUNCH_S, stat.seconds)
        if name.startswith(PLUMBING) or name.endswith("Backward0"):  # what takes longer frees memory, or copies
            launch = min(stat.calls * SMALL_S, stat.seconds)
        parts["launch"] += launch
        parts["unrated"] += stat.seconds - launch
    else:
        least = min(stat.seconds, stat.calls * stat.floor)
        parts["floor"] += least
        parts["launch"] += stat.launch
        parts["inefficiency"] += stat.seconds - least - stat.launch


def _device(
    trace: Trace, ceilings: Ceilings, begin: float, end: float
) -> tuple[list[OpStat], list[IdleGap], dict[str, float]]:
    """Split the time of the GPU.

    A kernel's shapes are those of the operator that launched it. If an operator launched several kernels, its floor is
    divided between them in proportion to their times.
    """
    launcher = trace.launchers
    alike = {int(trace.key[i]): op for i in trace.where(KERNEL) if (op := launcher.get(int(trace.link[i]))) is not None}
    marks: list[tuple[float, int, int]] = []
    for kind in (KERNEL, COPY, SET):
        for index in trace.where(kind):
            first, last = max(float(trace.ts[index]), begin), min(float(trace.ts[index] + trace.dur[index]), end)
            if last > first:
                marks += [(first, 1, int(index)), (last, 0, int(index))]
    marks.sort()
    live: dict[int, int] = {}
    owned: dict[int, float] = defaultdict(float)
    gaps: list[IdleGap] = []
    at = begin
    for moment, starts, index in [*marks, (end, 0, -1)]:
        if moment > at:
            if live:
                owned[min(live, key=lambda each: (live[each], each))] += moment - at
            else:
                gaps.append(IdleGap(at, moment))
            at = moment
        if starts:
            live[index] = _rank(trace, index)
        else:
            live.pop(index, None)
    parts = dict.fromkeys(PARTS, 0.0)
    stats: dict[tuple[str, int], OpStat] = {}
    ops_seen: dict[int, set[int]] = defaultdict(set)
    of_operator: dict[int, float] = defaultdict(float)
    for index, seconds in owned.items():
        rank = _rank(trace, index)
        if rank == 1:
            parts["communication"] += seconds
        elif rank >= 2:
            parts["copies"] += seconds
        # A kernel that was launched before the trace began is like others of its name.
        op = launcher.get(int(trace.link[index]), alike.get(int(trace.key[index])))
        name = trace.key_of(index).name
        mark = (name, -1 if op is None else int(trace.key[op]))
        stat = stats.get(mark)
        if stat is None:
            key = trace.key_of(op) if op is not None and rank == 0 else trace.key_of(index)
            key = replace(key, name=name, bytes=trace.key_of(index).bytes)
            stat = stats[mark] = OpStat(key)
            if op is not None and rank == 0:
                stat.operator = trace.key_of(op).name
                stat.floor = floor(trace.key_of(op), ceilings, name)
        stat.calls += 1
        stat.seconds += seconds
        if op is not None:
            ops_seen[mark[1]].add(op if int(trace.link[index]) in launcher else -index)
            if rank == 0:
                of_operator[mark[1]] += seconds
    for mark, stat in stats.items():
        if COMMUNICATION.search(stat.key.name) or mark[0].startswith(("Memcpy", "Memset")):
            continue
        if stat.operator in COPIES:
            parts["copies"] += stat.seconds
            continue
        if stat.floor is None:
            parts["unrated"] += stat.seconds
            continue
        share = stat.seconds / (of_operator[mark[1]] or 1.0)
        stat.floor *= share * len(ops_seen[mark[1]]) / stat.calls
        least = min(stat.seconds, stat.calls * stat.floor)
        parts["floor"] += least
        parts["inefficiency"] += stat.seconds - least
    return list(stats.values()), gaps, parts


def on_the_host(trace: Trace) -> list[int]:
    """Return the operators that take long without using the GPU, excluding nested ones. Compiling and loading data are
    excluded, because they are parts of their own, and operators that only make views."""
    calls = np.sort([float(trace.ts[i]) for i in trace.where(RUNTIME) if re.search(ISSUES, trace.key_of(int(i)).name)])
    found: list[int] = []
    ends: dict[int, float] = {}
    for index in np.flatnonzero(np.isin(trace.kind, (OP, RANGE))):
        begin, end, lane = float(trace.ts[index]), float(trace.ts[index] + trace.dur[index]), int(trace.lane[index])
        if end - begin < HOST_OP_S or begin < ends.get(lane, 0.0):
            continue
        name = trace.key_of(int(index)).name
        if COMPILING.search(name) or LOADING.search(name) or name in FREE:
            ends[lane] = end
        elif trace.kind[index] == OP and np.searchsorted(calls, begin) == np.searchsorted(calls, end):
            found.append(int(index))
            ends[lane] = end
    return found


def _rank(trace: Trace, index: int) -> int:
    """Return the rank of an event: 0 for computing, 1 for communication, 2 for copying or clearing."""
    if trace.kind[index] != KERNEL:
        return 2
    return 1 if COMMUNICATION.search(trace.key_of(index).name) else 0
