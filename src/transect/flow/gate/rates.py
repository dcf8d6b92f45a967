"""Bars of rates: a least rate, no loss against the current model, and a gain over it."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import fmean

from ...bench.intervals import paired_difference, rate_bounds
from .measure import GateVerdict, Samples


@dataclass(frozen=True, slots=True, kw_only=True)
class RateBars:
    """Bars of a rate of right answers.

    Attributes:
        least: the rate must be at least this; the lower end of its interval counts.
        worse: largest loss against the current model, as a difference of rates; the lower end of its interval counts.
        gain: None, or the least gain over the current model; the lower end of its interval must exceed it.
    """

    least: float = 0.0
    worse: float = 0.05
    gain: float | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.least <= 1:
            raise ValueError(f"least is a rate from 0 to 1, not {self.least}")
        if not 0 <= self.worse <= 1:
            raise ValueError(f"worse is a difference of rates from 0 to 1, not {self.worse}")
        if self.gain is not None and not 0 <= self.gain < 1:
            raise ValueError(f"gain is a difference of rates, at least 0 and less than 1, not {self.gain}")


def judge_rate(samples: Samples, bars: RateBars, confidence: float, noun: str) -> GateVerdict:
    """Judge right answers (0 or 1) of both models on the same questions."""
    one, other = samples["candidate"], samples["current"]
    count = len(one)
    low, high = paired_difference(one, other, confidence)
    least, _ = rate_bounds(sum(one), count, confidence)
    rate, current = fmean(one), fmean(other)
    failed = []
    if least < bars.least:
        failed.append(f"at least {bars.least:.0%} is asked for, and the interval begins at {least:.0%}")
    if low < -bars.worse:
        failed.append(f"a loss of {-low:.0%} cannot be excluded, and {bars.worse:.0%} is allowed")
    if bars.gain is not None and low <= bars.gain:
        failed.append(f"a gain of more than {bars.gain:.0%} is asked for, and it may be {low:+.0%}")
    text = f"{rate:.0%} {noun} of {count}, current {current:.0%}, difference {low:+.0%} to {high:+.0%}"
    return GateVerdict(not failed, "; ".join([text, *failed]), rate, current, (low, high))


def describe_rate(bars: RateBars) -> str:
    """Return the bars in a few words."""
    parts = [f"at least {bars.least:.0%}"] if bars.least else []
    parts.append(f"at most {bars.worse:.0%} worse" if bars.gain is None else f"a gain of more than {bars.gain:.0%}")
    return ", ".join(parts)
