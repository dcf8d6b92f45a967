r"""LayerNorm: shift a vector to mean 0 and variance 1, then scale and shift each element.

    m = mean(x)     r = (mean((x - m)^2) + eps)^(-1/2)     x' = (x - m) * r     y = x' * w + b

Backward, with g = dL/dy * w:

    dL/dx = r * (g - mean(g) - x' * mean(g * x'))
    dL/dw = sum over rows of dL/dy * x'        dL/db = sum over rows of dL/dy

Shapes: x ``[..., D]``, weight and bias ``[D]``, result like x. float32 inside for half inputs, rounded once at the end.
Source: Ba, Kiros & Hinton 2016, arXiv:1607.06450.

Bound by bytes: about 7 FLOPs an element against one read and one write, so 7 / (2 * 2), under 2 FLOPs per byte in
bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .numerics import compute_dtype, sample
from .registry import Cost, Implementation, Op, register


def reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x ``[..., D]``, weight and bias ``[D]`` -> ``[..., D]`` in x's dtype."""
    wide = x.to(compute_dtype(x.dtype))
    centred = wide - wide.mean(-1, keepdim=True)
    r = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (centred * r * weight.to(wide.dtype) + bias.to(wide.dtype)).to(x.dtype)


def cost(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Cost:
    """7 FLOPs an element: sum, subtract, square, sum, times r, times weight, plus bias."""
    return Cost(7 * x.numel(), x.nbytes + weight.nbytes + bias.nbytes, x.nbytes)


def _examples() -> Sequence[dict[str, Any]]:
    return [
        {"x": sample(1, 768), "weight": sample(768, seed=1), "bias": sample(768, seed=2), "eps": 1e-5},
        {"x": 3 + sample(7, 33), "weight": sample(33, seed=1), "bias": sample(33, seed=2), "eps": 1e-5},
        {"x": sample(3, 5, 2), "weight": sample(2, seed=1), "bias": sample(2, seed=2), "eps": 1e-3},
    ]


def _peer(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


register(
    Op(
        name="layer_norm",
        reference=reference,
        cost=cost,
        implementations={"torch": Implementation("torch", lambda: reference, ("any",), batch_invariant=True)},
        examples=_examples,
        peers={"torch": _peer},
        differentiable=("x", "weight", "bias"),
    )
)
