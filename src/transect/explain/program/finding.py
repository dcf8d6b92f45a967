"""A finding, and the material that detectors use. ``findings.py`` has the detectors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...costs.ceilings import Ceilings
from .gaps import Named
from .sampler import StackSamples
from .split import Split

MANY = 16
"""Calls of the same work that count as a loop."""


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


@dataclass(frozen=True, slots=True)
class Material:
    """All known facts of a run."""

    split: Split
    ceilings: Ceilings
    named: list[Named] = field(default_factory=list)
    samples: StackSamples | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    """Facts of the run: ``threads`` of torch, ``cores``, ``backward`` (True if one ran), ``padding`` (share of tokens),
    ``autograd_s`` (seconds that recording adds to an operator)."""
