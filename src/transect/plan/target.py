"""Latency targets of a service: percentiles of TTFT, ITL, TPOT and end-to-end time."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ..bench.objectives import NAMES
from ..bench.summary import PERCENTILES

DEFAULT = "ttft.p99=1s,itl.p99=50ms"
_PART = re.compile(r"(\w+)(?:\.p(\d+))?=([0-9]*\.?[0-9]+)(ms|s)")


@dataclass(frozen=True, slots=True)
class LatencyTarget:
    """The longest allowed seconds, by (name, percentile)."""

    limits: Mapping[tuple[str, int], float]

    @classmethod
    def parse(cls, text: str) -> LatencyTarget:
        """Read ``ttft.p99=1s,itl.p99=50ms,e2e.p50=10s``; a name alone means its p99.

        Raises:
            ValueError: it says something else.
        """
        limits: dict[tuple[str, int], float] = {}
        for part in text.split(","):
            found = _PART.fullmatch(part.strip())
            name, share = (found[1], int(found[2] or 99)) if found else ("", 0)
            if found is None or name not in NAMES or share not in PERCENTILES:
                shares = ", ".join(f"p{each}" for each in PERCENTILES)
                raise ValueError(
                    f"target {part.strip()!r} is not understood: give some of {', '.join(NAMES)} with one of {shares}, "
                    f"as in {DEFAULT}"
                )
            limits[name, share] = float(found[3]) * (1e-3 if found[4] == "ms" else 1.0)
        return cls(limits)

    def ratios(self, summary: Mapping[str, Any]) -> dict[str, float]:
        """Return each figure of ``summary`` (``bench/summary.py``) over its limit: above 1 it is missed."""
        found = {}
        for (name, share), limit in self.limits.items():
            known = summary[name]
            found[f"{name}.p{share}"] = (known[f"p{share}"] if known else 0.0) / limit
        return found

    def missed(self, summary: Mapping[str, Any]) -> list[str]:
        """List the limits that ``summary`` exceeds, the worst first."""
        ratios = {name: ratio for name, ratio in self.ratios(summary).items() if ratio > 1}
        return sorted(ratios, key=lambda name: -ratios[name])

    def limit(self, name: str) -> float | None:
        """Return the shortest limit of a name, in seconds; None if there is none."""
        return min((limit for (each, _), limit in self.limits.items() if each == name), default=None)

    def __str__(self) -> str:
        return ",".join(f"{name}.p{share}={1e3 * limit:g}ms" for (name, share), limit in self.limits.items())
