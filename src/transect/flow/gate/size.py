"""Bytes of a model's weights; of an adapter, its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ...costs.units import parse_bytes
from .measure import GateMeasure, GateVerdict, Samples, TestedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class SizeBars:
    """The size of the gate.

    Attributes:
        most: largest size, such as ``64MB``.
    """

    most: str

    def __post_init__(self) -> None:
        parse_bytes(self.most)


def _take(candidate: TestedModel, current: TestedModel, settings: SizeBars, path: Callable[[str], Path]) -> Samples:
    return {"candidate": [candidate.size], "current": [current.size]}


def _judge(samples: Samples, settings: SizeBars, confidence: float) -> GateVerdict:
    size, current = samples["candidate"][0], samples["current"][0]
    reason = f"{size:,} bytes, {settings.most} allowed"
    return GateVerdict(size <= parse_bytes(settings.most), reason, size, current)


SIZE = GateMeasure(
    name="size",
    settings=SizeBars,
    take=_take,
    judge=_judge,
    describe=lambda bars: f"at most {bars.most}",
)
