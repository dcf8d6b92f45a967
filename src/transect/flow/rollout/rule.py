"""The rule of a canary: bars for the candidate beside the current version, looked at a planned number of times.

Each bar is the largest allowed increase of a rate, such as that of refusals. At every look the interval of the
difference is compared with the bar:

* the whole interval is above it: the candidate is worse; roll back now.
* at the last look, the whole interval is below every bar: promote. Otherwise too little is known: roll back.

Looks and bars share the level (Bonferroni), so that looking often finds no false alarm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...bench.intervals import rate_difference
from .remote import FAST, Counts

PROMOTE, ROLL_BACK, WAIT = "promote", "roll back", "wait"
RATES = {
    "errors": ("errors", "requests"),
    "refusals": ("refusals", "answers"),
    "malformed": ("malformed", "formed"),
    "disliked": ("disliked", "judged"),
    "slow": ("slow", "timed"),
}
"""Numerator and denominator of each rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryBars:
    """Largest allowed increases of rates of the candidate over the current version; None does not compare.

    Attributes:
        errors: share of requests that fail in the server.
        refusals: share of answers that refuse.
        malformed: share of answers without the form that was requested (JSON schema, tools).
        disliked: share of judged answers that were disliked; a score between counts in part.
        slow: share of answers whose first token takes longer than ``slow_s``.
        slow_s: seconds to the first token from which an answer is slow; the next boundary of the server's histogram.
    """

    errors: float | None = 0.05
    refusals: float | None = 0.1
    malformed: float | None = None
    disliked: float | None = None
    slow: float | None = None
    slow_s: float = 1.0

    def __post_init__(self) -> None:
        for name in RATES:
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ValueError(f"watch.{name} is a difference of rates from 0 to 1, not {value}")
        if not self.slow_s > 0:
            raise ValueError(f"watch.slow_s must be more than 0 seconds, not {self.slow_s}")

    def used(self) -> dict[str, float]:
        """Return the bars that are set, by name."""
        return {name: bar for name in RATES if (bar := getattr(self, name)) is not None}


@dataclass(frozen=True, slots=True)
class CanaryLook:
    """Result of a look.

    Attributes:
        action: ``promote``, ``roll back`` or ``wait``.
        rates: of each bar: counts, rates and interval.
        drift: p-values by alarm, where the candidate's captures were tested.
    """

    action: str
    reason: str
    rates: Mapping[str, Any]
    drift: Mapping[str, float] = field(default_factory=dict)


def look(candidate: Counts, current: Counts, bars: CanaryBars, confidence: float, *, last: bool) -> CanaryLook:
    """Compare the counts of two versions.

    Args:
        confidence: level of this look; its bars share it.
        last: no further look follows.
    """
    used = bars.used()
    level = 1 - (1 - confidence) / max(len(used), 1)
    rates: dict[str, Any] = {}
    worse: list[str] = []
    unknown: list[str] = []
    within: list[str] = []
    for name, bar in used.items():
        hits, count = _rate(candidate, name, bars)
        other_hits, other_count = _rate(current, name, bars)
        low, high = rate_difference(hits, count, other_hits, other_count, level)
        rates[name] = {
            "candidate": [hits, count],
            "current": [other_hits, other_count],
            "difference": [low, high],
            "bar": bar,
        }
        text = (
            f"{name} {_share(hits, count)}, current {_share(other_hits, other_count)}, "
            f"difference {low:+.0%} to {high:+.0%}, {bar:.0%} allowed"
        )
        (worse if low > bar else within if high <= bar else unknown).append(text)
    if worse:
        return CanaryLook(ROLL_BACK, f"worse than the current version: {'; '.join(worse)}", rates)
    if not last:
        return CanaryLook(WAIT, "; ".join([*unknown, *within]), rates)
    if unknown:
        return CanaryLook(ROLL_BACK, f"not shown to be as good as the current version: {'; '.join(unknown)}", rates)
    return CanaryLook(PROMOTE, "; ".join(within) or "no bar is set", rates)


def _rate(counts: Counts, name: str, bars: CanaryBars) -> tuple[float, float]:
    """Return hits and count of a rate."""
    hits, count = RATES[name]
    total = counts.get(count, 0.0)
    if name == "disliked":
        return max(0.0, total - counts.get("liked", 0.0)), total
    if name == "slow":
        edges = sorted(float(key.removeprefix(FAST)) for key in counts if key.startswith(FAST))
        edge = next((each for each in edges if each >= bars.slow_s), None)
        return (0.0 if edge is None else total - counts[f"{FAST}{edge:g}"]), total
    return min(counts.get(hits, 0.0), total), total


def _share(hits: float, count: float) -> str:
    return f"{hits / count:.0%} of {count:.0f}" if count else "unknown (none)"
