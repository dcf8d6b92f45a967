"""Latency objectives of a request, and the requests that meet them, which goodput counts."""

from __future__ import annotations

import re
from dataclasses import dataclass

from .load import Record

NAMES = ("ttft", "itl", "tpot", "e2e")
_TIME = re.compile(r"([0-9]*\.?[0-9]+)(ms|s)")
MOST_GAPS = 0.95


@dataclass(frozen=True, slots=True)
class Objectives:
    """The longest allowed times in seconds; None for no objective.

    ``ttft`` from due to the first token; ``itl`` holds if 95% of the request's own gaps keep it; ``tpot`` is the mean
    time per output token after the first; ``e2e`` from due to the end.
    """

    ttft: float | None = None
    itl: float | None = None
    tpot: float | None = None
    e2e: float | None = None

    @classmethod
    def parse(cls, text: str) -> Objectives:
        """Read ``ttft=500ms,itl=50ms,e2e=10s``.

        Raises:
            ValueError: it says something else.
        """
        limits: dict[str, float] = {}
        for part in text.split(","):
            name, _, value = part.strip().partition("=")
            time = _TIME.fullmatch(value.strip())
            if name not in NAMES or time is None or name in limits:
                raise ValueError(
                    f"objective {part.strip()!r} is not understood: give some of {', '.join(NAMES)}, as in "
                    "ttft=500ms,itl=50ms,e2e=10s"
                )
            limits[name] = float(time[1]) * (1e-3 if time[2] == "ms" else 1.0)
        return cls(**limits)

    def met_by(self, record: Record) -> bool:
        """Return True if a request's whole answer met the objectives."""
        if record.error is not None:
            return False
        gaps = record.gaps
        kept = sum(gap <= self.itl for gap in gaps) if self.itl is not None else len(gaps)
        return (
            (self.ttft is None or record.ttft <= self.ttft)
            and (self.tpot is None or (record.tpot or 0.0) <= self.tpot)
            and (self.e2e is None or record.latency <= self.e2e)
            and kept >= MOST_GAPS * len(gaps)
        )

    def __str__(self) -> str:
        given = {name: getattr(self, name) for name in NAMES}
        return ",".join(f"{name}={limit * 1e3:g}ms" for name, limit in given.items() if limit is not None)
