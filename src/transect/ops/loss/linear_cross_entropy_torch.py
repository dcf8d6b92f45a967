"""The fused loss of ``linear_cross_entropy.py`` in plain torch: for the CPU, and wherever no kernel runs.

The same idea: a few rows of logits at a time, turned into their gradient on the spot, so that the logits of all tokens
never exist. A weight that is frozen (fine-tuning with adapters) costs no product for its gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from ...costs.memory.sizes import LOSS_ELEMENTS


def linear_cross_entropy(
    x: Tensor, weight: Tensor, target: Tensor, ignore_index: int = -100, *, softcap: float | None = None
) -> Tensor:
    """Compute the mean cross entropy of ``softmax(x weight^T)`` against ``target``, over the targets that are not
    ignored.

    Args:
        x: ``[T, D]``. weight: ``[V, D]``. target: ``[T]`` int64.
        softcap: logits z become ``softcap tanh(z / softcap)`` before the softmax, as in Gemma 2 (arXiv:2408.00118).

    Returns:
        A float32 scalar (float64 for float64 inputs); NaN if every target is ignored, as in torch.
    """
    loss: Tensor = _Fused.apply(x, weight, target, ignore_index, softcap)
    return loss


class _Fused(torch.autograd.Function):
    """Computes the gradients along with the loss, and scales them by the upstream gradient afterwards."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, target: Tensor, ignore_index: int, softcap: float | None
    ) -> Tensor:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        wants_x, wants_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        counts = target != ignore_index
        used = counts.nonzero()[:, 0]
        count = len(used)
        dx = torch.zeros_like(x) if wants_x else None
        dw = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        total = x.new_zeros((), dtype=wide)
        rows = max(1, LOSS_ELEMENTS // weight.shape[0])
        for part in used.split(rows):
            hidden = x[part]
            logits = (hidden @ weight.mT).to(wide)
            slope = None
            if softcap is not None:
                bent = logits.div_(softcap).tanh_()
                slope, logits = 1 - bent.square(), bent * softcap
            labels = target[part][:, None]
            normalizer = logits.logsumexp(-1, keepdim=True)
            total += (normalizer - logits.gather(1, labels)).sum()
            if dx is None and dw is None:
                continue
            gradient = logits.sub_(normalizer).exp_()
            gradient.scatter_add_(1, labels, gradient.new_full(labels.shape, -1.0))
            if slope is not None:
                gradient *= slope
            gradient = gradient.div_(count).to(x.dtype)
            if dx is not None:
                dx[part] = gradient @ weight
            if dw is not None:
                dw += gradient.mT @ hidden
        ctx.save_for_backward(dx, None if dw is None else dw.to(weight.dtype))
        return total / count

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        dx, dw = ctx.saved_tensors
        (scale,) = upstream
        return (
            None if dx is None else dx * scale.to(dx.dtype),
            None if dw is None else dw * scale.to(dw.dtype),
            None,
            None,
            None,
        )
