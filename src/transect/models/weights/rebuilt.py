"""The product with a frozen matrix that is rebuilt from its codes for each use: ``Int4`` and ``NF4``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .weight import Weight


class _Product(torch.autograd.Function):
    """``x W^T`` with the gradient of x alone; W exists only during each pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight) -> Tensor:
        ctx.weight = weight
        return x @ weight.dense().mT

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return upstream[0] @ ctx.weight.dense(), None


def rebuilt_product(x_TI: Tensor, weight: Weight) -> Tensor:
    """Compute ``x W^T + b`` ``[T, O]`` with ``W = weight.dense()``, which is rebuilt in each pass."""
    out: Tensor = _Product.apply(x_TI, weight)
    return out if weight.bias is None else out + weight.bias
