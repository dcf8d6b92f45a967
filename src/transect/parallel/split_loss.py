r"""Cross entropy if each rank has some rows of the head: no rank ever sees the logits of another.

    z = x W^T        loss_t = log sum_v exp(z_tv) - z_t,label        dz = (softmax(z) - onehot) / labels

A rank computes the logits of its own tokens, their log-sum-exp, and the label's logit where it has that. Both, two
numbers for each token, are gathered: the log-sum-exp of all ranks' is that of the whole row, and one rank has the
label. From there each rank makes the gradient of its own logits, and with it that of its rows of W and its part of that
of x.

As in ``ops/loss/linear_cross_entropy_torch.py`` a few rows of logits exist at a time, and become their gradient there.
Source: Shoeybi et al. 2019, arXiv:1909.08053.

Shapes: T tokens, D model dim, V' rows of the head that the rank has.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..costs.memory.sizes import SPLIT_ELEMENTS
from .group import Group


def split_cross_entropy(
    x_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, ignore: int, *, first: int, most: int, group: Group
) -> Tensor:
    """Compute the mean cross entropy over the labels that are not ignored.

    Args:
        x_TD: hidden states, alike on every rank; their gradient is this rank's part of a sum over the ranks.
        weight_VD: the rows of the tokens from ``first`` on.
        most: rows of the rank that has most. All ranks cut their tokens by it, so that they gather alike.
        labels_T: int64, of the whole vocabulary.
        group: the ranks that have the other rows. All call it together.

    Returns:
        A float32 scalar (float64 for float64), alike on every rank; NaN if there is no label.
    """
    loss: Tensor = _Split.apply(x_TD, weight_VD, labels_T, ignore, first, most, group)
    return loss


class _Split(torch.autograd.Function):
    """Computes the gradients along with the loss, and scales them by the upstream gradient afterwards."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, labels: Tensor, ignore: int, first: int, most: int, group: Group
    ) -> Tensor:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        wants_x, wants_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[1]
        rows, count = weight.shape[0], (labels != ignore).sum()
        dx = torch.empty_like(x) if wants_x else None
        dw = torch.zeros_like(weight, dtype=wide) if wants_weight else None
        total = x.new_zeros((), dtype=wide)
        size = max(1, SPLIT_ELEMENTS["gpu" if x.is_cuda else "cpu"] // most)
        for begin in range(0, x.shape[0], size):
            hidden, label = x[begin : begin + size], labels[begin : begin + size, None]
            counts = label != ignore
            logits = (hidden @ weight.mT).to(wide)
            own = label - first
            here = counts & (own >= 0) & (own < rows)
            at = own.clamp(0, rows - 1)
            mine = torch.stack((logits.logsumexp(-1, keepdim=True), torch.where(here, logits.gather(1, at), 0)))
            all_R2T1 = group.all_gather(mine)
            normalizer, target = all_R2T1[:, 0].logsumexp(0), all_R2T1[:, 1].sum(0)
            total += torch.where(counts, normalizer - target, 0).sum()
            if dx is None and dw is None:
                continue
            gradient = logits.sub_(normalizer).exp_()
            gradient.scatter_add_(1, at, -here.to(wide))
            gradient = gradient.mul_(counts / count).to(x.dtype)
            if dx is not None:
                dx[begin : begin + size] = gradient @ weight
            if dw is not None:
                dw += gradient.mT @ hidden
            del logits, gradient  # or they would stay until the next ones are made
        ctx.save_for_backward(dx, None if dw is None else dw.to(weight.dtype))
        return total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = (None if kept is None else kept * upstream.to(kept.dtype) for kept in ctx.saved_tensors)
        return dx, dw, None, None, None, None, None
