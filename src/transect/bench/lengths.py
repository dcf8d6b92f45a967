"""Distributions of prompt and output lengths, in tokens."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Literal

FORMS = "a number, uniform:LOW-HIGH or lognormal:MEDIAN,SIGMA[,MOST]"


@dataclass(frozen=True, slots=True)
class Lengths:
    """``uniform``: low .. high, with both ends. ``lognormal``: ``exp(N(log median, sigma))``, rounded, 1 .. high."""

    kind: Literal["uniform", "lognormal"]
    low: int = 1
    high: int = 1
    median: float = 1.0
    sigma: float = 0.0

    @classmethod
    def parse(cls, text: str) -> Lengths:
        """Read ``512``, ``uniform:100-1024`` or ``lognormal:400,0.8,4096``.

        Raises:
            ValueError: it is none of these, or holds a length below 1.
        """
        kind, _, rest = text.partition(":")
        try:
            if not rest:
                return cls._uniform(int(kind), int(kind))
            if kind == "uniform":
                least, largest = rest.split("-")
                return cls._uniform(int(least), int(largest))
            if kind == "lognormal":
                median, sigma, *most = rest.split(",")
                if len(most) > 1 or float(sigma) < 0:
                    raise ValueError
                high = int(most[0]) if most else 2**20
                if not 1 <= float(median) <= high:
                    raise ValueError
                return cls("lognormal", high=high, median=float(median), sigma=float(sigma))
        except ValueError:
            pass
        raise ValueError(f"{text!r} is not a distribution of lengths: give {FORMS}, with lengths from 1 on")

    @classmethod
    def _uniform(cls, low: int, high: int) -> Lengths:
        if not 1 <= low <= high:
            raise ValueError
        return cls("uniform", low, high)

    def draw(self, rng: random.Random) -> int:
        """Draw one length."""
        if self.kind == "uniform":
            return rng.randint(self.low, self.high)
        return min(self.high, max(1, round(math.exp(rng.gauss(math.log(self.median), self.sigma)))))

    def __str__(self) -> str:
        if self.kind == "lognormal":
            return f"lognormal:{self.median:g},{self.sigma:g},{self.high}"
        return str(self.low) if self.low == self.high else f"uniform:{self.low}-{self.high}"
