"""Does what findings say, where that can be done from outside of a script (``changes.py``), and measures again.

Each change is measured alone, without the profiler, against the script as it is. What a change needs once (compiling,
capturing, pinning) is measured beside, because a script that runs longer needs it no more often. A script that fails
with a change, or for which it cannot be right, is left as it is, and the result says why.
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from .changes import CHANGES, MOST_MODULES, Batched, NotPossible, Running
from .finding import Finding
from .report import Explanation
from .script import Script

RUNS = 3
SEED = 0
Change = Callable[[], contextlib.AbstractContextManager[Running]]


@dataclass(frozen=True, slots=True)
class Applied:
    """One change: seconds that were predicted and obtained, of ``before``; ``failed`` where the script did not run."""

    finding: Finding
    name: str
    before: float
    after: float
    setup: float = 0.0
    """Seconds of ``after`` that are needed once, however long the script runs."""
    failed: str = ""

    @property
    def predicted(self) -> float:
        """Seconds that this change was predicted to save: no more than there are without the profiler, which makes a
        program of many small operators longer."""
        return min(self.finding.gains.get(self.name, self.finding.gain), self.before)

    @property
    def obtained(self) -> float:
        """Seconds saved, without what is needed once."""
        return self.before - (self.after - self.setup)

    def __str__(self) -> str:
        if self.failed:
            return f"applied {self.name}: left out, the script cannot have it ({self.failed})"
        share = self.obtained / self.before
        once = f"; {1e3 * self.setup:.1f} ms more, once" if self.setup else ""
        return (
            f"applied {self.name}: predicted {1e3 * self.predicted:.1f} ms ({self.predicted / self.before:.0%}), "
            f"obtained {1e3 * self.obtained:.1f} ms ({share:.0%}) of {1e3 * self.before:.1f}{once}"
        )


def apply(script: Script, explanation: Explanation) -> list[Applied]:
    """All of ``applied``."""
    return list(applied(script, explanation))


def applied(script: Script, explanation: Explanation) -> Iterator[Applied]:
    """Run the script with each change that its findings name, and as it is, in turns; what it prints is left out. A
    change that several findings name is made once, for the one that promises most. Each is given when it is measured:
    one that compiles may take a minute."""
    done = set()
    for finding in explanation.findings:
        for name in filter(None, finding.apply.split(", ")):
            if name not in done:
                done.add(name)
                yield _measured(script, finding, name)


def _measured(script: Script, finding: Finding, name: str) -> Applied:
    before = after = float("inf")
    setup = 0.0
    try:
        change = _batching(script) if name == "batching" else CHANGES[name]
        for _ in range(RUNS):
            before = min(before, _seconds(script))
            with change() as running:
                taken = _seconds(script)
            if taken - running.setup_s < after - setup:
                after, setup = taken, running.setup_s
    except NotPossible as error:
        return Applied(finding, name, before, after, failed=str(error))
    except Exception as error:
        return Applied(finding, name, before, after, failed=f"{type(error).__name__}: {error}")
    return Applied(finding, name, before, after, setup)


def _batching(script: Script) -> Change:
    """See what the script's modules are called with, that batches give the same, and in which order they could be
    computed: no module may be called with what depends on its own earlier results, by way of others or not."""
    batched = Batched()
    with batched.record():
        _seconds(script)
    if not any(len(calls) > 1 for calls in batched.calls.values()):
        raise NotPossible("no module is called twice")
    if len(batched.calls) > MOST_MODULES:
        raise NotPossible(f"it calls more than {MOST_MODULES} modules")
    depends: dict[int, set[int]] = {}
    for module in batched.calls:
        with batched.check(module, depends.setdefault(module, set())):
            _seconds(script)
    while depends:
        free = [module for module, users in depends.items() if not users & set(depends)]
        if not free:
            raise NotPossible("what a module is called with depends on earlier results of its own, or on chance")
        for module in free:
            del depends[module]
    return batched.apply


def _seconds(script: Script) -> float:
    """Time a run in seconds, until the GPU has finished; its output is hidden."""
    with (
        _same_chance(),
        open(os.devnull, "w") as nowhere,
        contextlib.redirect_stdout(nowhere),
        contextlib.redirect_stderr(nowhere),
    ):
        began = time.perf_counter()
        ending = script.run(show=False)
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        taken = time.perf_counter() - began
    if ending.interrupted:
        raise KeyboardInterrupt
    if ending.failed:
        raise ending.error if isinstance(ending.error, NotPossible) else NotPossible(ending.failed)
    return taken


@contextlib.contextmanager
def _same_chance() -> Iterator[None]:
    """Inside, a script that sets no seed draws the same numbers every time: its runs are compared."""
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
