"""Explains a running PyTorch program: ``with Explain() as found: ...``, or a script with its arguments.

The torch profiler records operators with their shapes, a thread samples the stack, and hooks look at the token ids that
embeddings get. What all of that costs is measured beforehand and shown as a part of its own.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import io
import os
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch

from ...costs.ceilings import Ceilings
from ...costs.floors import Rates
from ...engine.scheduling.decisions import DecisionRing
from ...hardware.cores import usable_cores
from ...hardware.device import detect
from ...ops.cpu.ceilings import device_measurement
from .changes import NotPossible
from .doing import waits_for_gpu
from .finding import MANY, Material, weighed
from .findings import find
from .findings_host import IDLE
from .gaps import Named, name_gaps
from .recording import CHAINED, LAYERS, autograd_seconds, marks, memory_share, profiler_seconds
from .report import Explanation
from .sampler import Sample, StackSamples
from .script import Input, Script, ScriptFailed
from .split import WAITS, Split, split_trace, trace_seconds
from .steady import Steady, Steps
from .timing import timed
from .trace import KERNEL, OP, Trace

SLOWED = {"launch": 0.8, "host": 0.35, "sync": 0.5, "loading": 0.35, "unrated": 0.2}
"""Parts that profiling makes longer (calls of operators, and Python), and the share of each that it can be."""


SEEN, LONGER = 0.05, 2.0
"""Least share of samples of a function that may wait for a GPU, and the factor by which its share may grow without
profiling if it does not."""


class Explain:
    """Explains the code inside of ``with``; afterwards ``result`` is set.

    Args:
        ceilings: rates for floors; None if those of this machine, measured (seconds) if they are not known.
        stacks: sample the Python stack.
        trace: keep the profiler's trace in this file.
        cores: cores that the program could use; None if all that this process may run on.
        decisions: of an engine that runs inside (``LLM.decisions``): its steps have floors, though no trace has the
            shapes of what graphs and C++ kernels compute.
        floor_s: the shortest time, in seconds, that all inside can take, where you know it and the trace does not.
        window_s: look for the step that repeats, and profile steps for this time; 0 to profile all that runs inside.
        progress: called with a line about each stage of the analysis.
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
        window_s: float = 0.0,
        progress: Callable[[str], None] | None = None,
    ) -> None:
        self._floor_s, self._window_s = floor_s, window_s
        self._say = progress or (lambda line: None)
        self._all_cores = cores is None
        self._cores = cores or usable_cores()
        self._threads = torch.get_num_threads() if ceilings is None else 0
        self.ceilings = ceilings or machine_ceilings()
        self._explain: functools.partial[Explanation] | None = None
        self._result: Explanation | None = None
        self._stacks, self._file, self._decisions = stacks, trace, decisions

    @property
    def result(self) -> Explanation | None:
        """Explanation of what ran inside; None before its end, and after an error."""
        if self._result is None and self._explain is not None:
            with _no_collections():
                self._result = self._explain(steps=self._steady.steps)
            if self.limited:
                seconds = f"{self._steady.limited:.0f}"
                self._result.split.notes.append(f"no step repeats: only the first {seconds} seconds are explained")
        return self._result

    def __enter__(self) -> Self:
        self._overhead = profiler_seconds()
        self._process = os.getpid()
        self._steady = Steady(self._window_s, stacks=self._stacks, file=self._file)
        self._steady.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        if os.getpid() != self._process:
            return  # a child that was forked inside: profiler and samples are its parent's
        self._steady.stop(wait=kind is None)
        if kind is not None and not issubclass(kind, (SystemExit, KeyboardInterrupt)):
            return
        self._say("reading the trace")
        steady = self._steady
        with _no_collections():
            trace, samples = steady.recording.read()
        if steady.between is not None:
            begin, end = (each + steady.recording.offset for each in steady.between)
            trace.crop(begin, end, marks(trace)[0])
            samples = samples and samples.between(begin, end)
        if torch.cuda.is_available() and not trace.on_gpu:
            self._overhead = profiler_seconds("cpu")
        if self._threads not in (0, torch.get_num_threads()) and not trace.on_gpu:
            self.ceilings = machine_ceilings()  # the program chose another number of threads: floors are for these
        facts: dict[str, Any] = {
            "threads": torch.get_num_threads(),
            "cores": self._cores,
            "padding": steady.watch.padding,
            "chained": steady.watch.chained,
            "prefix": steady.watch.prefix,
            "unused": steady.watch.unused,
            "steps": steady.steps.explained if steady.steps is not None else 0,
            "memory": memory_share(trace.on_gpu),
            "delayed": steady.recording.delayed,
            "fused": {},
        }
        if self._all_cores and steady.recording.idle_cores is not None:
            facts["idle_cores"] = steady.recording.idle_cores
        if steady.recording.children:
            facts["children"] = steady.recording.children
        if trace.recorded and not ran_backward(trace):
            layers = CHAINED if steady.watch.chained else LAYERS
            facts["autograd_s"], facts["forgetting_s"] = autograd_seconds(trace.on_gpu, layers)
        self._say(f"explaining {len(trace.ts)} events")
        self._explain = functools.partial(
            explain_trace,
            trace,
            self.ceilings,
            samples,
            profiler_s=self._overhead,
            facts=facts,
            steps_s=self._steps_floor(),
            floor_s=self._floor_s,
            plain_samples=steady.plain_samples,
        )

    @property
    def limited(self) -> bool:
        """True if only the beginning of a program without steps was recorded."""
        return bool(self._steady.limited) and self._steady.steps is None

    @property
    def done(self) -> bool:
        """True if the window of steps is over, or no step has repeated yet."""
        return self._steady.done

    def repeatable(self, longest_s: float) -> bool:
        """Return True if the program had no steps, and took no longer than ``longest_s`` seconds."""
        begin, end = self._steady.recording.span
        return self._steady.steps is None and not self.limited and 0 < end - begin <= longest_s

    def again(self, script: Script) -> Explanation:
        """Time a script without profiling, and explain it with that."""
        self._say("timing the program without profiling")
        try:
            plain = timed(replace(script, stdin=script.stdin or Input(io.BytesIO())))
        except NotPossible as error:
            assert self.result is not None
            self.result.split.notes.append(f"without profiling the program was not timed: {error}")
            return self.result
        return self.fitted(plain)

    def fitted(self, plain_s: float) -> Explanation:
        """Explain a program without steps that took ``plain_s`` seconds without profiling and imports."""
        assert self._explain is not None
        with _no_collections():
            return self._explain(plain_s=plain_s + self._steady.imports_s)

    def _steps_floor(self) -> float:
        """Sum the floors of the engine steps that ended inside."""
        if self._decisions is None:
            return 0.0
        from ..engine.log import build
        from ..engine.work import StepWork

        log = build(self._decisions.records(), complete=not self._decisions.lost)
        dtype = str(log.header.device.get("dtype", "float32"))
        work = StepWork.of(log.header, Rates.of(self.ceilings, dtype))
        begin, end = self._steady.recording.span
        return sum(work.floor(step.rows).seconds for step in log.steps if begin <= (step.at or 0.0) <= end)


def explain_trace(
    trace: Trace,
    ceilings: Ceilings,
    samples: StackSamples | None = None,
    *,
    profiler_s: float = 0.0,
    facts: dict[str, Any] | None = None,
    steps_s: float = 0.0,
    floor_s: float = 0.0,
    steps: Steps | None = None,
    plain_s: float = 0.0,
    plain_samples: StackSamples | None = None,
) -> Explanation:
    """Split a trace by cause and find changes.

    Args:
        samples: of the main thread, on the trace's clock.
        steps_s: the least time of what has no shapes in the trace, where an engine's decision log says it.
        floor_s: the least time of everything, where the caller knows it.
        steps: those that the trace has, with their time without profiling.
        plain_s: seconds of the same work without profiling; 0 if unknown.
        plain_samples: of the main thread in other steps, without profiling.
    """
    for index in marks(trace)[:1]:
        trace.drop_before(float(trace.ts[index]))
    facts = dict(facts or {})
    facts.setdefault("backward", ran_backward(trace))
    padded = float(facts.get("padding", 0.0))
    whole = trace_seconds(trace)
    delayed = 0.0 if trace.on_gpu else whole * float(facts.get("delayed", 0.0))
    share = min(1.0, plain_s / whole) if plain_s else steps.plain_share if steps is not None and steps.plain_s else None
    wall = whole - delayed
    plain = None if share is None else wall * share
    split = split_trace(trace, ceilings, profiler_s=profiler_s, padding=padded, plain=plain, delayed=delayed)
    named = name_gaps(split, samples, steady=steps is not None)
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
    if plain_samples is not None and split.on_gpu:
        split.waiting = waiting_share(split, samples, plain_samples)
    if plain is not None:
        # The host may run ahead in each step that was timed: the GPU's work is needed in any case.
        named = fit(split, named, max(plain, min(wall, split.busy)) if split.on_gpu else plain)
    found = find(Material(split, ceilings, named, samples, facts, plain_samples))
    return Explanation(split, found, named, facts, ceilings, steps=steps)


def waiting_share(split: Split, samples: StackSamples | None, plain: StackSamples) -> float:
    """Return the share of the time without profiling in which the main thread waited for a GPU, by samples.

    Profiling makes all of the host's own work longer, and waits shorter. A function waits that is seen far more often
    without profiling than among those profiled samples that are in no wait.
    """

    def name(sample: Sample) -> str:
        return f"{sample.stack[0].file}:{sample.stack[0].function}"

    trace, calls = split.trace, split.calls(WAITS)
    profiled = samples.samples if samples is not None else []
    waiting = trace.during(calls, np.array([each.at for each in profiled]))
    works = [each for each, waits in zip(profiled, waiting.tolist(), strict=True) if not waits]
    usual = Counter(map(name, works))
    shares = weighed(plain.samples, name)
    waits = {f"{each.stack[0].file}:{each.stack[0].function}" for each in plain.samples if waits_for_gpu(each.stack)}
    share = 0.0
    for each, seen in shares.items():
        expected = 0.0 if each in waits or not works else usual[each] / len(works)
        if each in waits or (len(works) >= 2 * MANY and seen >= SEEN):
            share += max(0.0, seen - LONGER * expected)
    return share


def ran_backward(trace: Trace) -> bool:
    """Return True if a backward pass ran."""
    return any("Backward" in key.name or "autograd::" in key.name for key in trace.keys)


def explain_script(script: Script, run: Explain, *, again_s: float = 0.0) -> Explanation:
    """Run a script as ``python`` would, and explain all of it, or the part up to Ctrl-C.

    Args:
        again_s: seconds; a program without steps that took no longer runs once more without profiling, to
            time it.

    Raises:
        ValueError: there is no such script.
        ScriptFailed: it ended with an error; ``found`` explains what ran until then.
    """
    script.check()
    with run:
        ending = script.run()
    again = run.repeatable(again_s) and not ending.interrupted and not ending.failed
    found = run.again(script) if again else run.result
    assert found is not None
    found = replace(found, interrupted=ending.interrupted)
    if ending.interrupted:
        found.split.notes.append("the script was interrupted: this is what ran until then")
    if ending.failed:
        found.split.notes.append("the script ended with an error: this is what ran until then")
        raise ScriptFailed(ending.failed, found)
    return found


@contextlib.contextmanager
def _no_collections() -> Iterator[None]:
    """Collect no garbage inside the block: of a million events it makes millions of objects that all stay."""
    collected = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collected:
            gc.enable()


def machine_ceilings() -> Ceilings:
    """Return the ceilings of this machine's first device, measured if unknown; nothing is compiled for that."""
    return device_measurement(detect(), build=False).ceilings


def fit(split: Split, named: list[Named], plain: float) -> list[Named]:
    """Change the parts so that all but "profiler" add up to ``plain``, the seconds of the same work without profiling.

    On a host the split has already taken a constant from each operator, and what is left is due to the machine's
    speed. On a GPU profiling makes some parts longer (``SLOWED``), but no sleep and no wait for another thread.

    Returns:
        ``named`` with times that fit.
    """
    parts = split.parts
    excess = split.own - plain
    split.measured = True
    before = dict(parts)
    still = sum(each.seconds for each in named if each.doing.kind in IDLE)
    own = {part: parts[part] - (still if part == "host" else 0.0) for part in SLOWED}
    slowed = {part: most * own[part] for part, most in SLOWED.items() if own[part] > 0 and split.on_gpu}
    if excess > 0 or not slowed:
        taken = max(0.0, min(1.0, excess / (sum(slowed.values()) or 1.0)))
        for part, seconds in slowed.items():
            parts[part] -= taken * seconds
        rest = sum(seconds for part, seconds in parts.items() if part != "profiler")
        for part in parts:  # the machine was slower or faster meanwhile
            parts[part] *= 1.0 if part == "profiler" or not rest else plain / rest
    else:
        whole = sum(parts[part] for part in slowed)
        for part in slowed:
            parts[part] += -excess * parts[part] / whole
    shrink = plain / split.own if split.own > 0 else 1.0
    parts["profiler"] = split.wall - plain
    if split.on_gpu:
        split.profiling = max(split.profiling, parts["profiler"])
    for op in (*split.ops, *split.loading):
        op.seconds *= min(1.0, shrink)
        op.usual *= min(1.0, shrink)
    ratio = {part: parts[part] / seconds for part, seconds in before.items() if seconds > 0}
    return [replace(each, seconds=each.seconds * ratio.get(each.doing.part, 1.0)) for each in named]
