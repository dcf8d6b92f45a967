"""The training loss: mean cross entropy of the next token, without ever holding the logits of all tokens."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ...models.context import VarlenContext
from ...models.decoder import Decoder
from ...ops.loss.linear_cross_entropy_cpu import LinearCrossEntropy
from ...ops.loss.linear_cross_entropy_torch import linear_cross_entropy
from ...ops.registry import Unavailable, get
from ..data.batches import IGNORE, Batch, padded
from .share import WHOLE, RolloutShare

if TYPE_CHECKING:
    from ...parallel.parallelize import Parallel
    from ...parallel.pipeline import StagedBatch

log = logging.getLogger(__name__)

TokenLoss = Callable[[Tensor, Tensor, Tensor, int], Tensor]


def token_loss(device: torch.device, softcap: float | None = None) -> TokenLoss:
    """Choose the loss function ``(hidden_TD, head_VD, labels_T, ignored label) -> mean loss``: the fused kernel on a
    GPU, the C++ kernels on the CPU, torch if these cannot be built or logits are capped by ``softcap`` (which is
    logged)."""
    if softcap is not None:
        log.info("the loss runs in torch: the kernels know no cap on logits")
        return partial(linear_cross_entropy, softcap=softcap)
    if device.type == "cpu":
        try:
            return LinearCrossEntropy()
        except Unavailable as reason:
            log.warning("the loss runs in torch: %s", reason)
            return linear_cross_entropy
    from ...ops.loss import linear_cross_entropy as module  # noqa: F401  (enters the operator)

    fused = get("linear_cross_entropy").implementations["triton"].autograd
    assert fused is not None
    loss: TokenLoss = fused()
    return loss


def batch_loss(model: Decoder, batch: Batch, loss: TokenLoss, parallel: Parallel | None = None) -> Tensor:
    """Compute the mean loss over the batch's labels, a scalar. The batch is on the model's device; ``parallel``: the
    ranks that compute it together."""
    if parallel is not None:
        return _shared_loss(model, batch, loss, parallel)
    context = VarlenContext(batch.cu_seqlens, model.ops)
    hidden_TD = model(batch.tokens_T, batch.positions_T, context)
    return loss(hidden_TD, model.head.dense(), batch.labels_T, IGNORE)


def _shared_loss(model: Decoder, batch: Batch, loss: TokenLoss, parallel: Parallel) -> Tensor:
    """Compute the loss on ranks that share it; with a gradient, this rank's part of it."""
    own = piece(parallel, batch, loss)
    if parallel.pipeline is not None:
        return parallel.whole_loss(parallel.pipeline.measure(own))
    found = own.loss(model(own.tokens_T, own.positions_T, own.context))
    return found if torch.is_grad_enabled() else parallel.whole_loss(found)


def piece(parallel: Parallel, batch: Batch, loss: TokenLoss, share: float = 1.0) -> StagedBatch:
    """Compute this rank's part of a micro-batch, with its mean loss multiplied by ``share``."""
    from ...parallel.pipeline import StagedBatch

    whole = padded(batch, parallel.token_multiple)
    parallel.meet(whole.num_tokens)
    tokens, positions, labels = map(parallel.own_tokens, (whole.tokens_T, whole.positions_T, whole.labels_T))

    def scaled(hidden_TD: Tensor) -> Tensor:
        if not batch.num_labels:
            return 0 * hidden_TD.float().sum()
        return share * parallel.loss(hidden_TD, labels, batch.num_labels, IGNORE, loss)

    context = parallel.attention(whole.cu_seqlens)
    return StagedBatch(tokens, positions, context, parallel.rows(whole.num_tokens), scaled)


@torch.no_grad()
def evaluate(
    model: Decoder,
    batches: Iterable[Batch],
    loss: TokenLoss,
    parallel: Parallel | None = None,
    share: RolloutShare = WHOLE,
) -> tuple[float, int]:
    """Compute the mean loss in nats over all labels of the batches, and the number of labels; ``share``: this rank's
    part of the batches."""
    total, count = 0.0, 0
    device = model.norm.weight.device
    for batch, counts in share.of(batch for batch in batches if batch.num_labels):
        found = float(batch_loss(model, batch.to(device), loss, parallel))
        if counts:
            total += found * batch.num_labels
            count += batch.num_labels
    return share.means({"loss": (total, count)})["loss"]
