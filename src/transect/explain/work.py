"""What the steps of a log had to compute: the cost model over the header of a decision log (no torch).

``StepWork`` turns rows into the numbers that step times are explained by: tokens, rows, keys read, pairs attended, and
the floor on a device. A log without a model (a scheduler that was driven alone) has tokens and positions only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from ..bench.floors import Floor, Rates
from ..costs.steps import StepLoad
from ..costs.work import Cost
from ..engine.decisions import Header
from ..engine.gpu.step_sizes import FEWEST_ROWS, mixed_size, row_bucket
from ..models.cost import Row, least_attention, least_products
from ..models.storage import Storage
from ..spec.model import ModelConfig
from .log import StepRow


class Padding:
    """What steps are filled up to on the device of a log (``engine/gpu/step_sizes.py``); on a CPU to nothing."""

    def __init__(self, header: Header) -> None:
        known, limits = header.device.get("padding") or {}, header.scheduler
        self.pads = bool(known)
        self.graph_tokens, self.fine = known.get("graph_tokens", 0), bool(known.get("fine_rows"))
        self.multiple = max(1, known.get("multiple", 1))
        self.block_size, self.rows = limits.get("block_size", 16), limits.get("max_num_seqs", 0)
        self.most = -(-limits.get("max_model_len", self.block_size) // self.block_size)

    def tokens(self, rows: Sequence[StepRow]) -> int:
        """Tokens of a step with these rows, with padding."""
        count, chunks = sum(row[2] for row in rows), sum(row[2] > 1 for row in rows)
        if not self.pads:
            return count
        if not chunks:
            return row_bucket(len(rows), self.fine)
        if count > self.graph_tokens:
            return -(-count // self.multiple) * self.multiple
        blocks = -(-max(start + new for _, start, new in rows) // self.block_size)
        places = max(FEWEST_ROWS, row_bucket(chunks)) + len(rows) - chunks
        return mixed_size(count, places, blocks, self.block_size, self.most, FEWEST_ROWS + self.rows).tokens


class StepWork:
    """The work of steps of one model on one device.

    Args:
        config: None where the log does not say.
        rates: what the device can do; None: floors are 0.
    """

    def __init__(
        self, config: ModelConfig | None, storage: Storage, rates: Rates | None, padding: Padding | None = None
    ) -> None:
        self.config, self.storage, self.rates, self.padding = config, storage, rates, padding
        self._products: dict[tuple[int, int], Floor] = {}
        """By (tokens, rows): they recur, and layers are many."""

    @classmethod
    def of(cls, header: Header, rates: Rates | None) -> StepWork:
        """For the model that a log's header describes."""
        if not header.model:
            return cls(None, Storage(), None, Padding(header))
        known = {field.name for field in fields(ModelConfig)}
        model: dict[str, Any] = {name: _tuples(value) for name, value in header.model.items() if name in known}
        names = {field.name for field in fields(Storage)}
        stored = {name: value for name, value in header.storage.items() if name in names}
        stored["matrices"] = tuple((name, bits) for name, bits in stored.get("matrices", ()))
        return cls(ModelConfig(**model), Storage(**stored), rates, Padding(header))

    def load(self, rows: Sequence[StepRow]) -> StepLoad:
        """Count the work of a step with these rows."""
        found, floor = StepLoad.of((start, count) for _, start, count in rows), self.floor(rows)
        padded = found.tokens if self.padding is None else self.padding.tokens(rows)
        return found._replace(padded=padded, floor=floor.seconds, flops=floor.flops, bytes=floor.bytes)

    def floor(self, rows: Sequence[StepRow]) -> Floor:
        """The least time, FLOPs and bytes of a step; zeros where model or device is not known."""
        if self.config is None or self.rates is None or not rows:
            return Floor()
        size = sum(count for _, _, count in rows), len(rows)
        products = self._products.get(size)
        if products is None:
            costs = least_products(self.config, *size, self.storage).values()
            products = self._products[size] = sum((self._at_rates(cost) for cost in costs), Floor())
        listed = [Row(count, start + count) for _, start, count in rows]
        found = products + self._at_rates(least_attention(self.config, listed, self.storage))
        if self.rates.host_bytes_per_second is None:
            return found
        return replace(found, seconds=max(found.seconds, self.storage.streamed / self.rates.host_bytes_per_second))

    def _at_rates(self, cost: Cost) -> Floor:
        assert self.rates is not None
        return Floor(cost.flops, cost.bytes, cost.floor(*self.rates.both))

    def share(self, own: Sequence[StepRow], rows: Sequence[StepRow]) -> float:
        """The part of a step that would be left without the other rows: by floors, else by tokens."""
        whole = self.floor(rows).seconds
        if whole:
            return min(1.0, self.floor(own).seconds / whole)
        return sum(row[2] for row in own) / sum(row[2] for row in rows)


def _tuples(value: object) -> object:
    return tuple(value) if isinstance(value, list) else value
