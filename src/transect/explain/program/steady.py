"""Records the steady state of a program: its first steps, some without profiling, then a window of profiled ones.

The first recording begins with the program and ends when a step has repeated. It is explained where the program ends
too early for a window, and where it has no steps. Steps without profiling are timed before the window and after it.
In between, the Python stack of some steps is sampled without a profiler, which makes calls of operators longer.
"""

from __future__ import annotations

import ctypes
import itertools
import math
import os
import threading
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from .doing import IMPORTS, user_stack
from .finding import ENOUGH
from .recording import Recording, resident_bytes, total_memory
from .sampler import StackSampler, StackSamples
from .steps import KINDS, LOOKS, REPEATS, Mark, StepWatch, UnprofiledSteps

MOST_AFTER = 50
"""Most steps that are timed after the window."""
FIRST_S = 10.0
"""Longest first recording in seconds: a program may call operators for hours without a step."""
LONGER = 4
"""Longest window, in windows as they were asked for: steps may end."""
MOST_BYTES = 1 << 31
"""Most bytes by which the process may grow during a recording, or an eighth of the memory, which events may fill."""
SELDOM_S = 0.005
"""Seconds between samples of profiled steps, which only name gaps."""
SAMPLES = 400
"""Samples of the Python stack that are taken without a profiler, if a second is enough for them."""
LEAST_S = 1.0
"""Least seconds of a window with fewer than ``SOME`` steps: on a busy machine one step may fill a short window."""
SOME = 20
"""Steps after which a window may end in a third of its time, or in a tenth if they make the program slower by
``COST``."""
COST = 0.03
"""Share of the time until then by which profiled steps may be longer than others."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The steps of a program, and the explained ones. Times are seconds."""

    kind: str
    """Kind of event that marks a step."""
    count: int
    """Number of steps of the whole program; if each is a forward call, those after the first hundreds are estimated."""
    explained: int
    plain_s: float
    """Median time of a step without profiling; 0 if none was timed."""
    profiled_s: float
    """Median time of a profiled step."""
    startup_s: float
    """Time until the first step began or ended."""
    imports_s: float
    """Time of importing modules during start-up."""
    total_s: float
    """Wall time of the explained program."""

    @property
    def plain_share(self) -> float:
        """Share of the profiled time that steps need without profiling; 1 if unknown."""
        return min(1.0, self.plain_s / self.profiled_s) if self.plain_s and self.profiled_s else 1.0

    def __str__(self) -> str:
        plain = f"{1e3 * self.plain_s:.2f} ms plain, " if self.plain_s else ""
        imports = f" (imports {self.imports_s:.1f} s)" if self.imports_s >= 0.05 else ""
        return (
            f"program {self.total_s:.1f} s: start-up {self.startup_s:.1f} s{imports}, then {self.count} steps (each a "
            f"{self.kind}); {self.explained} of them are explained: a step takes {plain}"
            f"{1e3 * self.profiled_s:.2f} ms profiled"
        )


class Steady:
    """Recordings of one program.

    Args:
        window_s: seconds of steps that are profiled; 0: all that runs is, without looking for steps.
        stacks: sample the Python stack.
        file: where to keep the trace.
    """

    def __init__(self, window_s: float = 0.0, *, stacks: bool = True, file: str | Path | None = None) -> None:
        self._window_s, self._stacks, self._file = window_s, stacks, file
        self.watch = StepWatch(self._seen if window_s else None)
        self._first = Recording(stacks=stacks, file=file)
        self._window: Recording | None = None
        self._moments: dict[Mark, list[float]] = {}
        """Times of each mark in the first recording."""
        self._inside: list[float] = []
        """Times of steps in the window."""
        self._step: Mark | None = None
        self._taken: set[Mark] = set()
        """Marks that were the step's."""
        self._sampler: StackSampler | None = None
        self._sampling = 0.0
        self._ended = threading.Event()
        self._limit = threading.Thread(target=self._guard, daemon=True, name="transect-guard")
        self._stopping = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p)(self._cut)
        self._switching = False
        """True while a recording starts or stops."""
        self._unseen = math.inf
        """Time from which steps are no longer counted."""
        self._others: Counter[Mark] = Counter()
        """Marks of the step's kind since the step was last seen."""
        self.limited = 0.0
        """Seconds of the first recording, if it ended before the program and without a step; else 0."""
        self._state = "first"
        self._least_s = min(0.05, window_s / 3)  # steps after the window are timed as well
        self._before, self._after = UnprofiledSteps(self._least_s), UnprofiledSteps()
        self.recording = self._first
        """The recording to explain."""
        self.imports_s = 0.0
        """Time of importing modules in the first recording."""
        self.steps: Steps | None = None
        """Steps of the program; None if none repeat."""
        self.between: tuple[float, float] | None = None
        """Interval of the recording to explain, on ``time.perf_counter()``; None for all of it."""

    def start(self) -> None:
        """Start the first recording."""
        self._process = os.getpid()
        self.watch.start()
        try:
            self._first.start()
        except BaseException:
            self.watch.stop()
            raise
        self._began = time.perf_counter()
        if self._window_s and threading.current_thread() is threading.main_thread():
            self._limit.start()

    def _guard(self) -> None:
        """End recordings that last too long, or of which the events fill the memory."""
        recording: Recording | None = None
        before, least = 0, min(MOST_BYTES, total_memory() // 8)
        while not self._ended.wait(0.1):
            now = self._first if self._state == "first" else self._window if self._state == "window" else None
            if now is not recording:
                recording, before = now, resident_bytes()
            if recording is None or not recording.began:
                continue
            lasted = time.perf_counter() - recording.began
            longest = FIRST_S if recording is self._first else max(FIRST_S, LONGER * self._window_s)
            if lasted > longest or resident_bytes() - before > least:
                # The main thread, where the profiler runs, calls ``_cut`` between two instructions.
                ctypes.pythonapi.Py_AddPendingCall(self._stopping, None)

    def _cut(self, given: object) -> int:
        """End the recording in progress."""
        if self._switching or self._ended.is_set() or os.getpid() != self._process:
            return 0
        if self._state == "first" and not self.limited:
            self.limited = time.perf_counter() - self._first.began
            self._first.stop(wait=False)
        elif self._state == "window":
            assert self._window is not None
            self._window.stop(wait=False)
            self._sample()
        return 0

    def _seen(self, mark: Mark) -> None:
        if os.getpid() != self._process:  # a worker that was forked
            return
        self._switching = True
        try:
            self._change(mark, time.perf_counter())
        finally:
            self._switching = False

    def _change(self, mark: Mark, now: float) -> None:
        if self._state == "first":
            self._moments.setdefault(mark, []).append(now)
            if self.watch.step() == mark:
                self._state = "plain"
                self._adopt(mark)
                self._first.stop()
                if mark[0] != KINDS[-1]:
                    self.watch.ignore_forward()
                self._before.restart()
            return
        if self._state == "plain" and mark != self._step and self._better(mark):
            self._adopt(mark)
        if mark != self._step and not self._replaced(mark):
            return
        self._others.clear()
        if self._state == "plain":
            if self._before.mark():
                self._first.finish()
                self._window = Recording(stacks=self._stacks, file=self._file, period_s=SELDOM_S)
                self._state = "window"
                self._window.start()
                self._inside.append(time.perf_counter())
        elif self._state == "window":
            self._inside.append(now)
            spent, steps = now - self._inside[0], len(self._inside) - 1
            enough = steps >= SOME or (steps > 2 and spent > LEAST_S) or spent > max(LEAST_S, 10 * self._window_s)
            slower = spent - steps * self._before.median > COST * (now - self._began)
            least = self._window_s / (1 if steps < SOME else 10 if slower else 3)
            assert self._window is not None
            if enough and spent >= least and self._window.own_seconds >= least:
                self._window.stop()
                self._sample()
        elif self._state == "sampled":
            assert self._sampler is not None
            spent = time.perf_counter() - self._sampling
            found = len(self._sampler.found.samples)
            if found >= SAMPLES or (spent >= max(1.0, self._window_s) and found >= ENOUGH):
                self._stop_sampling()
                self._after.restart()
        elif len(self._after.seconds) < MOST_AFTER:
            self._after.mark()
        elif mark[0] == KINDS[-1] and self.watch.counts[mark] >= LOOKS:  # hooks make each call of each module longer
            self.watch.ignore_forward()
            self._unseen = now

    def _adopt(self, mark: Mark) -> None:
        """Take another mark as that of steps."""
        self._step = mark
        self._taken.add(mark)
        if self._state == "plain":
            self._before = UnprofiledSteps(self._least_s)
        if self._state in ("plain", "window"):  # afterwards the window's steps are known
            self._inside.clear()
        self._after.restart()

    def _replaced(self, mark: Mark) -> bool:
        """Return True if a mark of the same kind comes again and again instead of the step's: a program may train
        several models one after another."""
        if self._step is None or mark[0] != self._step[0] or mark[0] == KINDS[-1]:
            return False
        self._others[mark] += 1
        if self._others[mark] >= REPEATS:
            self._adopt(mark)
        return mark == self._step

    def _sample(self) -> None:
        """Sample steps without profiling."""
        self._state = "sampled" if self._stacks else "after"
        if self._stacks:
            self._sampling = time.perf_counter()
            self._sampler = StackSampler(own_time=True)
            self._sampler.__enter__()
        self._after.restart()

    def _stop_sampling(self) -> None:
        assert self._sampler is not None
        self._sampler.__exit__()
        self._state = "after"

    @property
    def plain_samples(self) -> StackSamples | None:
        """Samples of steps without profiling; None if there are none."""
        return None if self._sampler is None else self._sampler.found

    def _better(self, mark: Mark) -> bool:
        """Return True if another mark repeats, and is a better sign of steps than the chosen one."""
        chosen = self._step
        better = chosen is not None and KINDS.index(mark[0]) < KINDS.index(chosen[0])
        return better and self.watch.step() == mark

    @property
    def done(self) -> bool:
        """True if the window is over, or no step has repeated yet."""
        return self._state in ("first", "after")

    def stop(self, *, wait: bool = True) -> None:
        """End all recordings and choose the one to explain."""
        ended = time.perf_counter()
        self._ended.set()
        if self._limit.is_alive():
            self._limit.join()  # a call that it asked for comes while this object exists
        self.watch.stop()
        if self._state == "first":
            self._first.stop(wait=wait)
        elif self._state == "window":
            assert self._window is not None
            self._window.stop(wait=wait)
        elif self._state == "sampled":
            self._stop_sampling()
        for recording in filter(None, (self._first, self._window)):
            recording.finish()
        self.imports_s = self._imports(ended)
        if self._step is None:
            return
        moments = self._moments.get(self._step, [])
        inside = self._inside
        if len(inside) > 3 or (1 < len(inside) >= len(moments)):
            assert self._window is not None
            self.recording = self._window
        else:
            inside = moments[1:] if len(moments) > 2 else moments  # the first one warms up
        if len(inside) < 2:
            return
        lengths = sorted(last - first for first, last in itertools.pairwise(inside))
        plain = UnprofiledSteps()
        plain.seconds = self._before.seconds + self._after.seconds
        first = moments[0] if moments else inside[0]
        self.between = inside[0], inside[-1]
        self.steps = Steps(
            self._step[0],
            sum(self.watch.counts[mark] for mark in self._taken)
            + (int(max(0.0, ended - self._unseen) / plain.median) if plain.median else 0),
            len(inside) - 1,
            plain.median,
            lengths[len(lengths) // 2],
            first - self._began,
            self._imports(first),
            ended - self._began,
        )

    def _imports(self, until: float) -> float:
        """Estimate the seconds before a time that were spent on importing modules."""
        samples = [each for each in self._first.sampled if each.at < until]
        count = sum(any(IMPORTS in frame.file for frame in user_stack(each.stack)) for each in samples)
        return (until - self._began) * count / len(samples) if samples else 0.0
