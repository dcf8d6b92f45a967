"""Ranks that have the same weights and share micro-batches, and ranks that have one model between them."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace

from torch import Tensor

from ....parallel.replicas import GradientReplicas
from ....parallel.sharded import Sharded
from ....spec.layouts.ranks import check_shares
from ...data.batches import Batch
from ...optim import Optimizer
from .alone import LossOf, backward, gather_all
from .together import Together


class Replicated(Together):
    """Each rank along the data axis runs its share of the micro-batches, and gradients are summed."""

    def _sums(
        self, batches: Sequence[Batch], loss_of: LossOf, optimizer: Optimizer, losses: Tensor, own: bool
    ) -> dict[str, Tensor]:
        if self.spread is None:  # no other rank has these weights
            gather_all(batches, loss_of, optimizer, losses)
            return optimizer.gradients()
        return self._shared(self.spread, batches, loss_of, losses, own)

    def _own(self, batches: Sequence[Batch]) -> list[tuple[int, Batch]]:
        """Return the micro-batches that this rank runs, with their numbers."""
        check_shares(len(batches), self.mesh.layout.data)
        return list(enumerate(batches))[self.mesh.place.data :: self.mesh.layout.data]

    def _todo(self, batches: Sequence[Batch]) -> list[tuple[int, Batch]]:
        """Return those of this rank's micro-batches that have labels."""
        if self.parallel.shares_experts:
            return self._all_alike(batches)
        return [(index, batch) for index, batch in self._own(batches) if batch.num_labels]

    def _all_alike(self, batches: Sequence[Batch]) -> list[tuple[int, Batch]]:
        """Return the same number of micro-batches on every rank: those without labels are replaced by one of weight
        0."""
        some = replace(next(batch for batch in batches if batch.num_labels), num_labels=0)
        return [(index, batch if batch.num_labels else some) for index, batch in self._own(batches)]

    def _shared(
        self,
        spread: GradientReplicas | Sharded,
        batches: Sequence[Batch],
        loss_of: LossOf,
        losses: Tensor,
        own: bool,
    ) -> dict[str, Tensor]:
        labels = sum(batch.num_labels for batch in batches)
        todo = self._todo(batches)
        for number, (index, batch) in enumerate(todo, 1):
            self.at(f"micro-batch {number} of {len(todo)}")
            last = number == len(todo) and not own
            with spread.last() if last else nullcontext():
                backward(loss_of(index, batch), batches[index].num_labels / labels, losses[index])
            if not last:
                spread.collect()
        self.at("the sums of gradients")
        gradients = spread.local() if own and isinstance(spread, GradientReplicas) else spread.reduce()
        self.mesh.replicas.all_reduce(losses)
        return gradients
