"""Ranks that share out the weights themselves, and gather each layer's when it is used (ZeRO-3, FSDP)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ....parallel.offload.pieces import FileUpload
from ....parallel.sharded import Sharded
from ...data.batches import Batch
from ...optim import Optimizer
from .alone import LossOf
from .replicated import Replicated


class ShardedRanks(Replicated):
    """``Replicated``, with the same number of micro-batches on every rank, including those without labels."""

    @property
    def units(self) -> Sharded | None:  # type: ignore[override]
        """See ``Alone.units``; None on a single rank whose weights are not offloaded."""
        return self.spread if isinstance(self.spread, Sharded) else None

    @property
    def upload(self) -> FileUpload | None:  # type: ignore[override]
        """See ``Alone.upload``."""
        return None if self.units is None else self.units.upload

    def gradients(self, batches: Sequence[Batch], loss_of: LossOf, optimizer: Optimizer, losses: Tensor) -> Tensor:
        """Run a step's micro-batches, see ``Alone.gradients``; an optimizer in host memory takes each gradient as soon
        as it is summed."""
        if self.units is None:
            return super().gradients(batches, loss_of, optimizer, losses)
        self.units.send_to(optimizer.sink)
        if optimizer.sink is None:
            return super().gradients(batches, loss_of, optimizer, losses)
        self._shared(self.units, batches, loss_of, losses, False)
        return self.parallel.norm_of(optimizer.sunk_square(self.parallel.counts))

    def _todo(self, batches: Sequence[Batch]) -> list[tuple[int, Batch]]:
        return self._all_alike(batches)
