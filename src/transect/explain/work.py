"""What the steps of a log had to compute: the cost model over the header of a decision log (no torch).

``StepWork`` turns rows into the numbers that step times are explained by: tokens, rows, keys read, pairs attended, and
the floor on a device. A log without a model (a scheduler that was driven alone) has tokens and positions only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..bench.floors import Floor, Rates, step_floor
from ..engine.decisions import Header
from ..models.config import ModelConfig
from ..models.cost import Row
from ..models.storage import Storage
from .log import StepRow


@dataclass(frozen=True, slots=True)
class Load:
    """One step in numbers. ``floor`` is in seconds, 0 where no floor is known."""

    tokens: int
    rows: int
    keys: int
    """Positions of the KV cache that are read, over all rows."""
    pairs: int
    """Pairs of a token and a position that it sees."""
    floor: float = 0.0
    flops: float = 0.0
    bytes: float = 0.0


class StepWork:
    """The work of steps of one model on one device.

    Args:
        config: None where the log does not say.
        rates: what the device can do; None: floors are 0.
    """

    def __init__(self, config: ModelConfig | None, storage: Storage, rates: Rates | None) -> None:
        self.config, self.storage, self.rates = config, storage, rates

    @classmethod
    def of(cls, header: Header, rates: Rates | None) -> StepWork:
        """For the model that a log's header describes."""
        if not header.model:
            return cls(None, Storage(), None)
        known = {field.name for field in fields(ModelConfig)}
        model: dict[str, Any] = {name: _tuples(value) for name, value in header.model.items() if name in known}
        names = {field.name for field in fields(Storage)}
        stored = {name: value for name, value in header.storage.items() if name in names}
        stored["matrices"] = tuple((name, bits) for name, bits in stored.get("matrices", ()))
        return cls(ModelConfig(**model), Storage(**stored), rates)

    def load(self, rows: Sequence[StepRow]) -> Load:
        """What a step with these rows has to do."""
        keys = sum(start + count for _, start, count in rows)
        pairs = sum(count * start + count * (count + 1) // 2 for _, start, count in rows)
        floor = self.floor(rows)
        return Load(sum(r[2] for r in rows), len(rows), keys, pairs, floor.seconds, floor.flops, floor.bytes)

    def floor(self, rows: Sequence[StepRow]) -> Floor:
        """The least time, FLOPs and bytes of a step; zeros where model or device is not known."""
        if self.config is None or self.rates is None or not rows:
            return Floor()
        listed = [Row(count, start + count) for _, start, count in rows]
        return step_floor(self.config, listed, self.rates, self.storage)

    def share(self, own: Sequence[StepRow], rows: Sequence[StepRow]) -> float:
        """The part of a step that would be left without the other rows: by floors, else by tokens."""
        whole = self.floor(rows).seconds
        if whole:
            return min(1.0, self.floor(own).seconds / whole)
        return sum(row[2] for row in own) / sum(row[2] for row in rows)


def _tuples(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value
