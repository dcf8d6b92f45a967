"""Log-probabilities of given tokens with gradients, for preference and reinforcement learning.

Shapes: T tokens, D model dim, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...costs.memory.sizes import LOSS_ELEMENTS
from ...models.context import VarlenContext
from ...models.decoder import Decoder
from ..data.batches import IGNORE, Batch


@dataclass(frozen=True, slots=True)
class KeptTokens:
    """The tokens that could be drawn at each of T positions: ``ids_N[bounds[t]:bounds[t + 1]]`` at position t; empty if
    none was drawn. Both int64."""

    ids_N: Tensor
    bounds: Tensor

    def to(self, device: torch.device) -> KeptTokens:
        """Return a copy on another device."""
        return KeptTokens(self.ids_N.to(device), self.bounds.to(device))

    def limit(self, logits_RV: Tensor, rows_R: Tensor) -> Tensor:
        """Return ``logits_RV`` of the ascending positions ``rows_R``, with -inf for every token that could not be drawn
        there.

        Between these places there must be none that keeps something.
        """
        first, last = int(self.bounds[rows_R[0]]), int(self.bounds[rows_R[-1] + 1])
        counts = self.bounds[rows_R + 1] - self.bounds[rows_R]
        row_N = torch.arange(len(rows_R), device=logits_RV.device).repeat_interleave(counts)
        ids_N = self.ids_N[first:last]
        out = torch.full_like(logits_RV, float("-inf"))
        out[row_N, ids_N] = logits_RV[row_N, ids_N]
        return out


def token_logprobs(
    hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, *, temperature: float = 1.0, kept: KeptTokens | None = None
) -> Tensor:
    """Compute ``log softmax(hidden weight^T / temperature)`` at the labels, ``[T]`` float32; 0 for the label
    ``IGNORE``.

    Logits exist a few rows at a time, in the backward pass a second time.

    Args:
        kept: the softmax is over these tokens alone; the labels must be among them.
    """
    values: Tensor = _TokenLogprobs.apply(hidden_TD, weight_VD, labels_T, temperature, kept)
    return values


def batch_logprobs(model: Decoder, batch: Batch, *, temperature: float = 1.0, kept: KeptTokens | None = None) -> Tensor:
    """Compute ``token_logprobs`` of a batch of packed documents under the model, ``[T]``."""
    hidden_TD = batch_hidden(model, batch)
    return token_logprobs(hidden_TD, model.head.dense(), batch.labels_T, temperature=temperature, kept=kept)


def batch_hidden(model: Decoder, batch: Batch) -> Tensor:
    """Compute the last hidden states of a batch of packed documents, ``[T, D]``."""
    hidden_TD: Tensor = model(batch.tokens_T, batch.positions_T, VarlenContext(batch.cu_seqlens, model.ops))
    return hidden_TD


def document_sums(values_T: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Sum the log-probabilities of each document, ``[documents]``."""
    lengths = cu_seqlens.diff().long()
    document_T = torch.arange(len(lengths), device=values_T.device).repeat_interleave(lengths)
    return torch.zeros(len(lengths), dtype=values_T.dtype, device=values_T.device).index_add(0, document_T, values_T)


class _TokenLogprobs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, temperature: float, kept: KeptTokens | None
    ) -> Tensor:
        wide = torch.float64 if hidden.dtype == torch.float64 else torch.float32
        out = torch.zeros(labels.shape, dtype=wide, device=labels.device)
        normalizer = torch.zeros_like(out)
        used = (labels != IGNORE).nonzero()[:, 0]
        parts = used.split(max(1, LOSS_ELEMENTS // weight.shape[0])) if len(used) else ()
        for part in parts:
            logits = _logits(hidden[part], weight, wide, temperature, kept, part)
            normalizer[part] = logits.logsumexp(-1)
            out[part] = logits.gather(1, labels[part][:, None])[:, 0] - normalizer[part]
        ctx.save_for_backward(hidden, weight, labels, normalizer)
        ctx.parts, ctx.temperature, ctx.kept = parts, temperature, kept
        return out

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        hidden, weight, labels, normalizer = ctx.saved_tensors
        (gradient_T,) = upstream
        dx = torch.zeros_like(hidden) if ctx.needs_input_grad[0] else None
        dw = torch.zeros_like(weight, dtype=normalizer.dtype) if ctx.needs_input_grad[1] else None
        for part in ctx.parts:
            rows = hidden[part]
            p = _logits(rows, weight, normalizer.dtype, ctx.temperature, ctx.kept, part)
            p = p.sub_(normalizer[part][:, None]).exp_()
            scale = (gradient_T[part] / ctx.temperature)[:, None].to(p.dtype)
            dlogits = p.mul_(-scale).scatter_add_(1, labels[part][:, None], scale).to(hidden.dtype)
            if dx is not None:
                dx[part] = dlogits @ weight
            if dw is not None:
                dw += dlogits.mT @ rows
        return dx, None if dw is None else dw.to(weight.dtype), None, None, None


def _logits(
    rows: Tensor, weight: Tensor, dtype: torch.dtype, temperature: float, kept: KeptTokens | None, part: Tensor
) -> Tensor:
    logits = (rows @ weight.mT).to(dtype)
    if temperature != 1.0:
        logits = logits.div_(temperature)
    return logits if kept is None else kept.limit(logits, part)
