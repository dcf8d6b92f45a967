"""Samples, every few milliseconds, the Python stacks of this process's threads.

The samples name the gaps between operators, which a profiler of operators shows as nothing. A sample is the main
thread's stack, from the innermost frame outwards, and how many other threads were running Python.
"""

from __future__ import annotations

import ctypes
import gc
import random
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, chain, islice, repeat, takewhile, tee
from operator import attrgetter, itemgetter, methodcaller
from types import CodeType
from typing import Any, Self

PERIOD_S = 0.002
SWITCH_S = 20e-6
"""Seconds after which the sampled thread releases the interpreter's lock. With Python's own 5 ms it would mostly do so
at the next operator, and every sample would show that line."""
SLACK_NS = 1000
"""Slack of timers of the sampling thread, in nanoseconds. With Linux's own 50 us it would ask for the lock so much
later, and lines that let go of it would be seen more often than they run (docs/lab-notes/explain.md)."""
PR_SET_TIMERSLACK = 29
LITTLE_S = 100e-6
"""Seconds of computing since the last sample up to which a thread counts as waiting."""
RECENT_S = 0.03
"""Seconds since a thread's last computing up to which it counts as running: on a busy machine each thread runs only now
and then."""
DEEPEST = 60
WAITS = ("wait", "acquire", "select", "poll", "accept", "recv", "get", "join", "_wait_for_tstate_lock", "sleep", "run")
"""Innermost functions of waiting threads."""


@dataclass(frozen=True, slots=True)
class Frame:
    """A line of a stack."""

    file: str
    function: str
    line: int

    def __str__(self) -> str:
        return f"{self.function} ({self.file}:{self.line})"


@dataclass(frozen=True, slots=True)
class Sample:
    """A sample; ``at`` is its time in seconds, ``busy`` the number of other threads that ran Python."""

    at: float
    stack: tuple[Frame, ...]
    busy: int


@dataclass(slots=True)
class StackSamples:
    """Recorded samples; ``collections``: (begin, end) of each run of the garbage collector."""

    period: float = PERIOD_S
    samples: list[Sample] = field(default_factory=list)
    collections: list[tuple[float, float]] = field(default_factory=list)
    anomalies: int = 0
    """Samples in which autograd's anomaly detection was on."""

    def between(self, begin: float, end: float) -> StackSamples:
        """Return the samples of a time interval."""
        inside = [each for each in self.samples if begin <= each.at < end]
        kept = [(first, last) for first, last in self.collections if begin <= first < end]
        return StackSamples(self.period, inside, kept, self.anomalies)

    def on_clock(self, offset: float) -> StackSamples:
        """Return the samples with times shifted by ``offset`` seconds, to another clock."""
        return StackSamples(
            self.period,
            [replace(sample, at=sample.at + offset) for sample in self.samples],
            [(begin + offset, end + offset) for begin, end in self.collections],
            self.anomalies,
        )


class StackSampler:
    """Samples the thread that enters it, until it leaves.

    Args:
        period: mean seconds between two samples.
        own_time: give samples the thread's own time (``own_times``), instead of ``time.perf_counter()``.
    """

    def __init__(self, period: float = PERIOD_S, *, own_time: bool = False) -> None:
        self._own_time = own_time
        self._delays: list[float] = []
        """Seconds for which the thread had waited for a core at each sample, if ``own_time``."""
        self.found = StackSamples(period)
        self._stop = threading.Event()
        self._collecting = 0.0
        self._frames: dict[tuple[int, int], tuple[Frame, CodeType]] = {}
        self._stacks: dict[tuple[Frame, ...], tuple[Frame, ...]] = {}
        """Frames and stacks, each kept once, because a long run repeats them."""

    def __enter__(self) -> Self:
        self._watched, self._native = threading.get_ident(), threading.get_native_id()
        self._thread = threading.Thread(target=self._run, daemon=True, name="transect-sampler")
        gc.callbacks.append(self._collection)
        self._interval = sys.getswitchinterval()
        sys.setswitchinterval(SWITCH_S)
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop.set()
        self._thread.join()
        sys.setswitchinterval(self._interval)
        gc.callbacks.remove(self._collection)
        if self._own_time:
            own = own_times([each.at for each in self.found.samples], self._delays)
            pairs = zip(self.found.samples, own, strict=True)
            self.found.samples = [replace(sample, at=at) for sample, at in pairs]

    def _run(self) -> None:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_TIMERSLACK, SLACK_NS, 0, 0, 0)
        own = threading.get_ident()
        before: dict[int, int] = {}
        stood: dict[int, tuple[CodeType, int]] = {}
        seen: dict[int, float] = {}
        chance = random.Random(0)
        while not self._stop.wait(self.found.period * (0.5 + chance.random())):  # steps may last as long as a period
            at = time.perf_counter()  # the watched thread stands still from here on
            places, running = _look(self._watched)
            others = {thread: place for thread, place in running if thread not in (own, self._watched)}
            busy = 0
            known = [each for each in threading.enumerate() if each.ident in others]
            now = {each.ident: _scheduled(each.native_id, 0) for each in known}
            for thread, place in others.items():
                ran = now.get(thread)
                # The system gives no processor time for some threads: these run if their instruction has changed.
                moved = place != stood.get(thread, place)
                if moved if ran is None else ran - before.get(thread, ran) >= LITTLE_S * 1e9:
                    seen[thread] = at
                waits = at - seen.get(thread, -1.0) > RECENT_S
                busy += not (waits or place[0].co_name in WAITS)
            stood = others
            before = {ident: ran for ident, ran in now.items() if ident is not None and ran is not None}
            self.found.anomalies += _anomaly_detection()
            if places:
                self.found.samples.append(Sample(at, self._stack(places), busy))
                self._delays += [delayed_seconds(self._native)] * self._own_time

    def _stack(self, places: list[tuple[CodeType, int | None]]) -> tuple[Frame, ...]:
        found: list[Frame] = []
        for code, number in places:
            line = number or 0
            known = self._frames.get((id(code), line))
            if known is None:  # the code is held, so that no other gets its number
                known = self._frames[id(code), line] = Frame(code.co_filename, code.co_name, line), code
            found.append(known[0])
        stack = tuple(found)
        return self._stacks.setdefault(stack, stack)

    def _collection(self, phase: str, info: dict[str, int]) -> None:
        if threading.get_ident() != self._watched:
            return  # samples are objects too
        now = time.perf_counter() - (delayed_seconds(self._native) if self._own_time else 0.0)
        if phase == "start":
            self._collecting = now
        else:
            self.found.collections.append((self._collecting, now))


def _anomaly_detection() -> bool:
    """Return True if autograd's anomaly detection is on."""
    torch = sys.modules.get("torch")
    return bool(torch is not None and torch.is_anomaly_enabled())


def _look(watched: int) -> tuple[list[tuple[CodeType, int | None]], list[tuple[int, tuple[CodeType, int]]]]:
    """Return (code, line) of a thread's frames, innermost first, and the current code and instruction of each thread.

    A thread that holds a frame when its function returns destroys the function's variables in its own thread when it
    releases the frame, and torch has guards that restore thread-local state when they are destroyed. So each look is
    one call that keeps no frame, and during which no other thread runs: it calls only C code, and no garbage is
    collected.
    """
    collecting = sys.version_info < (3, 12) and gc.isenabled()  # later ones collect between two instructions alone
    if collecting:
        gc.disable()
    try:
        return list(_places(watched)), list(_instructions())
    finally:
        if collecting:
            gc.enable()


def _frames() -> Iterator[Any]:
    """Return the innermost frame of each thread, as a dictionary, at the time of the call."""
    return islice(iter(sys._current_frames, None), 1)


def _places(watched: int) -> Iterator[Any]:
    frames = accumulate(chain(map(itemgetter(watched), _frames()), repeat("f_back", DEEPEST - 1)), getattr)
    return map(attrgetter("f_code", "f_lineno"), takewhile(bool, frames))


def _instructions() -> Iterator[Any]:
    keys, values = tee(chain.from_iterable(map(methodcaller("items"), _frames())))
    return zip(map(itemgetter(0), keys), map(attrgetter("f_code", "f_lasti"), map(itemgetter(1), values)), strict=True)


def own_times(times: Sequence[float], delays: Sequence[float]) -> list[float]:
    """Return a thread's own time at these moments: without the time for which it waited for a core.

    A moment of a wait counts as the wait's begin, because the system adds a wait to ``delays`` only when it ends.

    Args:
        times: seconds, rising.
        delays: seconds for which the thread had waited, as the system gave them at these moments.
    """
    own = (at - delay for at, delay in zip(reversed(times), reversed(delays), strict=True))
    return list(accumulate(own, min))[::-1]


def delayed_seconds(native: int | None = None) -> float:
    """Return the seconds for which a thread, by default this one, was ready to run while other threads or programs had
    the cores; 0 if the system does not report them."""
    return 1e-9 * (_scheduled(native or threading.get_native_id(), 1) or 0)


def _scheduled(native: int | None, column: int) -> int | None:
    """Return the nanoseconds that a thread has run on a core (column 0) or waited for one (column 1); None if the
    system does not report them."""
    try:
        with open(f"/proc/self/task/{native}/schedstat") as file:
            return int(file.read().split()[column])
    except (OSError, ValueError, IndexError):
        return None
