"""Ranks that have stages of layers, through which micro-batches pass (``parallel/pipeline.py``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from ....parallel.sharded import Sharded
from ...data.batches import Batch
from ...model.build import Trainable
from ...objectives.loss import TokenLoss, piece, token_loss
from ...optim import Optimizer
from .alone import LossOf
from .together import Together


class Pipelined(Together):
    """Each rank runs its stage of the micro-batches of its part of the data axis."""

    _token_loss: TokenLoss

    def take(
        self, trainable: Trainable, recompute: bool
    ) -> tuple[Mapping[str, nn.Parameter], Mapping[str, Sequence[int]]]:
        """Divide the work of the stages; see ``Alone.take``."""
        self._token_loss = token_loss(trainable.device, trainable.source.config.logit_softcap)
        return super().take(trainable, recompute)

    def _sums(
        self, batches: Sequence[Batch], loss_of: LossOf, optimizer: Optimizer, losses: Tensor, own: bool
    ) -> dict[str, Tensor]:
        """Run this rank's micro-batches of a step through the stages, and sum the gradients of this stage."""
        parallel, spread = self.parallel, self.spread
        assert parallel.pipeline is not None and not isinstance(spread, Sharded)
        labels = sum(batch.num_labels for batch in batches)
        mine = range(self.mesh.place.data, len(batches), self.mesh.layout.data)
        pieces = [piece(parallel, batches[i], self._token_loss, batches[i].num_labels / labels) for i in mine]
        after = optimizer.gather if spread is None else spread.collect
        found = parallel.pipeline.run(pieces, parallel.actions(len(pieces)), after)
        for index, value in zip(mine, found, strict=False):
            losses[index] = value
        self.mesh.replicas.all_reduce(self.mesh.pipeline.all_reduce(losses))
        if spread is None:
            gradients = optimizer.gradients()
            parallel.join_ends(gradients.get)
            return gradients
        parallel.join_ends(spread.gradient_of)
        return spread.reduce()
