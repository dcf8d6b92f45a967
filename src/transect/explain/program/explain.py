"""Explains a PyTorch program while it runs: ``with Explain() as found: ...``, or a script with its arguments.

The torch profiler records operators with their shapes, a thread samples the stack, and hooks look at the token ids that
embeddings get. What all of that costs is measured beforehand and shown as a part of its own.
"""

from __future__ import annotations

import functools
import math
import os
import re
import tempfile
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn

from ...costs.ceilings import Ceilings
from ...costs.floors import Rates
from ...engine.scheduling.decisions import DecisionRing
from ...hardware.cores import usable_cores
from ...hardware.device import detect
from ...ops.cpu.ceilings import device_measurement
from .finding import Material
from .findings import find
from .gaps import name_gaps
from .report import Explanation
from .sampler import Samples, StackSampler
from .script import Script, ScriptFailed
from .split import WINDOW, split_trace
from .trace import KERNEL, OP, RANGE, Trace
from .trace_file import read_trace

PROBES = 2000
"""Operators by which the profiler's own cost is measured."""
LOOKS = 200
"""Calls of embeddings whose ids are looked at."""
SEEN_ROWS = 64
"""Rows of each that are kept for that."""
HOOKS = r"Using `torch\.compile\(module\)` when there are global hooks"
"""A warning about ``_Padding``'s hook, which is none of the program's."""
ONE_PROFILER = "torch's profiler is at work already, and there can be one at a time"


class Explain:
    """Explain the program inside a ``with`` block; afterwards ``result`` is set.

    Args:
        ceilings: rates for floors; None for this machine's, which are measured (seconds) if unknown.
        stacks: sample the Python stack.
        trace: keep the profiler's trace in this file.
        cores: number of cores that the program could use; None for all of this process.
        decisions: of an engine that runs inside (``LLM.decisions``): its steps have floors, though no trace has the
            shapes of what graphs and C++ kernels compute.
        floor_s: the shortest time, in seconds, that all inside can take, where you know it and the trace does not.
    """

    def __init__(
        self,
        ceilings: Ceilings | None = None,
        *,
        stacks: bool = True,
        trace: str | Path | None = None,
        cores: int | None = None,
        decisions: DecisionRing | None = None,
        floor_s: float = 0.0,
    ) -> None:
        self._floor_s = floor_s
        self._cores = cores or usable_cores()
        self._threads = torch.get_num_threads() if ceilings is None else 0
        self.ceilings = ceilings or machine_ceilings()
        self.result: Explanation | None = None
        self._stacks, self._file, self._decisions = stacks, trace, decisions
        self._padding = _Padding()

    def __enter__(self) -> Self:
        if torch.autograd.profiler._is_profiler_enabled:
            raise ValueError(f"{ONE_PROFILER}: explain what is not profiled otherwise")
        self._overhead = profiler_seconds()
        self._process = os.getpid()
        self._hook = nn.modules.module.register_module_forward_pre_hook(self._padding.look)
        self._quiet = ("ignore", re.compile(HOOKS), UserWarning, None, 0)
        warnings.filters.insert(0, self._quiet)  # type: ignore[attr-defined]
        self._sampler = StackSampler() if self._stacks else None
        with torch.profiler.record_function(WINDOW):
            pass  # the first one of a process takes milliseconds, which would be the program's
        self._profiler = torch.profiler.profile(
            activities=_activities(), record_shapes=True, experimental_config=_settings()
        )
        self._profiler.__enter__()
        self._alone = _no_other_profiler()
        self._alone.__enter__()
        if torch.cuda.is_available():
            _first_launches()
        if self._sampler is not None:
            self._sampler.__enter__()
        self._range = torch.profiler.record_function(WINDOW)
        self._range.__enter__()
        self._began = time.perf_counter()
        self._span = [time.monotonic(), math.inf]
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if os.getpid() != self._process:
            return  # a child that was forked inside: profiler and samples are its parent's
        if kind is None and torch.cuda.is_available():
            torch.cuda.synchronize()
        self._span[1] = time.monotonic()
        self._range.__exit__(None, None, None)
        if self._sampler is not None:
            self._sampler.__exit__()
        self._alone.__exit__(None, None, None)
        self._profiler.__exit__(None, None, None)
        self._hook.remove()
        if self._quiet in warnings.filters:
            warnings.filters.remove(self._quiet)  # type: ignore[attr-defined]
        if kind is not None and not issubclass(kind, (SystemExit, KeyboardInterrupt)):
            return
        trace = self._trace()
        if torch.cuda.is_available() and not trace.on_gpu:
            self._overhead = profiler_seconds("cpu")
        if self._threads not in (0, torch.get_num_threads()) and not trace.on_gpu:
            self.ceilings = machine_ceilings()  # the program chose another number of threads: floors are for these
        facts = {"threads": torch.get_num_threads(), "cores": self._cores, "padding": self._padding.share}
        if trace.recorded:
            facts["autograd_s"] = autograd_seconds(trace.on_gpu)
        marked = _marks(trace)
        offset = float(trace.ts[marked[0]]) - self._began if marked else 0.0
        self.result = explain_trace(
            trace,
            self.ceilings,
            None if self._sampler is None else self._sampler.found.on_clock(offset),
            profiler_s=self._overhead,
            facts=facts,
            steps_s=self._steps_floor(),
            floor_s=self._floor_s,
        )

    def _steps_floor(self) -> float:
        """Return the floors of the engine steps that ended inside, together."""
        if self._decisions is None:
            return 0.0
        from ..engine.log import build
        from ..engine.work import StepWork

        log = build(self._decisions.records(), complete=not self._decisions.lost)
        dtype = str(log.header.device.get("dtype", "float32"))
        work = StepWork.of(log.header, Rates.of(self.ceilings, dtype))
        begin, end = self._span
        return sum(work.floor(step.rows).seconds for step in log.steps if begin <= (step.at or 0.0) <= end)

    def _trace(self) -> Trace:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json" if self._file is None else Path(self._file)
            self._profiler.export_chrome_trace(str(path))
            return _from_mark(read_trace(path))


def _marks(trace: Trace) -> list[int]:
    """Return the ranges that mark what is explained."""
    return [int(i) for i in trace.where(RANGE) if trace.key_of(int(i)).name == WINDOW]


def _from_mark(trace: Trace) -> Trace:
    """Return the trace without what ended before the mark: ``_first_launches`` is not the program's."""
    for index in _marks(trace)[:1]:
        trace.drop_before(float(trace.ts[index]))
    return trace


def explain_trace(
    trace: Trace,
    ceilings: Ceilings,
    samples: Samples | None = None,
    *,
    profiler_s: float = 0.0,
    facts: dict[str, Any] | None = None,
    steps_s: float = 0.0,
    floor_s: float = 0.0,
) -> Explanation:
    """Split a trace and find what to change.

    Args:
        samples: of the main thread, on the trace's clock.
        steps_s: the least time of what has no shapes in the trace, where an engine's decision log says it.
        floor_s: the least time of everything, where the caller knows it.
    """
    trace = _from_mark(trace)
    facts = dict(facts or {})
    facts.setdefault("backward", any("Backward" in key.name or "autograd::" in key.name for key in trace.keys))
    padded = float(facts.get("padding", 0.0))
    split = split_trace(trace, ceilings, profiler_s=profiler_s, padding=padded)
    named = name_gaps(split, samples)
    if steps_s:
        split.rate(steps_s)
        split.notes.append("floors of kernels without shapes are those of the engine's steps")
    elif floor_s:
        split.rate(max(0.0, floor_s - split.parts["floor"]))
        split.notes.append("kernels without shapes have what the others leave of the floor that was given")
    if trace.truncated:
        split.notes.append("the trace ends in the middle: what came after is missing")
    if not np.isin(trace.kind, (OP, KERNEL)).any():
        split.notes.append("no operator of PyTorch ran in the process: all of it is Python")
    elif not any(key.shapes for key in trace.keys):
        split.notes.append("the trace has no shapes (record_shapes=True records them): no kernel has a floor")
    found = find(Material(split, ceilings, named, samples, facts))
    return Explanation(split, found, named, facts, ceilings)


def explain_script(script: Script, run: Explain) -> Explanation:
    """Run a script as ``python`` would, and explain it: all of it, or what ran until Ctrl-C.

    Raises:
        ValueError: there is no such script.
        ScriptFailed: it ended with an error; ``found`` explains what ran until then.
    """
    script.check()
    with run:
        ending = script.run()
    assert run.result is not None
    found = replace(run.result, interrupted=ending.interrupted)
    if ending.interrupted:
        found.split.notes.append("the script was interrupted: this is what ran until then")
    if ending.failed:
        found.split.notes.append("the script ended with an error: this is what ran until then")
        raise ScriptFailed(ending.failed, found)
    return found


def machine_ceilings() -> Ceilings:
    """Those of this machine's first device, measured if nothing is known of it."""
    return device_measurement(detect()).ceilings


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
def autograd_seconds(on_gpu: bool) -> float:
    """Measure once the seconds that recording by autograd adds to a small product."""
    device = "cuda" if on_gpu else "cpu"
    x, weight = torch.ones(8, 8, device=device), torch.ones(8, 8, device=device, requires_grad=True)

    def work() -> float:
        if on_gpu:
            torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(PROBES):
            x.mm(weight)
        return time.perf_counter() - began

    recorded, plain = [], []
    for _ in range(5):  # in turns: other work on the machine must not hold up one of them alone
        recorded.append(work())
        with torch.inference_mode():
            plain.append(work())
    return max(0.0, (min(recorded) - min(plain)) / PROBES)


def _activities() -> list[torch.profiler.ProfilerActivity]:
    """All that there are on this machine."""
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
    """Inside, starting torch's profiler is an error of the program: a second one would end the first, and with it the
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
    """Lets the profiler set itself up on the GPU: the first kernels that it watches begin up to 20 ms late, and would
    be the program's otherwise."""
    for kind in (torch.float32, torch.int64):
        x = torch.ones(2 * SEEN_ROWS, 8, device="cuda", dtype=kind)
        x[::2].clone().neg_()
    torch.cuda.synchronize()


class _Padding:
    """The share of padding among the ids that embeddings get: ``padding_idx``, or the id that ends most rows."""

    def __init__(self) -> None:
        self._seen: list[tuple[Tensor, int | None, int]] = []
        """Some rows of the ids, the module's ``padding_idx``, and how many ids there were."""

    def look(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        """A forward pre-hook of all modules. It waits for nothing: ids are looked at in the end."""
        if not isinstance(module, nn.Embedding) or len(self._seen) >= LOOKS or not inputs:
            return
        ids = inputs[0]
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.shape[1] < 4 or ids.device.type == "meta":
            return
        if len(ids) and not torch.compiler.is_compiling():
            rows = ids.detach()[:: -(-len(ids) // SEEN_ROWS)].clone()
            self._seen.append((rows, module.padding_idx, ids.numel()))

    @property
    def share(self) -> float:
        """0 where nothing was seen, or where it is too little to be padding."""
        tokens = sum(count for _, _, count in self._seen)
        share = sum(_padded(rows.cpu(), pad) * count for rows, pad, count in self._seen) / tokens if tokens else 0.0
        return share if share > 0.05 else 0.0


def _padded(ids: Tensor, pad: int | None) -> float:
    """Return the share of padding at the ends of rows; ``pad``: None for the id that ends at least half of the rows."""
    last = ids[:, -1:]
    if pad is None:
        value = last.mode(0).values
        if int((last == value).sum()) * 2 < len(ids) or len(ids) < 2:
            return 0.0
        pad = int(value)
    # Only the run of padding at the end of a row counts: the id may also be a token.
    return float((ids == pad).flip(1).cumprod(1).double().mean())
