"""Times a script, or some of its steps, without profiling, with the same random numbers each time."""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import nn

from .changes import NotPossible, calls_by
from .script import Script
from .steps import KINDS, REPEATS, Mark, StepWatch, UnprofiledSteps

SEED = 0
STEPS_S = 1.0
"""Seconds of steps that are timed after warm-up."""
LONGEST_S = 40.0
"""Longest run of a script whose time is to be compared, in seconds; compiling can take minutes."""


class _Enough(BaseException):
    """Ends a script of which enough steps were timed."""


def timed(script: Script, kind: str = "") -> float:
    """Run a script, wait for its GPU work, and return the seconds; the script's output is dropped.

    Args:
        kind: kind of its steps: return the median seconds of some steps after warm-up, and end the script after them.

    Raises:
        NotPossible: it failed, or took too long.
    """
    steps = UnprofiledSteps(STEPS_S)
    with (
        _same_chance(),
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
        contextlib.suppress(_Enough),
        _counted(kind, steps) if kind else contextlib.nullcontext(),
    ):
        began = time.perf_counter()
        taken = 0.0
        ending = replace(script, seconds=script.seconds or LONGEST_S).run(show=False)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken = time.perf_counter() - began
    if len(steps.seconds) > 1:
        return steps.median
    if ending.interrupted and taken >= 0.9 * LONGEST_S:
        raise NotPossible(f"it was not done after {LONGEST_S:.0f} s")
    if ending.interrupted:
        raise KeyboardInterrupt
    if ending.failed:
        raise ending.error if isinstance(ending.error, NotPossible) else NotPossible(ending.failed)
    return taken


@contextmanager
def _counted(kind: str, steps: UnprofiledSteps) -> Iterator[None]:
    """Time the steps of a script inside the block, and end it when there are enough."""
    counts: Counter[Mark] = Counter()

    def seen(mark: Mark) -> None:
        if mark[0] != kind:
            return
        counts[mark] += 1
        if counts[mark] == REPEATS:
            steps.restart()
        if mark == max(counts, key=lambda each: counts[each]) and counts[mark] > REPEATS and steps.mark():
            raise _Enough

    def way(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = module(*args, **kwargs)
        seen((kind, type(module).__qualname__))
        return result

    if kind == KINDS[3]:
        with calls_by(way):
            yield
        return
    watch = StepWatch(seen)
    watch.start()
    if kind != KINDS[1]:  # whose first forward call shows the library
        watch.ignore_forward()
    try:
        yield
    finally:
        watch.stop()


@contextmanager
def _same_chance() -> Iterator[None]:
    """Make a script that sets no seed draw the same numbers in every run, because runs are compared."""
    plain, arrays = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(range(torch.cuda.device_count())):
        torch.manual_seed(SEED)
        random.seed(SEED)
        np.random.seed(SEED)
        try:
            yield
        finally:
            random.setstate(plain)
            np.random.set_state(arrays)
