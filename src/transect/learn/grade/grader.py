"""Grades one program: right in every case, then fast.

Inputs differ in every check, and go to the child; exact answers are computed here, in float64, and stay here.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ...costs.ceilings import Ceilings
from ...costs.presets import preset
from ..record import Case, Rung
from ..texts import HOLE
from .compare import call_text, difference
from .verdict import Verdict, time_text
from .workshop import ProgramFailed, ProgramRun, Submission, Workshop, workshop

PLANNED = "h100-80gb"
BELOW = 0.5
"""A time below this share of the floor cannot be of this work: the ceilings are not that far off."""
ROUNDS = 200
"""Times that the measured calls are made on a GPU, and before the clock starts, so that its own clock has risen."""
SHORTEST_S = 1e-3
"""Seconds of calls below which the time of a Python program is not shown."""
TURNS = 5
"""Times that the program and the shipped one are measured in turn on a CPU: the least counts, which a busy machine
changes little."""
LONG_S = 0.1
"""Seconds of a call that is measured once."""
AGAIN = 3
"""Times that a measurement below the floor is repeated before the program is blamed for it."""


def grade(
    rung: Rung,
    path: Path,
    *,
    shop: Workshop | None = None,
    ceilings: Callable[[], Ceilings] | None = None,
    seed: int | None = None,
    compiler: Workshop | None = None,
    measure: bool = True,
) -> Verdict:
    """Grade the program at ``path``.

    Args:
        shop: the workshop where programs run; a new one if None.
        ceilings: of this machine, for the floor; without them there is no floor.
        seed: of the inputs; without one they differ in every call.
        compiler: a workshop that compiles kernels ahead of time; without one they are not compiled.
        measure: False stops after the cases.
    """
    rng = np.random.default_rng(int.from_bytes(os.urandom(8), "little") if seed is None else seed)
    verdict = Verdict(rung.name, False)
    with workshop(shop) as here:
        verdict.device = here.device
        try:
            with here.open(rung, path) as program:
                try:
                    _cases(rung, program, rng, verdict)
                    if verdict.right and rung.speed is not None:
                        _speed(rung, program, here, rng, verdict, ceilings, measure)
                finally:
                    verdict.cheats = verdict.cheats or program.alarms
        except ProgramFailed as error:
            verdict.right = False
            verdict.reason = verdict.reason or _failure(str(error), path)
        if verdict.cheats:
            verdict.right, verdict.reason = False, verdict.cheats[0]
        if verdict.right and compiler is not None and here.device == "cpu":
            verdict.kernels = _compiled(rung, compiler, path)
    return verdict


def _failure(text: str, path: Path) -> str:
    if HOLE in path.read_text(errors="replace") or "is not written yet" in text:
        return f"the hole is still open: {text}"
    return text


def _cases(rung: Rung, program: Submission, rng: Any, verdict: Verdict) -> None:
    for case in rung.cases:
        arguments = list(case.make(rng))
        entry = case.entry or rung.entry
        try:
            run = program.run([(entry, arguments)], inputs=True)
        except ProgramFailed as error:
            if "is not written yet" in str(error) or program.alarms:
                raise
            verdict.reason, verdict.detail, verdict.stopped = case.teaches, f"{case.name}: {error}", True
            verdict.call = call_text(entry, arguments)
            return
        if run.alarms:
            return
        problem = _problem(rung, case, entry, arguments, run.outputs[0])
        problem = problem or _changed(rung, entry, arguments, run.inputs[0])
        if problem:
            verdict.reason = _slip(rung, entry, arguments, run.outputs[0], case) or case.teaches
            verdict.detail, verdict.call = f"{case.name}: {problem}", call_text(entry, arguments)
            return
        verdict.passed.append(case.name)
    verdict.right = True


def _problem(rung: Rung, case: Case | None, entry: str, arguments: Sequence[Any], got: Any) -> str:
    if entry in rung.judges:
        return rung.judges[entry](arguments, got)
    tolerance = rung.tolerance if case is None or case.tolerance is None else case.tolerance
    exact = list(map(exactly, arguments))
    scale = float(rung.scales[entry](*exact)) if entry in rung.scales else None
    return difference(got, rung.answers[entry](*exact), tolerance, scale=scale)


def _slip(rung: Rung, entry: str, arguments: Sequence[Any], got: Any, case: Case) -> str:
    """Find the sentence for the well-known mistake that gives this very answer."""
    tolerance = max(10 * (case.tolerance or rung.tolerance), 1e-4)
    for slip in rung.slips:
        if (slip.entry or rung.entry) == entry:
            with contextlib.suppress(ArithmeticError, LookupError, RuntimeError, ValueError):
                if not difference(got, slip.answer(*map(exactly, arguments)), tolerance):
                    return slip.teaches
    return ""


def _changed(rung: Rung, entry: str, before: Sequence[Any], after: Sequence[Any]) -> str:
    for given, now in zip(before, after, strict=True):
        if isinstance(given, Tensor) and not difference(given, given, 0.0):
            here = now.reshape(given.shape) if now.numel() == given.numel() else now
            if difference(here, given, 0.0):
                return "the inputs have changed: leave them as they are"
    return ""


def exactly(value: Any) -> Any:
    """Return the same value with floating-point tensors in float64."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, dict):
        return {key: exactly(each) for key, each in value.items()}
    return [exactly(each) for each in value] if isinstance(value, list) else value


def _speed(
    rung: Rung,
    program: Submission,
    here: Workshop,
    rng: Any,
    verdict: Verdict,
    ceilings: Callable[[], Ceilings] | None,
    measure: bool,
) -> None:
    speed = rung.speed
    assert speed is not None
    entry = speed.entry or rung.entry
    on_gpu = rung.kind == "triton" and here.device != "cpu"
    rounds = ROUNDS if on_gpu else 1
    drawn = [list(speed.make(rng)) for _ in range(speed.calls)]
    calls = [(entry, arguments) for arguments in drawn]
    again = program.run(calls, reuse=True)
    if _wrong(rung, entry, drawn, again, verdict, "the inputs were written over with other numbers between two calls: "
              "the result is remembered instead of computed"):  # fmt: skip
        return
    count = "" if on_gpu else rung.counts
    counted = program.run(calls[:1], count=count) if count else again
    real = rung.kind != "triton" or on_gpu
    timed = program.run(calls if real else calls[:2])
    if timed.shared:
        verdict.right = False
        verdict.reason = "two calls gave results in the same memory: the second overwrites the first"
        return
    differs = "the timed calls gave other results than the cases"
    if _wrong(rung, entry, drawn, timed, verdict, differs):
        return
    if on_gpu:  # one large call: a small one measures its launch, and several take long to send
        drawn = [list((speed.large or speed.make)(rng))]
        calls = [(entry, drawn[0])]
        timed = program.run(calls, rounds=rounds, warm=True)
        if _wrong(rung, entry, drawn, timed, verdict, differs):
            return
    work = speed.cost(*drawn[0]) if speed.cost is not None else None
    if work is not None:
        sheet = preset(PLANNED).ceilings()
        seconds = work.floor(sheet.rate(speed.dtype), sheet.copy_bytes_per_second)
        verdict.planned_floor = f"would take at least {time_text(seconds)} on {sheet.device}, beside the launch"
    if work is not None and ceilings is not None:
        limits = ceilings()
        at_flops, at_bytes = work.flops / limits.rate(speed.dtype), work.bytes / limits.copy_bytes_per_second
        verdict.floor_seconds = max(at_flops, at_bytes)
        verdict.bound = "FLOPs" if at_flops > at_bytes else "bytes"
    if real and measure:
        verdict.seconds = timed.seconds / len(calls)
        for _ in range(AGAIN if verdict.floor_seconds is not None else 0):
            if verdict.seconds >= BELOW * (verdict.floor_seconds or 0.0):
                break  # a clock may err once on a busy machine
            verdict.seconds = program.run(calls, rounds=rounds, warm=on_gpu).seconds / len(calls)
        if verdict.floor_seconds is not None and verdict.seconds < BELOW * verdict.floor_seconds:
            verdict.right = False
            verdict.reason = (
                f"a call took {time_text(verdict.seconds)}, and this machine needs {time_text(verdict.floor_seconds)} "
                "at the least: the work was not done within the call"
            )
            return
    with source_file(rung) as shipped, here.open(rung, shipped) as reference:
        if speed.measure is not None:
            best = reference.run(calls[:1]).outputs[0]
            verdict.count, verdict.counted = speed.measure(drawn[0], timed.outputs[0]), speed.unit
            verdict.reference_count = speed.measure(drawn[0], best)
        elif count:
            verdict.count, verdict.counted = counted.count, _UNITS[count]
            verdict.reference_count = reference.run(calls[:1], count=count).count
        if real and measure:
            verdict.reference_seconds = reference.run(calls, rounds=rounds, warm=on_gpu).seconds / len(calls)
        for _ in range(TURNS):
            if not verdict.seconds or not verdict.reference_seconds or verdict.seconds > LONG_S or on_gpu:
                break
            verdict.seconds = min(verdict.seconds, program.run(calls).seconds / len(calls))
            verdict.reference_seconds = min(verdict.reference_seconds, reference.run(calls).seconds / len(calls))
    if rung.kind == "python" and min(verdict.seconds or 0.0, verdict.reference_seconds or 0.0) < SHORTEST_S:
        verdict.seconds = verdict.reference_seconds = None  # asking takes longer; the counted work says more
    if real and measure and speed.peer:
        device = here.device if on_gpu else "cpu"
        with source_file(rung, speed.peer) as peer, here.open(_free(rung), peer, device) as other:
            turns = 1 if on_gpu or (verdict.seconds or 0.0) > LONG_S else TURNS
            found = [other.run(calls, rounds=rounds, warm=on_gpu).seconds for _ in range(turns)]
            verdict.peer_seconds = min(found) / len(calls)
    if verdict.count and verdict.reference_count and verdict.count > speed.ratio * verdict.reference_count:
        verdict.slow, verdict.reason = True, speed.slow
    elif (not count or rung.kind == "cpp") and speed.measure is None and verdict.seconds and verdict.reference_seconds:
        verdict.slow = verdict.seconds > 2 * speed.ratio * verdict.reference_seconds
        verdict.reason = speed.slow if verdict.slow else ""


_UNITS = {
    "lines": "lines of Python",
    "bytes": "bytes through torch's operators",
    "traffic": "bytes of memory sectors",
    "lines of cache": "bytes of cache lines",
}


def _wrong(rung: Rung, entry: str, drawn: Sequence[Any], run: ProgramRun, verdict: Verdict, reason: str) -> bool:
    for arguments, got in zip(drawn, run.outputs, strict=False):
        if problem := _problem(rung, None, entry, arguments, got):
            verdict.right, verdict.reason, verdict.detail = False, reason, problem
            return True
    return bool(run.alarms)


def _free(rung: Rung) -> Rung:
    """Make the rung for torch's own operators: nothing is forbidden."""
    from dataclasses import replace

    return replace(rung, forbids=(), kind="torch" if rung.kind in ("triton", "cpp") else rung.kind, drives={})


@contextlib.contextmanager
def source_file(rung: Rung, text: str = "") -> Iterator[Path]:
    """Write a file with the shipped solution, or with ``text``, for the length of the block."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / (rung.file if not text else f"{rung.name}.py")
        path.write_text(text or rung.solution)
        yield path


def _compiled(rung: Rung, compiler: Workshop, path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for each in rung.compiled:
        try:
            with compiler.open(rung, path) as program:
                made = program.ask(
                    "compile",
                    name=each.name,
                    target="sm_90",
                    arguments=dict(each.arguments),
                    constants=dict(each.constants),
                    divisible=list(each.divisible),
                )
            found.append(made["compiled"])
        except ProgramFailed as error:
            found.append({"refused": f"{each.name}: {error}"})
    return found


def check(
    rung: Rung, path: Path, device: str, ceilings: Callable[[], Ceilings], *, compile_kernels: bool = True
) -> Verdict:
    """Grade a program on ``cpu`` or ``cuda`` in workshops of its own: one for the device, one that compiles.

    Ceilings are measured where a floor is needed.
    """
    with ExitStack() as stack:
        shop = stack.enter_context(Workshop(device if rung.kind == "triton" else "cpu"))
        compiler = None
        if compile_kernels and rung.compiled and device == "cpu":
            compiler = stack.enter_context(Workshop(interpret=False))
        return grade(rung, path, shop=shop, ceilings=ceilings, compiler=compiler)
