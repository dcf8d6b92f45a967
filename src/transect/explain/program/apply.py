"""Makes the changes that findings recommend, if that is possible from outside of a script (``changes.py``), and
measures again.

Each change is measured alone, without the profiler, against the script as it is. What a change needs once (compiling,
capturing, pinning) is measured beside, because a script that runs longer needs it no more often. A script that fails
with a change, or for which it cannot be right, is left as it is, and the result says why.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .changes import CHANGES, MOST_MODULES, Batched, NotPossible, Running
from .finding import Finding
from .report import Explanation
from .script import Script
from .switches import SWITCHES
from .timing import timed

RUNS = 3
LONG_S = 3.0
"""Seconds above which a script is measured only once with each change."""
Change = Callable[[], contextlib.AbstractContextManager[Running]]


@dataclass(frozen=True, slots=True)
class Applied:
    """One change: seconds predicted and obtained, of ``before``; ``failed`` if the script did not run."""

    finding: Finding
    name: str
    before: float
    after: float
    setup: float = 0.0
    """Seconds of ``after`` that are spent once, however long the script runs."""
    failed: str = ""

    @property
    def predicted(self) -> float:
        """Seconds that this change was predicted to save: the finding's share of the whole time, of which steps may
        have been explained. At most the time without the profiler, which slows programs of many small operators."""
        found = self.finding
        gain = found.gains.get(self.name, found.gain)
        if found.share and found.gain:
            gain *= self.before * found.share / found.gain
        return min(gain, self.before)

    @property
    def obtained(self) -> float:
        """Seconds saved, without those spent once."""
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
    """Return all of ``applied``."""
    return list(applied(script, explanation))


def applied(
    script: Script, explanation: Explanation, say: Callable[[str], object] = lambda line: None
) -> Iterator[Applied]:
    """Run the script as it is and with each change that its findings name, in turns, discarding its output. A change of
    several findings is made once, for the one with the largest prediction. Each result is yielded when measured: a
    change that compiles may take a minute."""
    done = set()
    for finding in explanation.findings:
        for name in filter(None, finding.apply.split(", ")):
            if name not in done:
                done.add(name)
                say(f"measuring with {name}")
                yield _measured(script, finding, name)


def _measured(script: Script, finding: Finding, name: str) -> Applied:
    before = after = float("inf")
    setup = 0.0
    try:
        change = _batching(script) if name == "batching" else (CHANGES | SWITCHES)[name]
        for _ in range(RUNS):
            before = min(before, timed(script))
            with change() as running:
                taken = timed(script)
            if taken - running.setup_s < after - setup:
                after, setup = taken, running.setup_s
            if before > LONG_S:
                break
    except NotPossible as error:
        return Applied(finding, name, before, after, failed=str(error))
    except Exception as error:
        return Applied(finding, name, before, after, failed=f"{type(error).__name__}: {error}")
    return Applied(finding, name, before, after, setup)


def _batching(script: Script) -> Change:
    """Check the inputs of the script's modules, that batches give equal results, and the order in which they could be
    computed: no module's input may depend on its own earlier results, even indirectly."""
    batched = Batched()
    with batched.record():
        timed(script)
    if not any(len(calls) > 1 for calls in batched.calls.values()):
        raise NotPossible("no module is called twice")
    if len(batched.calls) > MOST_MODULES:
        raise NotPossible(f"it calls more than {MOST_MODULES} modules")
    depends: dict[int, set[int]] = {}
    for module in batched.calls:
        with batched.check(module, depends.setdefault(module, set())):
            timed(script)
    while depends:
        free = [module for module, users in depends.items() if not users & set(depends)]
        if not free:
            raise NotPossible("what a module is called with depends on earlier results of its own, or on chance")
        for module in free:
            del depends[module]
    return batched.apply
