"""Records a stretch of a program: torch's profiler, a sampler of Python stacks, and the number of idle cores.

The cost of profiling an operator is measured beforehand, for programs that were not timed without profiling.
"""

from __future__ import annotations

import contextlib
import functools
import math
import os
import re
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .sampler import PERIOD_S, Sample, StackSampler, StackSamples, delayed_seconds
from .split import WINDOW
from .trace import RANGE, Trace
from .trace_file import read_trace

PROBES = 2000
"""Operators run to measure the profiler's own cost."""
LAYERS, CHAINED = 40, 5000
"""Layers of the model that is run to measure what recording by autograd costs; if each call needs the result of the
one before, none of it is forgotten between calls."""
RECORDED = 3
"""Operators of a layer that autograd records: the transposed weight, the product, and ReLU."""
HOOKS = r"Using `torch\.compile\(module\)` when there are global hooks"
"""Text of a warning about hooks of ``StepWatch``, which the program did not install."""
ONE_PROFILER = "torch's profiler is at work already, and there can be one at a time"


class Recording:
    """A stretch of this process under the profiler.

    Args:
        stacks: sample the Python stack.
        file: file of the trace; None if the trace is not kept.
        period_s: seconds between two samples; each holds the program up.
    """

    def __init__(self, *, stacks: bool = True, file: str | Path | None = None, period_s: float = PERIOD_S) -> None:
        self._stacks, self._file, self._period_s = stacks, file, period_s
        self.span = [0.0, math.inf]
        """Begin and end on ``time.monotonic()``."""
        self.began = 0.0
        """Start on ``time.perf_counter()``."""
        self.idle_cores: float | None = None
        """Idle cores of the machine meanwhile; None if the system does not report them."""
        self.delayed = 0.0
        """Share of it for which the recorded thread was ready to run, but other threads or programs had the cores."""
        self.children: list[dict[str, Any]] = []
        """Child processes at the end: ``pid``, ``name`` and ``busy``, the share of a core that each used."""

    def start(self) -> None:
        """Start to record.

        Raises:
            ValueError: another profiler is at work.
        """
        if torch.autograd.profiler._is_profiler_enabled:
            raise ValueError(f"{ONE_PROFILER}: explain what is not profiled otherwise")
        self._quiet = ("ignore", re.compile(HOOKS), UserWarning, None, 0)
        warnings.filters.insert(0, self._quiet)  # type: ignore[attr-defined]
        self._sampler = StackSampler(self._period_s) if self._stacks else None
        with torch.profiler.record_function(WINDOW):
            pass  # the first one of a process takes milliseconds, which would be the program's
        self._profiler = torch.profiler.profile(
            activities=_activities(), record_shapes=True, experimental_config=_settings()
        )
        self._ended = contextlib.ExitStack()
        self._ended.enter_context(self._profiler)
        self._ended.enter_context(_no_other_profiler())
        if torch.cuda.is_available():
            _first_launches()
        if self._sampler is not None:
            self._sampler.__enter__()
        self._range = torch.profiler.record_function(WINDOW)
        self._idle, self._children, self._delayed = _idle_seconds(), children(), delayed_seconds()
        self.began = time.perf_counter()  # just before the mark: samples have this clock, the trace its own
        self._range.__enter__()
        self.span = [time.monotonic(), math.inf]

    def stop(self, *, wait: bool = True) -> None:
        """Stop recording, after the GPU has finished its work if ``wait``; a second call does nothing.

        On a host the profiler pauses until ``finish``: it needs 10 us for each event, for which the program would wait.
        """
        if self.span[1] < math.inf:
            return
        if wait and torch.cuda.is_available():
            torch.cuda.synchronize()
        self.span[1] = time.monotonic()
        idle, lasted = _idle_seconds(), self.span[1] - self.span[0]
        self.delayed = min(1.0, (delayed_seconds() - self._delayed) / lasted) if lasted > 0 else 0.0
        for process, (name, seconds) in children().items() if lasted > 0.1 else ():
            busy = (seconds - self._children.get(process, ("", 0.0))[1]) / lasted
            self.children.append({"pid": process, "name": name, "busy": busy})
        if self._idle is not None and idle is not None and lasted > 0.1:
            self.idle_cores = max(0.0, idle - self._idle) / lasted
        self._range.__exit__(None, None, None)
        if self._sampler is not None:
            self._sampler.__exit__()
        if self._quiet in warnings.filters:
            warnings.filters.remove(self._quiet)  # type: ignore[attr-defined]
        if torch.cuda.is_available() or not _pause(self._profiler):
            self.finish()

    def finish(self) -> None:
        """Make the profiler's events; a second call does nothing."""
        self._ended.close()

    @property
    def own_seconds(self) -> float:
        """Seconds since the start, without those in which the recorded thread waited for a core."""
        return time.perf_counter() - self.began - (delayed_seconds() - self._delayed)

    @property
    def sampled(self) -> list[Sample]:
        """Samples of the Python stack, with times of ``time.perf_counter()``."""
        return [] if self._sampler is None else self._sampler.found.samples

    def read(self) -> tuple[Trace, StackSamples | None]:
        """Read the trace from its mark on, and the samples on its clock."""
        self.finish()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json" if self._file is None else Path(self._file)
            self._profiler.export_chrome_trace(str(path))
            trace = read_trace(path)
        found = marks(trace)
        for index in found[:1]:
            trace.drop_before(float(trace.ts[index]))
        found = marks(trace)
        self.offset = float(trace.ts[found[0]]) - self.began if found else 0.0
        return trace, None if self._sampler is None else self._sampler.found.on_clock(self.offset)


def _pause(profiler: torch.profiler.profile) -> bool:
    """Let a profiler record no more operators; return False if torch cannot. Torch's warning about GPUs is dropped."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        profiler.toggle_collection_dynamic(False, [torch.profiler.ProfilerActivity.CPU])
    except RuntimeError:
        return False
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)
    torch.autograd.profiler._is_profiler_enabled = False  # else optimizers and loaders name ranges
    return True


def marks(trace: Trace) -> list[int]:
    """Return the ranges that mark the explained stretch."""
    return [int(i) for i in trace.where(RANGE) if trace.key_of(int(i)).name == WINDOW]


def children() -> dict[int, tuple[str, float]]:
    """Return (name, seconds on a core) of each child process, including loader workers; empty if the system does not
    report them."""
    found: dict[int, tuple[str, float]] = {}
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for process in map(int, path.read_text().split()):
                with contextlib.suppress(OSError, ValueError, IndexError):
                    name, _, rest = Path(f"/proc/{process}/stat").read_text().partition(" (")[2].rpartition(") ")
                    words = rest.split()
                    found[process] = name, (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
    return found


def _idle_seconds() -> float | None:
    """Return the idle seconds of all cores of the machine together; None if the system does not report them."""
    try:
        words = Path("/proc/stat").read_text().split("\n", 1)[0].split()
        return int(words[4]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, IndexError):
        return None


@functools.cache
def profiler_seconds(device: str = "") -> float:
    """Measure once the seconds that the profiler adds to a small operator on ``device``.

    The default is the GPU, if there is one, where an operator launches a kernel.
    """
    on_gpu = device != "cpu" and torch.cuda.is_available()
    x = torch.ones(4, device="cuda" if on_gpu else "cpu")

    def work() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(PROBES):
            x.neg()
        return time.perf_counter() - began

    work()
    plain = min(work() for _ in range(3))
    with torch.profiler.profile(activities=_activities(), record_shapes=True):
        watched = min(work() for _ in range(3))
    return max(0.0, (watched - plain) / PROBES)


@functools.cache
def autograd_seconds(on_gpu: bool, layers: int = LAYERS) -> tuple[float, float]:
    """Measure once the seconds that recording by autograd adds to an operator of small layers, and those of them that
    forgetting it takes.

    Args:
        layers: number of layers of which the results are kept until the last one ends.
    """
    device = "cuda" if on_gpu else "cpu"
    x, layer = torch.ones(4, 8, device=device), torch.nn.Linear(8, 8, device=device)

    def work() -> tuple[float, float]:
        if on_gpu:
            torch.cuda.synchronize()
        began, freed = time.perf_counter(), 0.0
        for _ in range(max(1, PROBES // layers)):
            y = x
            for _ in range(layers):
                y = torch.relu(layer(y))
            at = time.perf_counter()
            del y
            freed += time.perf_counter() - at
        return time.perf_counter() - began, freed

    recorded, plain = [], []
    for _ in range(5):  # alternately: other work on the machine must not delay only one of them
        recorded.append(work())
        with torch.inference_mode():
            plain.append(work())
    longer, freed = (min(each[i] for each in recorded) - min(each[i] for each in plain) for i in (0, 1))
    calls = RECORDED * layers * max(1, PROBES // layers)
    return max(0.0, longer / calls), max(0.0, freed / calls)


def memory_share(on_gpu: bool) -> float:
    """Return the used share of the device's memory, on a GPU the largest so far; 1 if unknown."""
    if on_gpu:
        return torch.cuda.max_memory_reserved() / torch.cuda.mem_get_info()[1]
    return resident_bytes() / total_memory() if resident_bytes() else 1.0


def resident_bytes() -> int:
    """Return the bytes of memory that this process holds; 0 if the system does not report them."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


def total_memory() -> int:
    """Return the bytes of the machine's memory; 16 GiB if the system does not report them."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, AttributeError):
        return 16 << 30


def _activities() -> list[torch.profiler.ProfilerActivity]:
    """Return all activities of this machine."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")  # the profiler logs each start and end among what the program prints
    every = torch.profiler.ProfilerActivity
    return [every.CPU, every.CUDA] if torch.cuda.is_available() else [every.CPU]


def _settings() -> Any:
    """Return settings that make the profiler keep only its trace: a run of minutes has millions of events.

    Without a GPU it also records operators of all threads; with one, it follows autograd's threads by itself.
    """
    kind = torch._C._profiler._ExperimentalConfig
    threads: Any = {} if torch.cuda.is_available() else {"profile_all_threads": True}
    try:
        return kind(trace_only=True, **threads)
    except TypeError:  # torch 2.12 and before make an object of each event
        return kind(**threads)


@contextmanager
def _no_other_profiler() -> Iterator[None]:
    """Make starting torch's profiler an error inside the block: a second one would end the first, and with it the
    process."""
    kind: Any = torch.autograd.profiler.profile
    plain = kind._prepare_trace

    def refuse(self: Any) -> None:
        raise ValueError(
            f"{ONE_PROFILER}: switch the program's own off while it is explained, or give the trace that it writes to "
            "`transect explain trace`"
        )

    kind._prepare_trace = refuse
    try:
        yield
    finally:
        kind._prepare_trace = plain


def _first_launches() -> None:
    """Let the profiler set itself up on the GPU: the first kernels that it observes begin up to 20 ms late, and would
    otherwise be the program's."""
    for kind in (torch.float32, torch.int64):
        x = torch.ones(128, 8, device="cuda", dtype=kind)
        x[::2].clone().neg_()
    torch.cuda.synchronize()
