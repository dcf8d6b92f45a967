"""The fused loss of ``linear_cross_entropy.py`` with the C++ kernels, in float32: for training on the CPU.

As in ``linear_cross_entropy_torch.py`` a few rows of logits exist at a time and become their gradient in place; here
each of them is written once by the product, read and written once by the softmax, and read once by the next product.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...costs.memory.sizes import LOSS_ELEMENTS
from ..cpu.training import Kernels, kernels
from . import linear_cross_entropy_torch


class LinearCrossEntropy:
    """``(x, weight, target, ignore_index) -> mean loss`` on a team of ``torch.get_num_threads()`` threads.

    Raises:
        Unavailable: the kernels cannot be built here.
    """

    def __init__(self) -> None:
        self._native = kernels(torch.get_num_threads())

    def __call__(self, x: Tensor, weight: Tensor, target: Tensor, ignore_index: int = -100) -> Tensor:
        """Compute the loss of x ``[T, D]``, weight ``[V, D]``, target ``[T]`` int64 -> a float32 scalar; NaN if no
        target counts.

        Other dtypes than float32 are computed by torch.

        Raises:
            ValueError: a target that is not a row of the weight.
        """
        if x.dtype != torch.float32 or weight.dtype != torch.float32:
            return linear_cross_entropy_torch.linear_cross_entropy(x, weight, target, ignore_index)
        loss: Tensor = _Fused.apply(self._native, x, weight, target, ignore_index)
        return loss


class _Fused(torch.autograd.Function):
    """Computes the gradients along with the loss, and scales them by the upstream gradient afterwards."""

    @staticmethod
    def forward(ctx: Any, native: Kernels, x: Tensor, weight: Tensor, target: Tensor, ignore_index: int) -> Tensor:
        wants_x, wants_weight = ctx.needs_input_grad[1], ctx.needs_input_grad[2]
        used = (target != ignore_index).nonzero()[:, 0]
        hidden, labels = (x, target) if len(used) == len(target) else (x[used], target[used])
        if len(used) and (int(labels.min()) < 0 or int(labels.max()) >= weight.shape[0]):
            raise ValueError(f"targets must be {ignore_index} or in 0..{weight.shape[0] - 1}")
        parts = max(1, -(-len(used) * weight.shape[0] // LOSS_ELEMENTS))
        rows = max(1, -(-len(used) // parts))  # parts of one size: a small last one would be slow
        total = torch.zeros((), dtype=torch.float64)
        dx = torch.empty_like(hidden) if wants_x else None
        dw = torch.zeros_like(weight) if wants_weight else None
        for begin in range(0, len(used), rows):
            part = hidden[begin : begin + rows]
            logits = native.products([(part, weight.mT, 1.0)])
            total += native.cross_entropy(logits, labels[begin : begin + rows], 1 / len(used)).double().sum()
            if dx is not None:
                dx[begin : begin + rows] = native.products([(logits, weight, 1.0)])
            if dw is not None:
                dw.addmm_(logits.mT, part)
            del logits  # before the next ones are made
        if dx is not None and len(used) < len(target):
            dx = torch.zeros_like(x).index_copy_(0, used, dx)
        ctx.save_for_backward(dx, dw)
        return (total / len(used)).float()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        dx, dw = (None if kept is None else kept * upstream for kept in ctx.saved_tensors)
        return None, dx, dw, None, None
