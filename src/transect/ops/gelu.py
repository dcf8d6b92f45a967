r"""GELU: an element times the probability that a standard normal variable lies below it.

    y = x * P(x)        P(x) = (1 + erf(x / sqrt 2)) / 2
    tanh form:          P(x) = (1 + tanh(u)) / 2,   u = sqrt(2 / pi) * (x + 0.044715 x^3)

Backward:

    dy/dx = P(x) + x * exp(-x^2 / 2) / sqrt(2 pi)
    tanh form:  dy/dx = P(x) + x / 2 * (1 - tanh(u)^2) * sqrt(2 / pi) * (1 + 3 * 0.044715 x^2)

Shapes: x and the result ``[..., F]``. float32 inside for half inputs, rounded once at the end.
Source: Hendrycks & Gimpel 2016, arXiv:1606.08415. GPT-2 uses the tanh form.

Bound by bytes: about 10 FLOPs an element against one read and one write, so 10 / (2 * 2) = 2.5 FLOPs per byte in
bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .numerics import compute_dtype, sample
from .registry import Cost, Implementation, Op, register


def reference(x: Tensor, tanh: bool) -> Tensor:
    """x ``[..., F]`` -> ``[..., F]`` in x's dtype; ``tanh`` picks the tanh form."""
    wide = x.to(compute_dtype(x.dtype))
    if tanh:
        p = 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
    else:
        p = 0.5 * (1 + torch.erf(wide / math.sqrt(2)))
    return (wide * p).to(x.dtype)


def cost(x: Tensor, tanh: bool) -> Cost:
    """10 FLOPs an element, tanh and erf counted as one each."""
    return Cost(10 * x.numel(), x.nbytes, x.nbytes)


def _examples() -> Sequence[dict[str, Any]]:
    shapes = ((1, 3072), (7, 33), (3, 5, 1))
    return [{"x": 3 * sample(*shape), "tanh": tanh} for shape in shapes for tanh in (False, True)]


def _peer(x: Tensor, tanh: bool) -> Tensor:
    return F.gelu(x, approximate="tanh" if tanh else "none")


register(
    Op(
        name="gelu",
        reference=reference,
        cost=cost,
        implementations={"torch": Implementation("torch", lambda: reference, ("any",), batch_invariant=True)},
        examples=_examples,
        peers={"torch": _peer},
        differentiable=("x",),
    )
)
