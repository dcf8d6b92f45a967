r"""SwiGLU: the gate of a gated MLP.

    y = silu(gate) * up        silu(a) = a * s        s = 1 / (1 + exp(-a))

Backward, with g = dL/dy:

    dL/dup = g * silu(gate)        dL/dgate = g * up * s * (1 + gate * (1 - s))

Shapes: gate, up and the result ``[..., F]``. float32 inside for half inputs, rounded once at the end.
Source: Shazeer 2020, arXiv:2002.05202.

Bound by bytes: about 5 FLOPs an element against two reads and one write, so 5 / (3 * 2), under 1 FLOP per byte in
bfloat16. Worth fusing into whatever produces gate and up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .numerics import compute_dtype, sample
from .registry import Cost, Implementation, Op, register


def reference(gate: Tensor, up: Tensor) -> Tensor:
    """gate, up ``[..., F]`` -> ``[..., F]`` in gate's dtype."""
    wide = gate.to(compute_dtype(gate.dtype))
    return (wide * wide.sigmoid() * up.to(wide.dtype)).to(gate.dtype)


def by_exp(gate: Tensor, up: Tensor) -> Tensor:
    """As ``reference``, through exp: torch's sigmoid on the CPU has other last bits at the end of a tensor than inside.

    Below -80 the gate is 0 to float32 either way; the clamp keeps exp and its gradient finite.
    """
    wide = gate.to(compute_dtype(gate.dtype))
    return (wide / (1 + torch.exp(-wide.clamp(min=-80))) * up.to(wide.dtype)).to(gate.dtype)


def cost(gate: Tensor, up: Tensor) -> Cost:
    """5 FLOPs an element: exp, add, divide, and two products."""
    return Cost(5 * gate.numel(), gate.nbytes + up.nbytes, gate.nbytes)


def _examples() -> Sequence[dict[str, Any]]:
    return [{"gate": 4 * sample(*shape), "up": sample(*shape, seed=1)} for shape in ((1, 1536), (7, 33), (3, 5, 1))]


def _peer(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


register(
    Op(
        name="swiglu",
        reference=reference,
        cost=cost,
        implementations={"torch": Implementation("torch", lambda: by_exp, ("any",), batch_invariant=True)},
        examples=_examples,
        peers={"torch": _peer},
        differentiable=("gate", "up"),
    )
)
