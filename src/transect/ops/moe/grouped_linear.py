r"""Grouped linear: a matrix product in which each row is multiplied by the matrix of its expert.

    y_r = W_e(r) x_s(r) + b_e(r)                e(r): the expert whose rows, from starts[e] on, hold r

Rows are sorted by expert (``ordering.py``). With ``order``, x holds the tokens and row r reads token ``order[r] // k``,
so that nothing is copied first; without, x holds the sorted rows themselves. The matrices are concatenated along rows.
Rows from starts[E] on belong to no expert, and their outputs are undefined; their dL/dx is 0.

Backward, with g = dL/dy:

    dL/dW_e = sum over rows of e of g_r x_s(r)^T      dL/db_e = sum over rows of e of g_r
    dL/dx   = W_e(r)^T g_r, added up over the rows that read a token

Shapes: x ``[R, I]`` or ``[T, I]``, weight ``[E O, I]``, starts ``[E + 1]`` int32, order ``[R]`` int32, bias ``[E O]``,
result ``[R, O]``, where k = R / T.
Source: Gale et al. 2022, arXiv:2211.15841 (no row is dropped, none is padded in memory).

Bound by the bytes of the experts that are touched, for few rows: with T tokens and k of E experts that are about
E (1 - (1 - k / E)^T) matrices. ``cost`` counts as many as random routing touches; for a step whose routing is known,
``touched`` says how many. From some hundred rows an expert on it is bound by arithmetic.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...costs.work import Cost, touched
from ...hardware.targets import BULK_TARGETS, PLAIN_TARGETS
from ..lang.jit import TRITON_TARGETS, available_from, runs_triton
from ..linear.linear import fixed_rows
from ..numerics import sample
from ..registry import Case, Implementation, Kernel, Op, in_torch, register
from .ordering import draw
from .ordering import reference as order_of

KERNELS = f"{__package__}.triton"


def reference(
    x: Tensor, weight: Tensor, starts: Tensor, order: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Compute ``-> [R, O]`` one expert at a time; shapes as above."""
    return _by_expert(F.linear, x, weight, starts, order, bias)


def by_fixed_rows(
    x: Tensor, weight: Tensor, starts: Tensor, order: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Compute ``reference``, where a row's result does not depend on the other rows; see ``linear.fixed_rows``."""
    return _by_expert(fixed_rows, x, weight, starts, order, bias)


def _by_expert(
    product: Any, x: Tensor, weight: Tensor, starts: Tensor, order: Tensor | None, bias: Tensor | None
) -> Tensor:
    experts = len(starts) - 1
    rows = x if order is None else x[order.long() // max(1, len(order) // max(1, len(x)))]
    weights = weight.unflatten(0, (experts, -1))
    biases = None if bias is None else bias.unflatten(0, (experts, -1))
    # Experts without rows take part too, so that they get a gradient of zeros.
    out = [
        product(rows[first:end], weights[e], None if biases is None else biases[e])
        for e, (first, end) in enumerate(pairwise(starts.tolist()))
        if end > first or weight.requires_grad
    ]
    nobodys = len(rows) - int(starts[-1])
    if nobodys or not out:
        out.append(rows.new_zeros(nobodys, weights.shape[1]))
    return torch.cat(out)


@torch.library.custom_op("transect::grouped_linear", mutates_args=())
def grouped_linear(
    x: Tensor, weight: Tensor, starts: Tensor, order: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Compute the operator for autograd and ``torch.compile``: by the Triton kernel where it can run, else by the
    reference."""
    call = reference
    if runs_triton(x, weight):
        from .triton import triton_grouped_linear as call
    return call(x, weight, starts, order, bias).contiguous()


@torch.library.custom_op("transect::grouped_linear_backward", mutates_args=())
def grouped_linear_backward(
    grad: Tensor, x: Tensor, weight: Tensor, starts: Tensor, order: Tensor | None, biased: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (dL/dx, dL/dweight, dL/dbias); dL/dbias is empty without a bias."""
    db: Tensor | None
    if runs_triton(grad, x, weight):
        from .triton import triton_input_gradient, triton_weight_gradient

        rows = triton_input_gradient(grad, weight, starts)
        dw, db = triton_weight_gradient(grad, x, starts, order, weight, biased)
    else:
        rows, dw, db = _backward_by_expert(grad, x, weight, starts, order, biased)
    return to_tokens(rows, order, x), dw, grad.new_empty(0) if db is None else db


def _backward_by_expert(
    grad: Tensor, x: Tensor, weight: Tensor, starts: Tensor, order: Tensor | None, biased: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    experts = len(starts) - 1
    source = x if order is None else x[order.long() // max(1, len(order) // max(1, len(x)))]
    rows, dw = grad.new_zeros(len(grad), weight.shape[1]), torch.empty_like(weight)
    each = weight.shape[0] // experts
    db = weight.new_empty(len(weight)) if biased else None
    for e, (first, end) in enumerate(pairwise(starts.tolist())):
        own, g = slice(e * each, (e + 1) * each), grad[first:end]
        torch.mm(g, weight[own], out=rows[first:end])
        torch.mm(g.T, source[first:end], out=dw[own])
        if db is not None:
            db[own] = g.sum(0)
    return rows, dw, db


def to_tokens(rows: Tensor, order: Tensor | None, x: Tensor) -> Tensor:
    """Return the gradients of a token's k rows, summed in the order of its choices; ``x``: the source of the rows."""
    if order is None or not len(x):
        return rows if order is None else torch.zeros_like(x)
    places = torch.empty_like(order, dtype=torch.int64)
    places.scatter_(0, order.long(), torch.arange(len(order), device=order.device))
    if runs_triton(rows):
        from .combining import triton_combine

        return triton_combine(rows, places.int(), torch.ones(len(x), len(order) // len(x), device=x.device))
    return rows[places].unflatten(0, (len(x), -1)).sum(1)


@grouped_linear.register_fake
def _(x: Tensor, weight: Tensor, starts: Tensor, order: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return x.new_empty(x.shape[0] if order is None else order.shape[0], weight.shape[0] // (starts.shape[0] - 1))


@grouped_linear_backward.register_fake
def _(
    grad: Tensor, x: Tensor, weight: Tensor, starts: Tensor, order: Tensor | None, biased: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return x.new_empty(x.shape), weight.new_empty(weight.shape), weight.new_empty(weight.shape[0] if biased else 0)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, starts, order, bias = inputs
    ctx.save_for_backward(x, weight, starts, order)
    ctx.biased = bias is not None


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    dx, dw, db = grouped_linear_backward(grad.contiguous(), *ctx.saved_tensors, ctx.biased)
    return dx, dw, None, None, db if ctx.biased else None


grouped_linear.register_autograd(_backward, setup_context=_setup)


def cost(x: Tensor, weight: Tensor, starts: Tensor, order: Tensor | None = None, bias: Tensor | None = None) -> Cost:
    """Count a product and a sum for each row and weight of its expert; the matrices that random routing touches."""
    experts = len(starts) - 1
    rows, outputs = len(x) if order is None else len(order), len(weight) // experts
    share = touched(rows, 1, experts) / experts
    read = x.nbytes + share * (weight.nbytes + (0 if bias is None else bias.nbytes)) + starts.nbytes
    read += 0 if order is None else order.nbytes
    flops = rows * outputs * (2 * weight.shape[1] + (bias is not None))
    return Cost(flops, read, rows * outputs * x.element_size())


def _gradient_cost(
    x: Tensor, weight: Tensor, starts: Tensor, order: Tensor | None = None, bias: Tensor | None = None
) -> Cost:
    forward = cost(x, weight, starts, order, bias)
    return Cost(2 * forward.flops, forward.bytes + x.nbytes, x.nbytes + weight.nbytes)


def _inputs(
    tokens: int, k: int, experts: int, inputs: int, outputs: int, ordered: bool, biased: bool
) -> dict[str, Any]:
    order, _, starts = order_of(draw(tokens, k, experts), experts)
    return {
        "x": sample(tokens if ordered else tokens * k, inputs),
        "weight": sample(experts * outputs, inputs, seed=1),
        "starts": starts,
        "order": order if ordered else None,
        "bias": sample(experts * outputs, seed=2) if biased else None,
    }


def _examples() -> Sequence[dict[str, Any]]:
    return [
        _inputs(9, 2, 5, 48, 20, ordered=True, biased=False),
        _inputs(7, 3, 4, 33, 17, ordered=False, biased=True),
        _inputs(1, 2, 12, 16, 5, ordered=True, biased=True),
    ]


def _cases() -> Sequence[Case]:
    def case(tokens: int) -> Case:
        def make(device: torch.device, seed: int) -> Mapping[str, Any]:
            generator = torch.Generator(device).manual_seed(seed)
            options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "generator": generator}
            order, _, starts = order_of(draw(tokens, 8, 128, seed, device), 128)
            weight = 0.02 * torch.randn(128 * 768, 2048, **options)
            x = torch.randn(tokens, 2048, **options)
            return {"x": x, "weight": weight, "starts": starts, "order": order, "bias": None}

        return Case(f"gate of qwen3-30b-a3b, {tokens} tokens", make, directions=("forward",) if tokens < 1024 else ())

    return [case(tokens) for tokens in (1, 16, 64, 256, 8192)]


def _kernels() -> Sequence[Kernel]:
    product = dict.fromkeys(("x", "weight", "bias"), "*bf16") | {"starts": "*i32", "order": "*i32", "out": "*bf16"}
    product |= dict.fromkeys(("x2", "weight2"), "*bf16") | dict.fromkeys(("N", "K", "E", "k_choices", "R"), "i32")
    few = {"TRANSPOSED": False, "ORDERED": True, "BIAS": False, "TWO": False, "ZEROS": False, "WIDTH": 128}
    few |= {"BM": 16, "BN": 64, "BK": 128}
    many = {"TRANSPOSED": True, "ORDERED": False, "BIAS": True, "TWO": True, "ZEROS": True, "WIDTH": 128}
    many |= {"BM": 128, "BN": 128, "BK": 64}
    back = dict.fromkeys(("g", "x"), "*bf16") | dict.fromkeys(("starts", "order"), "*i32")
    back |= dict.fromkeys(("dw", "db"), "*bf16") | dict.fromkeys(("O", "I", "k_choices"), "i32")
    gradient = {"ORDERED": True, "BIAS": True, "BO": 128, "BI": 128, "BR": 64}
    sizes = ("N", "K")
    from .triton import _grouped_product, _weight_gradient

    return [
        Kernel("few rows", _grouped_product, product, few, sizes),
        Kernel("many rows", _grouped_product, product, many, sizes, 8, targets=BULK_TARGETS),
        Kernel("many rows, portable", _grouped_product, product, many | {"BK": 32}, sizes, 8, targets=PLAIN_TARGETS),
        Kernel("gradient of the weights", _weight_gradient, back, gradient, ("O", "I"), 8),
    ]


register(
    Op(
        name="grouped_linear",
        reference=reference,
        cost=cost,
        implementations={
            "torch": in_torch(reference),
            "torch_fixed_rows": in_torch(by_fixed_rows, batch_invariant=True),
            "triton": Implementation(
                "triton",
                available_from(KERNELS, "triton_grouped_linear"),
                TRITON_TARGETS,
                autograd=lambda: grouped_linear,
            ),
            "triton_fixed_rows": Implementation(
                "triton", available_from(KERNELS, "triton_fixed_grouped_linear"), TRITON_TARGETS, batch_invariant=True
            ),
        },
        examples=_examples,
        peers={"torch": reference},
        differentiable=("x", "weight", "bias"),
        gradient_cost=_gradient_cost,
        cases=_cases,
        kernels=_kernels,
        error_ratio=4.0,
        error_note="float32 is summed along K one product after another, which a library does in parts",
    )
)
