"""Makes the changes that findings recommend, if that is possible from outside of a script (``changes.py``), and
measures again.

Each change is measured alone, without the profiler, against the script as it is: some of its steps after warm-up, or
all of a script without steps. What a change needs once (compiling, capturing, pinning) is measured beside, because a
script that runs longer needs it no more often. A script that fails with a change, or for which it cannot be right, is
left as it is, and the result says why. Changes that help are measured together in the end.
"""

from __future__ import annotations

import contextlib
import time
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
"""Seconds of a run without and with a change, above which there is only one of each."""
WHOLE_S = 10.0
"""Longest program that runs as a whole for ``batching``, which needs several runs."""
MOST_S = 120.0
"""Seconds after which no further change is tried."""
HELPS = 0.03
"""Least share of the time that a change must save to be kept."""
CONFLICT = ({"batching", "compile", "CUDA graph"}, {"threads", "one thread"})
"""Changes of which only one is kept."""
Change = Callable[[], contextlib.AbstractContextManager[Running]]


@dataclass(frozen=True, slots=True)
class Applied:
    """One change: seconds predicted and obtained, of ``before``, which a step or the whole script takes; ``failed`` if
    the script did not run."""

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
    done, began = set(), time.perf_counter()
    for finding in explanation.findings:
        for name in filter(None, finding.apply.split(", ")):
            if name in done:
                continue
            done.add(name)
            if time.perf_counter() - began > MOST_S:
                yield Applied(finding, name, 0.0, 0.0, failed=f"other changes took {MOST_S:.0f} s")
                continue
            say(f"measuring with {name}")
            yield _measured(script, finding, name, explanation)


def kept(script: Script, explanation: Explanation, done: list[Applied]) -> str:
    """Measure all changes that helped together; return a line about them, empty if none did."""
    chosen: list[Applied] = []
    helped = [each for each in done if not each.failed and each.obtained > HELPS * each.before]
    for each in sorted(helped, key=lambda each: -each.obtained / each.before):
        alone = each.name == "batching" and chosen  # it runs the program in another way
        if not alone and not any({each.name, other.name} <= names for other in chosen for names in CONFLICT):
            chosen.append(each)
    if not chosen:
        return ""
    best = chosen[0]
    names, share, failed = best.name, best.obtained / best.before, ""
    if len(chosen) > 1 and best.name != "batching":
        kind = explanation.steps.kind if explanation.steps else ""
        try:
            with contextlib.ExitStack() as stack:
                running = [stack.enter_context((CHANGES | SWITCHES)[each.name]()) for each in chosen]
                taken = timed(script, kind)
            together = 1.0 - (taken - (0.0 if kind else sum(each.setup_s for each in running))) / best.before
            if together > share:
                names, share = ", ".join(each.name for each in chosen), together
        except Exception as error:
            failed = f"; the changes that help fail together: {error}"
    return f"kept: {names}, {share:.0%} less time{failed}"


def _measured(script: Script, finding: Finding, name: str, explanation: Explanation) -> Applied:
    before = after = float("inf")
    setup, kind = 0.0, explanation.steps.kind if explanation.steps else ""
    try:
        if name == "batching":
            if kind and explanation.steps and explanation.steps.total_s > WHOLE_S:
                raise NotPossible(f"it runs the whole program, which takes more than {WHOLE_S:.0f} s")
            change, kind = _batching(script), ""
        else:
            change = (CHANGES | SWITCHES)[name]
        for _ in range(RUNS):
            began = time.perf_counter()
            before = min(before, timed(script, kind))
            with change() as running:
                taken = timed(script, kind)
            taken += running.setup_s if kind else 0.0  # steps are timed after that
            if taken - running.setup_s < after - setup:
                after, setup = taken, running.setup_s
            if time.perf_counter() - began > LONG_S:
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
