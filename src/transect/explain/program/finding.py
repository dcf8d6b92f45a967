"""A finding, and the material that detectors use. ``findings.py`` has the detectors."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ...costs.ceilings import Ceilings
from .gaps import Named
from .sampler import Sample, StackSamples
from .split import Split

MANY = 16
"""Calls of the same work that count as a loop."""
ENOUGH = 60
"""Samples that suffice for shares of the time."""
SURE, DEVIATIONS = 0.05, 1.64
"""Share of the time above which a gain must be certain, and standard deviations of a share of samples (95% of them lie
above the mean less these)."""


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing to change.

    Attributes:
        kind: a short name, the same for the same cause.
        title: name of the cause.
        evidence: facts in the trace.
        gain: seconds that the change is predicted to save.
        advice: change to make.
        apply: changes that ``--apply`` can try, by the names in ``changes.py``, separated by ", "; empty for none.
        gains: seconds that one of these is predicted to save, where that is not ``gain``.
    """

    kind: str
    title: str
    evidence: str
    gain: float
    advice: str
    apply: str = ""
    share: float = 0.0
    """The gain as a part of the program's own time."""
    where: str = ""
    gains: Mapping[str, float] = field(default_factory=dict)
    least: float = math.inf
    """Seconds of the gain that are certain, if these are fewer. A gain above ``SURE`` of the time of which less is
    certain counts as these seconds."""


@dataclass(frozen=True, slots=True)
class Material:
    """All known facts of a run."""

    split: Split
    ceilings: Ceilings
    named: list[Named] = field(default_factory=list)
    samples: StackSamples | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the run: ``threads`` of torch, ``cores``, ``backward`` (True if one ran), ``padding`` (share of tokens),
    ``autograd_s`` (seconds that recording adds to an operator), ``forgetting_s`` (those of them in which its record is
    destroyed), ``prefix`` (mean length of sequences that grow by one element a call), ``unused`` (share of gradients
    that no optimizer uses, and True if their parameters come before all others), ``memory`` (largest used share of the
    device's memory), ``steps`` (number of explained steps; 0 if none were found), ``delayed`` (share of the profiled
    time in which the main thread waited for a core)."""
    plain_samples: StackSamples | None = None
    """Samples of steps without profiling."""

    @property
    def trains(self) -> bool:
        """True if a backward pass ran."""
        return bool(self.facts.get("backward", True))

    @property
    def steps(self) -> int:
        """Number of explained steps; 1 if none were found."""
        return int(self.facts.get("steps") or 1)

    @property
    def stacks(self) -> list[Sample]:
        """Samples that show how a step's time is spent: without profiling if there are enough, else with it."""
        plain = self.plain_samples.samples if self.plain_samples is not None else []
        if len(plain) >= ENOUGH or self.samples is None:
            return plain
        return self.samples.samples

    def shares(self, name: Callable[[Sample], str]) -> dict[str, float]:
        """Return the share of the time without profiling by ``name`` of its samples; empty if they are too few."""
        plain = self.plain_samples.samples if self.plain_samples is not None else []
        return weighed(plain, name) if len(plain) >= ENOUGH else {}

    def certain(self, gain: float) -> float:
        """Return the part of a gain that its samples prove, in seconds; the whole gain if there are no samples."""
        count, share = len(self.stacks), min(1.0, gain / (self.split.own or 1.0))
        deviation = math.sqrt(share * (1.0 - share) / count) if count else 0.0
        return gain - DEVIATIONS * deviation * self.split.own


def weighed(samples: Sequence[Sample], name: Callable[[Sample], str]) -> dict[str, float]:
    """Return the share of the time of each ``name`` among its samples. A sample counts for the time since the sample
    before it.

    A sampler waits while a function of C holds the interpreter's lock, and finds it or the next line afterwards. A
    single long wait does not belong to each step, and counts as the second longest.
    """
    times: dict[str, float] = {}
    waits = sorted(sample.at - before.at for before, sample in itertools.pairwise(samples))
    most = 2 * waits[-2] if len(waits) > MANY else math.inf
    for before, sample in itertools.pairwise(samples):
        each = name(sample)
        times[each] = times.get(each, 0.0) + min(most, sample.at - before.at)
    whole = sum(times.values())
    return {each: seconds / whole for each, seconds in times.items()} if whole else {}
