r"""Rotary position embedding of queries and keys, half rotation (the layout of Hugging Face checkpoints).

Each head is split into a first half a and a second half b; element i of both is one plane, turned by the angle that
``models/rope.py`` gives for the token's position:

    a' = a * cos - b * sin        b' = b * cos + a * sin

Backward is the rotation by the opposite angle (cos and sin take no gradient):

    dL/da = dL/da' * cos + dL/db' * sin        dL/db = dL/db' * cos - dL/da' * sin

Shapes: q ``[T, H, d]``, k ``[T, K, d]``, cos and sin ``[T, d/2]`` in float32 (float64 for float64 models; yarn's
attention factor is in them). Results like q and k; float32 inside for half inputs, rounded once at the end.
Source: Su et al. 2021, arXiv:2104.09864.

Bound by bytes: 3 FLOPs an element against one read and one write, so 3 / (2 * 2), under 1 FLOP per byte in bfloat16;
cos and sin are shared by all heads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .numerics import compute_dtype, sample
from .registry import Cost, Implementation, Op, register


def reference(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """q ``[T, H, d]``, k ``[T, K, d]``, cos and sin ``[T, d/2]`` -> rotated q and k."""
    return _rotate(q, cos, sin), _rotate(k, cos, sin)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    dtype = compute_dtype(x.dtype)
    a, b = x.to(dtype).chunk(2, dim=-1)
    cos, sin = cos.to(dtype).unsqueeze(1), sin.to(dtype).unsqueeze(1)  # the same for every head
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


def cost(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Cost:
    """3 FLOPs an element: two products and a sum."""
    heads = q.nbytes + k.nbytes
    return Cost(3 * (q.numel() + k.numel()), heads + cos.nbytes + sin.nbytes, heads)


def _examples() -> Sequence[dict[str, Any]]:
    examples = []
    for tokens, heads, kv_heads, size in ((1, 9, 3, 64), (7, 4, 4, 6), (5, 3, 1, 2)):
        angles = 10 * sample(tokens, size // 2, seed=2)
        q, k = sample(tokens, heads, size), sample(tokens, kv_heads, size, seed=1)
        examples.append({"q": q, "k": k, "cos": angles.cos(), "sin": angles.sin()})
    return examples


register(
    Op(
        name="rotary",
        reference=reference,
        cost=cost,
        implementations={"torch": Implementation("torch", lambda: reference, ("any",), batch_invariant=True)},
        examples=_examples,
        differentiable=("q", "k"),
    )
)
