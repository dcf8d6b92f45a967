r"""RMSNorm: divide a vector by its root mean square, then scale each element.

    r = (mean(x^2) + eps)^(-1/2)            y = x * r * w

Backward, with g = dL/dy * w and x' = x * r:

    dL/dx = r * (g - x' * mean(g * x'))     dL/dw = sum over rows of dL/dy * x'

Shapes: x ``[..., D]``, weight ``[D]``, result like x. float32 inside for half inputs, rounded once at the end.
Source: Zhang & Sennrich 2019, arXiv:1910.07467.

Bound by bytes: about 4 FLOPs an element against one read and one write, so 4 / (2 * 2) = 1 FLOP per byte in bfloat16,
two orders of magnitude below where any current device turns to being bound by arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .numerics import compute_dtype, sample
from .registry import Cost, Implementation, Op, register


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x ``[..., D]``, weight ``[D]`` -> ``[..., D]`` in x's dtype."""
    wide = x.to(compute_dtype(x.dtype))
    r = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * r * weight.to(wide.dtype)).to(x.dtype)


def cost(x: Tensor, weight: Tensor, eps: float) -> Cost:
    """4 FLOPs an element: square, add, times r, times weight."""
    return Cost(4 * x.numel(), x.nbytes + weight.nbytes, x.nbytes)


def _examples() -> Sequence[dict[str, Any]]:
    return [
        {"x": sample(1, 576), "weight": sample(576, seed=1), "eps": 1e-5},
        {"x": sample(7, 33), "weight": sample(33, seed=1), "eps": 1e-6},
        {"x": sample(3, 5, 1), "weight": sample(1, seed=1), "eps": 1e-6},
    ]


def _peer(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


register(
    Op(
        name="rms_norm",
        reference=reference,
        cost=cost,
        implementations={"torch": Implementation("torch", lambda: reference, ("any",), batch_invariant=True)},
        examples=_examples,
        peers={"torch": _peer},
        differentiable=("x", "weight"),
    )
)
