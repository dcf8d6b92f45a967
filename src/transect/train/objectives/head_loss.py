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

from ...models.decoder import Decoder
from ...models.eagle import EagleHead
from ..data.batches import IGNORE, Batch

ROWS = 512
"""Rows of the model's logits that are held at a time."""


class DraftContext:
    """Attention of a head over the documents of a micro-batch, step after step; see ``AttentionContext``.

    Args:
        lengths: tokens of each document.
    """

    wanted = None

    def __init__(self, lengths: list[int]) -> None:
        self._lengths = lengths
        self._steps: list[tuple[Tensor, Tensor]] = []
        """Keys and values ``[T, K, d]`` of each step so far."""

    def positions(self) -> Tensor:
        """Raise an error: heads have no use for it."""
        raise NotImplementedError("the layers of heads do not scale queries by position")

    def attend(
        self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, scale: float, window: int | None, **how: Any
    ) -> Tensor:
        """Attend to the first step's keys up to the same row, and to the later steps' keys of this row."""
        self._steps.append((k_TKd, v_TKd))
        times = q_THd.shape[1] // k_TKd.shape[1]
        attended, begin = [], 0
        for length in self._lengths:
            part = slice(begin, begin + length)
            steps = [tuple(x[part].repeat_interleave(times, 1) for x in step) for step in self._steps]
            attended.append(_attend(q_THd[part], steps, scale))
            begin += length
        return torch.cat(attended)


def _attend(q_nHd: Tensor, steps: list[tuple[Tensor, ...]], scale: float) -> Tensor:
    """Attend within one document of n tokens."""
    (keys, values), own = steps[0], steps[1:]
    n = len(q_nHd)
    scores_Hnn = torch.einsum("nhd,mhd->hnm", q_nHd, keys)
    later = torch.ones(n, n, dtype=torch.bool, device=q_nHd.device).triu(1)
    scores = [scores_Hnn.masked_fill(later, -torch.inf), *((q_nHd * k).sum(-1).T[..., None] for k, _ in own)]
    weights = (torch.cat(scores, -1) * scale).softmax(-1, dtype=torch.float32).to(q_nHd.dtype)
    out_nHd = torch.einsum("hnm,mhd->nhd", weights[..., :n], values)
    for index, (_, v) in enumerate(own):
        out_nHd = out_nHd + weights[..., n + index].T[..., None] * v
    return out_nHd


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
    for hidden_RD in model.finish(x_TD).split(ROWS):
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


def head_loss(
    head: EagleHead, targets: Targets, batch: Batch, lengths: list[int], steps: int, decay: float
) -> HeadLoss:
    """Compute the loss of a micro-batch.

    Args:
        lengths: tokens of each document.
        steps: steps of the head.
        decay: factor of each step's loss over that of the step before.
    """
    context = DraftContext(lengths)
    count = batch.num_tokens
    index_T = torch.arange(count, device=batch.tokens_T.device)
    ends_T = batch.cu_seqlens[1:].long().repeat_interleave(batch.cu_seqlens.diff().long())
    hidden_TD = head.fc(targets.features_TD)
    total = hidden_TD.new_zeros((), dtype=torch.float32)
    right: list[Tensor] = []
    rows: list[int] = []
    for step in range(steps):
        ahead_T = index_T + 1 + step
        there_T = ahead_T.clamp(max=count - 1)
        embeds_TD = head.embed(batch.tokens_T[there_T])
        hidden_TD = head.layer(embeds_TD, hidden_TD, batch.positions_T + step, context)  # type: ignore[arg-type]
        counted_T = (ahead_T < ends_T) & (batch.labels_T[there_T] != IGNORE)
        chosen_R = counted_T.nonzero()[:, 0]
        if not len(chosen_R):
            break
        logits_RW = head.head.own(hidden_TD[chosen_R]).float()
        at_R = there_T[chosen_R]
        loss = -(targets.shares_TW[at_R] * logits_RW.log_softmax(-1)).sum(-1).mean()
        total = total + decay**step * loss
        drawn_R = head.head.places_W[logits_RW.detach().argmax(-1)]
        right.append((drawn_R == targets.best_T[at_R]).sum())
        rows.append(len(chosen_R))
    return HeadLoss(total, right, rows)
