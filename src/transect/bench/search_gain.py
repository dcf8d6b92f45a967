"""Report what a search gains over one greedy answer and over guessing, with 95% intervals.

Shares have Wilson's interval (1927), and the difference of two methods on the same tasks that of Agresti and Min (2005)
for matched pairs. A gain is claimed only if its interval excludes 0.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .intervals import normal_quantile, rate_bounds

Z = normal_quantile(0.95)


@dataclass(frozen=True, slots=True)
class Accuracy:
    """A share of right answers.

    Attributes:
        right, count: right answers, and all.
    """

    right: int
    count: int

    @property
    def value(self) -> float:
        """The share, 0 to 1."""
        return self.right / self.count

    @property
    def interval(self) -> tuple[float, float]:
        """Wilson's 95% interval."""
        return rate_bounds(self.right, self.count, 0.95)

    def __str__(self) -> str:
        low, high = self.interval
        return f"{self.value:.1%} ({low:.1%} to {high:.1%})"


@dataclass(frozen=True, slots=True)
class Gain:
    """Comparison of a search with single answers to the same tasks.

    Attributes:
        searched, single: right or wrong for each task.
        guess: accuracy of guessing.
    """

    searched: Sequence[bool]
    single: Sequence[bool]
    guess: float

    @property
    def interval(self) -> tuple[float, float]:
        """95% interval of the difference of accuracies."""
        n = len(self.single) + 2
        better = sum(a and not b for a, b in zip(self.searched, self.single, strict=True)) + 0.5
        worse = sum(b and not a for a, b in zip(self.searched, self.single, strict=True)) + 0.5
        middle = (better - worse) / n
        half = Z * math.sqrt(better + worse - (better - worse) ** 2 / n) / n
        return middle - half, middle + half

    @property
    def verdict(self) -> str:
        """ "gain", "loss" or "no gain"; a search that is no better than guessing has no gain either."""
        low, high = self.interval
        if high < 0:
            return "loss"
        guessing = Accuracy(sum(self.searched), len(self.searched)).interval[0] <= self.guess
        return "gain" if low > 0 and not guessing else "no gain"

    def to_dict(self) -> dict[str, Any]:
        """Return all figures for JSON."""
        shares = {"searched": self.searched, "single": self.single}
        found: dict[str, Any] = {"guess": self.guess, "verdict": self.verdict, "difference": list(self.interval)}
        for name, values in shares.items():
            share = Accuracy(sum(values), len(values))
            found[name] = {"accuracy": share.value, "interval": list(share.interval), "tasks": share.count}
        return found

    def __str__(self) -> str:
        low, high = self.interval
        difference = (
            Accuracy(sum(self.searched), len(self.searched)).value - Accuracy(sum(self.single), len(self.single)).value
        )
        return (
            f"{self.verdict}: search {Accuracy(sum(self.searched), len(self.searched))}, one greedy answer "
            f"{Accuracy(sum(self.single), len(self.single))}, guessing {self.guess:.1%}; difference "
            f"{100 * difference:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f})"
        )
