"""The product with a frozen matrix that is made from its codes for each use and never kept: ``Int4`` and ``NF4``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .weight import Weight


class _Product(torch.autograd.Function):
    """``x W^T`` with the gradient of x alone; W lives only within each direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Weight) -> Tensor:
        ctx.weight = weight
        return x @ weight.dense().mT

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return upstream[0] @ ctx.weight.dense(), None


def rebuilt_product(x_TI: Tensor, weight: Weight) -> Tensor:
    """``x W^T + b`` ``[T, O]`` with ``W = weight.dense()``, which is made once in each direction."""
    out: Tensor = _Product.apply(x_TI, weight)
    return out if weight.bias is None else out + weight.bias
