"""The work of the steps of a decision log: the cost model over the header of the log (no torch).

``StepWork`` turns rows into the numbers that step times depend on: tokens, rows, keys read, pairs attended, and the
floor on a device. A log without a model (a scheduler that was driven alone) has tokens and positions only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from ...costs.floors import Floor, Rates, StepFloors
from ...costs.model import Row
from ...costs.steps import StepLoad
from ...costs.storage import Storage
from ...engine.executors.gpu.step_sizes import StepPadding
from ...engine.scheduling.decisions import Header
from ...spec.model import ModelConfig
from .log import StepRow


def padding_of(header: Header) -> StepPadding | None:
    """Return the padded sizes of steps on the device of a log; None on a CPU, which pads nothing."""
    known, limits = header.device.get("padding"), header.scheduler
    if not known:
        return None
    return StepPadding(
        graph_tokens=known.get("graph_tokens", 0),
        rows=known.get("rows", limits.get("max_num_seqs", 0)),
        context=limits.get("max_model_len", 16),
        fine=bool(known.get("fine_rows")),
        multiple=max(1, known.get("multiple", 1)),
        block_size=limits.get("block_size", 16),
    )


class StepWork:
    """The work of steps of one model on one device.

    Args:
        config: None if the log does not say.
        rates: of the device; if None, floors are 0.
    """

    def __init__(
        self, config: ModelConfig | None, storage: Storage, rates: Rates | None, padding: StepPadding | None = None
    ) -> None:
        self.config, self.storage, self.rates, self.padding = config, storage, rates, padding
        self._last: tuple[Sequence[StepRow], Floor] | None = None
        """Rows whose floor was asked for last, and the floor."""
        self._floors = None if config is None or rates is None else StepFloors(config, rates, storage)

    @classmethod
    def of(cls, header: Header, rates: Rates | None) -> StepWork:
        """Make the work of the model that a log's header describes."""
        if not header.model:
            return cls(None, Storage(), None, padding_of(header))
        known = {field.name for field in fields(ModelConfig)}
        model: dict[str, Any] = {name: _tuples(value) for name, value in header.model.items() if name in known}
        names = {field.name for field in fields(Storage)}
        stored = {name: value for name, value in header.storage.items() if name in names}
        stored["matrices"] = tuple((name, bits) for name, bits in stored.get("matrices", ()))
        return cls(ModelConfig(**model), Storage(**stored), rates, padding_of(header))

    def load(self, rows: Sequence[StepRow]) -> StepLoad:
        """Count the work of a step with these rows."""
        found, floor = StepLoad.of((start, count) for _, start, count in rows), self.floor(rows)
        padded = found.tokens
        if self.padding is not None and rows:
            longest = max(start + count for _, start, count in rows)
            padded = self.padding.tokens(found.tokens, found.rows, found.chunks, longest)
        return found._replace(padded=padded, floor=floor.seconds, flops=floor.flops, bytes=floor.bytes)

    def floor(self, rows: Sequence[StepRow]) -> Floor:
        """Return the least time, FLOPs and bytes of a step; zeros if model or device are not known."""
        if self._floors is None or not rows:
            return Floor()
        if self._last is None or rows is not self._last[0]:
            self._last = rows, self._floors([Row(count, start + count) for _, start, count in rows])
        return self._last[1]

    def share(self, own: Sequence[StepRow], rows: Sequence[StepRow]) -> float:
        """Return the share of a step that would remain without the other rows: by floors, else by tokens."""
        whole = self.floor(rows).seconds
        if whole:
            return min(1.0, self.floor(own).seconds / whole)
        return sum(row[2] for row in own) / sum(row[2] for row in rows)


def _tuples(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value
