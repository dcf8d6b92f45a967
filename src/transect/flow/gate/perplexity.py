"""Perplexity of the trained tokens of rows that were not trained on."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...bench.intervals import ratio_bounds
from .measure import GateMeasure, GateVerdict, Samples, TestedModel

TEST = "test"
"""Name of the flow's own test split."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PerplexityBars:
    """The perplexity of the gate.

    Attributes:
        file: file of rows; empty for the test split of the flow's data.
        worse: largest increase of the perplexity, as a share of the current model's; the upper end of the interval
            counts.
        gain: None, or the least decrease, as a share; the interval must exceed it.
    """

    file: str = ""
    worse: float = 0.02
    gain: float | None = None

    def __post_init__(self) -> None:
        if not self.worse >= 0:
            raise ValueError(f"worse is a share, 0 or greater, not {self.worse}")
        if self.gain is not None and not 0 <= self.gain < 1:
            raise ValueError(f"gain is a share, at least 0 and less than 1, not {self.gain}")


def _take(
    candidate: TestedModel, current: TestedModel, settings: PerplexityBars, path: Callable[[str], Path]
) -> Samples:
    rows = path(settings.file or TEST)
    return {"candidate": list(candidate.score(rows)), "current": list(current.score(rows))}


def _judge(samples: Samples, settings: PerplexityBars, confidence: float) -> GateVerdict:
    tokens = [count for _, count in samples["candidate"]]
    total = sum(tokens)
    one, other = (math.exp(math.fsum(nats for nats, _ in samples[name]) / total) for name in ("candidate", "current"))
    changes = [mine - now for (mine, _), (now, _) in zip(samples["candidate"], samples["current"], strict=True)]
    low, high = (math.expm1(bound) for bound in ratio_bounds(changes, tokens, confidence))
    failed = []
    if high > settings.worse:
        failed.append(f"an increase of {high:.1%} cannot be excluded, and {settings.worse:.1%} is allowed")
    if settings.gain is not None and high >= -settings.gain:
        failed.append(f"a decrease of more than {settings.gain:.1%} is asked for, and it may be {-high:.1%}")
    text = f"{one:.3f} over {len(tokens)} rows, current {other:.3f}, change {low:+.1%} to {high:+.1%}"
    return GateVerdict(not failed, "; ".join([text, *failed]), one, other, (low, high))


PERPLEXITY = GateMeasure(
    name="perplexity",
    settings=PerplexityBars,
    take=_take,
    judge=_judge,
    describe=lambda bars: f"at most {bars.worse:.0%} worse" if bars.gain is None else f"{bars.gain:.0%} better",
    files=lambda bars: (bars.file,) if bars.file else (),
)
