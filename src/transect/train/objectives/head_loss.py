r"""The loss of an EAGLE-3 head: several steps of it, fed by its own outputs (training-time test, Li et al. 2025).

Step k of row i stands where drafting stands k tokens after the last token that the model has computed, token i. The
head reads the embedding of token i + 1 + k, and its own output of step k - 1 in place of a feature. It attends to the
entries 0 to i with features, and to its own steps 1 to k of the same row. With p the distribution of the model at token
i + 1 + k, q that of the head, W the vocabulary of the head and w the decay:

    loss = sum_k w^k  mean_i  -sum_{t in W} p_ik(t) log q_ik(t)

p is not normalised over W, so a row counts by the mass that the head can draw.

Shapes: T tokens of a micro-batch, H query heads, K key heads, d head size, D model dim, W the head's vocabulary.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...models.decoder import Decoder
from ...models.eagle import EagleHead
from ..data.batches import IGNORE, Batch
from .draft_attention import DraftContext

ELEMENTS = 2**25
"""Logits that are held at a time."""


class Targets(NamedTuple):
    """The model's output for a micro-batch."""

    features_TD: Tensor
    """Concatenated hidden states of its layers, ``[T, 3 D]``."""
    shares_TW: Tensor
    """Probabilities of the head's tokens, float32."""
    best_T: Tensor
    """Likeliest tokens."""


@torch.no_grad()
def targets_of(model: Decoder, head: EagleHead, batch: Batch) -> Targets:
    """Run the model over a micro-batch, operator by operator."""
    from ...models.context import VarlenContext

    context = VarlenContext(batch.cu_seqlens, model.ops)
    model.taps = taps = head.features
    try:
        x_TD = model.run_layers(model.begin(batch.tokens_T, batch.positions_T), batch.positions_T, context)
    finally:
        model.taps = None
    features, taps.states = torch.cat(taps.states, -1), []
    shares, best = [], []
    for hidden_RD in model.finish(x_TD).split(max(1, ELEMENTS // model.config.vocab_size)):
        logits_RV = model.logits(hidden_RD)
        own_RW = logits_RV.index_select(1, head.head.places_W)
        shares.append((own_RW - logits_RV.logsumexp(-1, keepdim=True)).exp())
        best.append(logits_RV.argmax(-1))
    return Targets(features, torch.cat(shares), torch.cat(best))


class HeadLoss(NamedTuple):
    """Loss of a micro-batch, and for each step the sum of drafts that are the model's likeliest token, and the rows."""

    loss: Tensor
    right: list[Tensor]
    rows: list[int]


class Rows(NamedTuple):
    """Rows of a step in the loss."""

    chosen_R: Tensor
    """Their places in the micro-batch."""
    at_R: Tensor
    """Places of the tokens whose distribution is their target."""


def rows_of(batch: Batch, steps: int) -> list[Rows]:
    """Find the rows of each step, as far as there are any. The host waits for what the device was given before."""
    count, device = batch.num_tokens, batch.tokens_T.device
    index_T, lengths = torch.arange(count, device=device), batch.cu_seqlens.diff().long()
    ends_T = batch.cu_seqlens[1:].long().repeat_interleave(lengths, output_size=count)
    trained_T, found = batch.labels_T != IGNORE, list[Rows]()
    for step in range(steps):
        there_T = index_T + 1 + step
        counted_T = (there_T < ends_T) & trained_T[there_T.clamp(max=count - 1)]
        chosen_R = counted_T.nonzero()[:, 0]
        if not len(chosen_R):
            break
        found.append(Rows(chosen_R, chosen_R + 1 + step))
    return found


def head_loss(head: EagleHead, targets: Targets, batch: Batch, rows: list[Rows], decay: float) -> HeadLoss:
    """Compute the loss of a micro-batch.

    Args:
        rows: rows of each step of the head.
        decay: factor of each step's loss over that of the step before.
    """
    context = DraftContext(batch.cu_seqlens, head.ops)
    embeds_TD = head.embed(batch.tokens_T)
    hidden_TD = head.fc(targets.features_TD)
    total = hidden_TD.new_zeros((), dtype=torch.float32)
    right: list[Tensor] = []
    for step, (chosen_R, at_R) in enumerate(rows):
        # Rows after the end of their document read the next one's tokens, and count nowhere.
        hidden_TD = head.layer(
            embeds_TD.roll(-1 - step, 0),
            hidden_TD,
            batch.positions_T + step,
            context,  # type: ignore[arg-type]
        )
        normed_RD, weight_WD = head.norm(hidden_TD[chosen_R]), head.head.lm_head.dense()
        loss, best_R = _SoftCrossEntropy.apply(normed_RD, weight_WD, targets.shares_TW, at_R)
        total = total + decay**step * loss
        right.append((head.head.places_W[best_R] == targets.best_T[at_R]).sum())
    return HeadLoss(total, right, [len(each.chosen_R) for each in rows])


class _SoftCrossEntropy(torch.autograd.Function):
    """Mean cross entropy of ``softmax(x W^T)`` against given shares, and the likeliest tokens. As in
    ``ops/loss/linear_cross_entropy.py`` logits become their gradient in place, a chunk of rows at a time."""

    @staticmethod
    def forward(ctx: Any, x_RD: Tensor, weight_WD: Tensor, shares_TW: Tensor, at_R: Tensor) -> tuple[Tensor, Tensor]:
        count, chunk = len(x_RD), max(1, ELEMENTS // len(weight_WD))
        loss, best = x_RD.new_zeros((), dtype=torch.float32), []
        wanted = any(ctx.needs_input_grad[:2])
        dx_RD, dw_WD = torch.empty_like(x_RD), torch.zeros_like(weight_WD, dtype=torch.float32)
        for begin in range(0, count, chunk):
            part = slice(begin, begin + chunk)
            shares_CW = shares_TW[at_R[part]]
            z_CW = (x_RD[part] @ weight_WD.T).float()
            best.append(z_CW.argmax(-1))
            mass_C1 = shares_CW.sum(-1, keepdim=True)
            l_C1 = z_CW.logsumexp(-1, keepdim=True)
            loss += (mass_C1 * l_C1).sum() - (shares_CW * z_CW).sum()
            if wanted:
                dz_CW = (z_CW - l_C1).exp_().mul_(mass_C1).sub_(shares_CW).div_(count).to(x_RD.dtype)
                torch.matmul(dz_CW, weight_WD, out=dx_RD[part])
                dw_WD += dz_CW.T @ x_RD[part]
        ctx.save_for_backward(dx_RD, dw_WD.to(weight_WD.dtype))
        best_R = torch.cat(best)
        ctx.mark_non_differentiable(best_R)
        return loss / count, best_R

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor, _: Tensor) -> tuple[Tensor, Tensor, None, None]:
        dx_RD, dw_WD = ctx.saved_tensors
        return (g * dx_RD).to(dx_RD.dtype), (g * dw_WD).to(dw_WD.dtype), None, None
