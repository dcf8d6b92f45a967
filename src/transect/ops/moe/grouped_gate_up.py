r"""The first half of the experts of a mixture: gate and up of each row's expert, and the gate, in one launch.

    y_r = silu(V_e(r) x_s(r)) * (W_e(r) x_s(r))             rows, experts and order as in ``grouped_linear.py``

Each row is read once for both products, and what they give is never written. Training computes it as two
``grouped_linear`` and ``swiglu``, whose gradients need it.

Shapes: x ``[R, I]`` or ``[T, I]``, gate and up ``[E O, I]``, starts ``[E + 1]`` int32, order ``[R]`` int32 or None,
result ``[R, O]``. float32 until the end, rounded once.
Source: Shazeer 2020, arXiv:2002.05202 (SwiGLU), over Gale et al. 2022, arXiv:2211.15841.

Bound by the bytes of the experts that are touched for few rows, by arithmetic from some hundred rows an expert on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..activation import swiglu
from ..counting import touched
from ..lang.jit import TRITON_TARGETS, available
from ..numerics import compute_dtype, sample
from ..registry import Case, Cost, Implementation, Kernel, Op, get, register
from . import grouped_linear
from .ordering import draw
from .ordering import reference as order_of
from .triton import _grouped_gate_up, triton_grouped_gate_up


def reference(x: Tensor, gate: Tensor, up: Tensor, starts: Tensor, order: Tensor | None = None) -> Tensor:
    """Shapes as above, one expert after another: ``-> [R, O]``."""
    wide = compute_dtype(x.dtype)
    g, u = (grouped_linear.reference(x.to(wide), weight.to(wide), starts, order) for weight in (gate, up))
    return (g * g.sigmoid() * u).to(x.dtype)


def by_grouped_linear(x: Tensor, gate: Tensor, up: Tensor, starts: Tensor, order: Tensor | None = None) -> Tensor:
    """``reference`` by two products, rounded to x's dtype before the gate."""
    products = (grouped_linear.reference(x, weight, starts, order) for weight in (gate, up))
    return swiglu.by_exp(*products)


def by_fixed_rows(x: Tensor, gate: Tensor, up: Tensor, starts: Tensor, order: Tensor | None = None) -> Tensor:
    """``by_grouped_linear``, where a row's result does not depend on the other rows."""
    products = (grouped_linear.by_fixed_rows(x, weight, starts, order) for weight in (gate, up))
    return swiglu.by_exp(*products)


def in_parts(x: Tensor, gate: Tensor, up: Tensor, starts: Tensor, order: Tensor | None = None) -> Tensor:
    """What training calls: operators that have gradients."""
    gated = get("swiglu").implementations["triton"].autograd
    assert gated is not None
    products = (grouped_linear.grouped_linear(x, weight, starts, order) for weight in (gate, up))
    y: Tensor = gated()(*products)
    return y


def cost(x: Tensor, gate: Tensor, up: Tensor, starts: Tensor, order: Tensor | None = None) -> Cost:
    """Two products and sums for each row and weight of its expert, five FLOPs for the gate; the matrices that random
    routing touches."""
    experts = len(starts) - 1
    rows, outputs = len(x) if order is None else len(order), len(gate) // experts
    read = x.nbytes + touched(rows, 1, experts) / experts * (gate.nbytes + up.nbytes) + starts.nbytes
    read += 0 if order is None else order.nbytes
    return Cost(rows * outputs * (4 * gate.shape[1] + 5), read, rows * outputs * x.element_size())


def _inputs(tokens: int, k: int, experts: int, inputs: int, outputs: int, ordered: bool) -> dict[str, Any]:
    order, _, starts = order_of(draw(tokens, k, experts), experts)
    return {
        "x": sample(tokens if ordered else tokens * k, inputs),
        "gate": sample(experts * outputs, inputs, seed=1),
        "up": sample(experts * outputs, inputs, seed=2),
        "starts": starts,
        "order": order if ordered else None,
    }


def _examples() -> Sequence[dict[str, Any]]:
    return [_inputs(9, 2, 5, 48, 20, ordered=True), _inputs(7, 3, 4, 33, 17, ordered=False)]


def _cases() -> Sequence[Case]:
    def case(tokens: int) -> Case:
        def make(device: torch.device, seed: int) -> Mapping[str, Any]:
            generator = torch.Generator(device).manual_seed(seed)
            options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "generator": generator}
            order, _, starts = order_of(draw(tokens, 8, 128, seed, device), 128)
            gate, up = (0.02 * torch.randn(128 * 768, 2048, **options) for _ in range(2))
            x = torch.randn(tokens, 2048, **options)
            return {"x": x, "gate": gate, "up": up, "starts": starts, "order": order}

        return Case(f"qwen3-30b-a3b, {tokens} tokens", make, directions=("forward",))

    return [case(tokens) for tokens in (1, 16, 64, 256, 8192)]


def _kernels() -> Sequence[Kernel]:
    types = dict.fromkeys(("x", "gate", "up"), "*bf16") | {"starts": "*i32", "order": "*i32", "out": "*bf16"}
    types |= dict.fromkeys(("N", "K", "E", "k_choices"), "i32")
    few = {"ORDERED": True, "WIDTH": 128, "BM": 16, "BN": 32, "BK": 128}
    many = {"ORDERED": True, "WIDTH": 128, "BM": 128, "BN": 128, "BK": 64}
    sizes = ("N", "K")
    return [
        Kernel("few rows", _grouped_gate_up, types, few, sizes),
        Kernel("many rows", _grouped_gate_up, types, many, sizes, 8),
    ]


register(
    Op(
        name="grouped_gate_up",
        reference=reference,
        cost=cost,
        implementations={
            "torch": Implementation("torch", lambda: by_grouped_linear, ("any",)),
            "torch_fixed_rows": Implementation("torch", lambda: by_fixed_rows, ("any",), batch_invariant=True),
            "triton": Implementation(
                "triton", available(triton_grouped_gate_up), TRITON_TARGETS, autograd=lambda: in_parts
            ),
        },
        examples=_examples,
        peers={"torch": by_grouped_linear},
        cases=_cases,
        kernels=_kernels,
        error_ratio=4.0,
        error_note="float32 is summed along K one product after another, which a library does in parts",
    )
)
