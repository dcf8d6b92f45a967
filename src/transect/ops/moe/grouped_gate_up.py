r"""The first half of the experts of a mixture: gate and up of each row's expert, and the gate, in one launch.

    y_r = silu(V_e(r) x_s(r)) * (W_e(r) x_s(r))             rows, experts and order as in ``grouped_linear.py``

Each row is read once for both products. What they give is written for training alone, where the backward pass needs it:
with g = dL/dy, a and b the products of gate and up,

    da = g b silu'(a)        db = g silu(a)        dL/dx = V^T da + W^T db, one product, added up over a token's rows
    dL/dV, dL/dW             as in ``grouped_linear.py``

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

from ...costs.work import Cost, touched
from ...hardware.targets import BULK_TARGETS, PLAIN_TARGETS
from ..activation import swiglu
from ..lang.jit import TRITON_TARGETS, available_from, runs_triton
from ..numerics import compute_dtype, sample
from ..registry import Case, Implementation, Kernel, Op, in_torch, register
from . import grouped_linear
from .ordering import draw
from .ordering import reference as order_of


def reference(x: Tensor, gate: Tensor, up: Tensor, starts: Tensor, order: Tensor | None = None) -> Tensor:
    """Compute ``-> [R, O]`` one expert at a time; shapes as above."""
    wide = compute_dtype(x.dtype)
    g, u = (grouped_linear.reference(x.to(wide), weight.to(wide), starts, order) for weight in (gate, up))
    return (g * g.sigmoid() * u).to(x.dtype)


def by_grouped_linear(x: Tensor, gate: Tensor, up: Tensor, starts: Tensor, order: Tensor | None = None) -> Tensor:
    """Compute ``reference`` by two products, rounded to x's dtype before the gate."""
    products = (grouped_linear.reference(x, weight, starts, order) for weight in (gate, up))
    return swiglu.by_exp(*products)


def by_fixed_rows(x: Tensor, gate: Tensor, up: Tensor, starts: Tensor, order: Tensor | None = None) -> Tensor:
    """Compute ``by_grouped_linear``, where a row's result does not depend on the other rows."""
    products = (grouped_linear.by_fixed_rows(x, weight, starts, order) for weight in (gate, up))
    return swiglu.by_exp(*products)


@torch.library.custom_op("transect::grouped_gate_up", mutates_args=())
def gate_up(
    x: Tensor, gate: Tensor, up: Tensor, starts: Tensor, order: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (result, gate's products, up's products) for autograd and ``torch.compile``: by the Triton kernel where it
    can run, else by torch."""
    if runs_triton(x, gate, up):
        from .triton import gate_up_and_sums

        return gate_up_and_sums(x, gate, up, starts, order)
    a, b = (grouped_linear.reference(x, weight, starts, order) for weight in (gate, up))
    return swiglu.by_exp(a, b), a, b


@torch.library.custom_op("transect::grouped_gate_up_backward", mutates_args=())
def gate_up_backward(
    grad: Tensor, x: Tensor, gate: Tensor, up: Tensor, starts: Tensor, order: Tensor | None, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (dL/dx, dL/dgate, dL/dup); a, b: the results of the two products."""
    da, db = swiglu.swiglu_backward(grad, a, b)
    if runs_triton(grad, x, gate, up):
        from .triton import triton_input_gradient, triton_weight_gradient

        rows = triton_input_gradient(da, gate, starts, db, up)
        dx = grouped_linear.to_tokens(rows, order, x)
        dgate, _ = triton_weight_gradient(da, x, starts, order, gate, False)
        return dx, dgate, triton_weight_gradient(db, x, starts, order, up, False)[0]
    first, second = (
        grouped_linear.grouped_linear_backward(d, x, w, starts, order, False) for d, w in ((da, gate), (db, up))
    )
    return first[0] + second[0], first[1], second[1]


@gate_up.register_fake
def _(
    x: Tensor, gate: Tensor, up: Tensor, starts: Tensor, order: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.shape[0] if order is None else order.shape[0]
    y, a, b = (x.new_empty(rows, gate.shape[0] // (starts.shape[0] - 1)) for _ in range(3))
    return y, a, b


@gate_up_backward.register_fake
def _(
    grad: Tensor, x: Tensor, gate: Tensor, up: Tensor, starts: Tensor, order: Tensor | None, a: Tensor, b: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), gate.new_empty(gate.shape), up.new_empty(up.shape)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.save_for_backward(*inputs, *output[1:])
    ctx.mark_non_differentiable(*output[1:])


def _backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Any, ...]:
    dx, dgate, dup = gate_up_backward(grad.contiguous(), *ctx.saved_tensors)
    return dx, dgate, dup, None, None


gate_up.register_autograd(_backward, setup_context=_setup)


def with_gradient(x: Tensor, gate: Tensor, up: Tensor, starts: Tensor, order: Tensor | None = None) -> Tensor:
    """Compute gate and up with a gradient, for training."""
    y: Tensor = gate_up(x, gate, up, starts, order)[0]
    return y


def cost(x: Tensor, gate: Tensor, up: Tensor, starts: Tensor, order: Tensor | None = None) -> Cost:
    """Count two products and sums for each row and weight of its expert, five FLOPs for the gate; the matrices that
    random routing reads."""
    experts = len(starts) - 1
    rows, outputs = len(x) if order is None else len(order), len(gate) // experts
    read = x.nbytes + touched(rows, 1, experts) / experts * (gate.nbytes + up.nbytes) + starts.nbytes
    read += 0 if order is None else order.nbytes
    return Cost(rows * outputs * (4 * gate.shape[1] + 5), read, rows * outputs * x.element_size())


def _gradient_cost(x: Tensor, gate: Tensor, up: Tensor, starts: Tensor, order: Tensor | None = None) -> Cost:
    forward = cost(x, gate, up, starts, order)
    return Cost(2 * forward.flops, forward.bytes + x.nbytes, x.nbytes + gate.nbytes + up.nbytes)


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
    types |= dict.fromkeys(("gates", "ups"), "*bf16") | dict.fromkeys(("N", "K", "E", "k_choices"), "i32")
    few = {"ORDERED": True, "SAVE": False, "WIDTH": 128, "BM": 16, "BN": 32, "BK": 128}
    many = {"ORDERED": True, "SAVE": True, "WIDTH": 128, "BM": 128, "BN": 128, "BK": 64}
    sizes = ("N", "K")
    from .triton import _grouped_gate_up

    return [
        Kernel("few rows", _grouped_gate_up, types, few, sizes),
        Kernel("many rows", _grouped_gate_up, types, many, sizes, 8, targets=BULK_TARGETS),
        Kernel("many rows, portable", _grouped_gate_up, types, many | {"BM": 64}, sizes, 8, targets=PLAIN_TARGETS),
    ]


register(
    Op(
        name="grouped_gate_up",
        reference=reference,
        cost=cost,
        implementations={
            "torch": in_torch(by_grouped_linear),
            "torch_fixed_rows": in_torch(by_fixed_rows, batch_invariant=True),
            "triton": Implementation(
                "triton",
                available_from(grouped_linear.KERNELS, "triton_grouped_gate_up"),
                TRITON_TARGETS,
                autograd=lambda: with_gradient,
            ),
            "triton_fixed_rows": Implementation(
                "triton",
                available_from(grouped_linear.KERNELS, "triton_fixed_grouped_gate_up"),
                TRITON_TARGETS,
                batch_invariant=True,
            ),
        },
        examples=_examples,
        peers={"torch": by_grouped_linear},
        differentiable=("x", "gate", "up"),
        gradient_cost=_gradient_cost,
        cases=_cases,
        kernels=_kernels,
        error_ratio=4.0,
        error_note="float32 is summed along K one product after another, which a library does in parts",
    )
)
