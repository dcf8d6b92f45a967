r"""The weighted sum of the outputs of a token's experts, which also brings the sorted rows back to their tokens.

    out_t = sum_j w_tj y_p(t,j)                 p = places: where pair (t, j) stands among the sorted rows

Backward, with g = dL/dout:

    dL/dy_p(t,j) = w_tj g_t                     dL/dw_tj = g_t . y_p(t,j)

The kernel does not look at a row with the weight 0, which may belong to an expert that is not here.

Shapes: y ``[T k, D]`` sorted by expert, places ``[T k]`` int32, weights ``[T, k]`` float32, result ``[T, D]`` in y's
dtype. Sums in float32, in the order of a token's choices, rounded once.
Source: Shazeer et al. 2017, arXiv:1701.06538.

Bound by bytes: 2 k FLOPs an output against k reads and a write, under 1 FLOP per byte in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...costs.work import Cost
from ..lang.jit import in_triton, kernel, next_power_of_2, require, runs_triton, tl
from ..numerics import compute_dtype, sample
from ..registry import Case, Kernel, Op, in_torch, register
from .ordering import draw
from .ordering import reference as order_of

MOST_COLUMNS = 1024


def reference(y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Combine y ``[T k, D]`` -> ``[T, D]``."""
    wide = compute_dtype(y.dtype)
    tokens, k = weights.shape
    apart = y.to(wide)[places.long()].unflatten(0, (tokens, k))
    return (apart * weights.to(wide)[:, :, None]).sum(1).to(y.dtype)


@kernel
def _combine(y, places, weights, out, D, K: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute a part (axis 1) of one token's sum (axis 0)."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < D
    total = tl.zeros([BLOCK], tl.float32)
    for j in tl.static_range(K):
        place = tl.load(places + token * K + j).to(tl.int64)
        weight = tl.load(weights + token * K + j) + tl.zeros([BLOCK], tl.float32)
        total += weight * tl.load(y + place * D + column, inside & (weight != 0.0), 0.0).to(tl.float32)
    tl.store(out + token * D + column, total.to(out.dtype.element_ty), inside)


@kernel
def _combine_backward(  # type: ignore[no-untyped-def]
    g, y, places, weights, dy, dw, D, K: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute one pair: its row's gradient, and its weight's."""
    pair = tl.program_id(0).to(tl.int64)
    token = pair // K
    place = tl.load(places + pair).to(tl.int64)
    weight = tl.load(weights + pair)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < D
        grad = tl.load(g + token * D + column, inside, 0.0).to(tl.float32)
        total += grad * tl.load(y + place * D + column, inside, 0.0).to(tl.float32)
        tl.store(dy + place * D + column, (weight * grad).to(dy.dtype.element_ty), inside)
    tl.store(dw + pair, tl.sum(total, 0))


def triton_combine(y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Compute ``reference`` in Triton; can be captured in a CUDA graph."""
    require("expert_combine", y, weights)
    y, weights = y.contiguous(), weights.float().contiguous()
    tokens, k = weights.shape
    width = y.shape[1]
    out = y.new_empty(tokens, width)
    if out.numel():
        block = min(MOST_COLUMNS, next_power_of_2(width))
        _combine[(tokens, -(-width // block))](y, places, weights, out, width, K=k, BLOCK=block)
    return out


def triton_combine_backward(grad: Tensor, y: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Compute (dL/dy, dL/dweights) in Triton."""
    grad, y, weights = grad.contiguous(), y.contiguous(), weights.contiguous()
    dy, dw = torch.empty_like(y), torch.empty_like(weights)
    if y.numel():
        block = min(MOST_COLUMNS, next_power_of_2(y.shape[1]))
        k = weights.shape[1]
        _combine_backward[(len(y),)](grad, y, places, weights, dy, dw, y.shape[1], K=k, BLOCK=block)
    return dy, dw


@torch.library.custom_op("transect::expert_combine", mutates_args=())
def expert_combine(y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """Run the operator for autograd and ``torch.compile``: the Triton kernel where it can run, else the
    reference."""
    return triton_combine(y, places, weights) if runs_triton(y, weights) else reference(y, places, weights).contiguous()


@torch.library.custom_op("transect::expert_combine_backward", mutates_args=())
def expert_combine_backward(grad: Tensor, y: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the operator's gradients, (dL/dy, dL/dweights)."""
    if runs_triton(grad, y, weights):
        return triton_combine_backward(grad, y, places, weights)
    wide = compute_dtype(y.dtype)
    tokens, k = weights.shape
    g = grad.to(wide)[:, None, :].expand(tokens, k, -1)
    index = places.long()
    dw = (g * y.to(wide)[index].unflatten(0, (tokens, k))).sum(-1)
    rows = (g * weights.to(wide)[:, :, None]).flatten(0, 1).to(y.dtype)
    return torch.empty_like(y).index_copy(0, index, rows).contiguous(), dw.to(weights.dtype).contiguous()


@expert_combine.register_fake
def _(y: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    return y.new_empty(weights.shape[0], y.shape[1])


@expert_combine_backward.register_fake
def _(grad: Tensor, y: Tensor, places: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return y.new_empty(y.shape), weights.new_empty(weights.shape)


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, Tensor]:
    dy, dw = expert_combine_backward(grad, *ctx.saved_tensors)
    return dy, None, dw


expert_combine.register_autograd(_backward, setup_context=_setup)


def cost(y: Tensor, places: Tensor, weights: Tensor) -> Cost:
    """Count a product and a sum for each row's numbers."""
    out = weights.shape[0] * y.shape[1] * y.element_size()
    return Cost(2 * y.numel(), y.nbytes + places.nbytes + weights.nbytes, out)


def _inputs(tokens: int, k: int, experts: int, width: int) -> dict[str, Any]:
    places = order_of(draw(tokens, k, experts), experts)[1]
    return {"y": sample(tokens * k, width), "places": places, "weights": sample(tokens, k, seed=1).abs()}


def _examples() -> Sequence[dict[str, Any]]:
    return [_inputs(*shape) for shape in ((5, 2, 8, 96), (3, 4, 5, 33), (1, 1, 2, 7), (0, 2, 4, 8))]


def _cases() -> Sequence[Case]:
    def case(tokens: int) -> Case:
        def make(device: torch.device, seed: int) -> Mapping[str, Any]:
            generator = torch.Generator(device).manual_seed(seed)
            options: dict[str, Any] = {"device": device, "generator": generator}
            return {
                "y": torch.randn(tokens * 8, 2048, dtype=torch.bfloat16, **options),
                "places": order_of(draw(tokens, 8, 128, seed, device), 128)[1],
                "weights": torch.rand(tokens, 8, **options),
            }

        return Case(f"qwen3-30b-a3b, {tokens} tokens", make)

    return [case(tokens) for tokens in (1, 64, 8192)]


def _kernels() -> Sequence[Kernel]:
    forward = {"y": "*bf16", "places": "*i32", "weights": "*fp32", "out": "*bf16", "D": "i32"}
    backward = {"g": "*bf16", "y": "*bf16", "places": "*i32", "weights": "*fp32", "dy": "*bf16", "dw": "*fp32"}
    backward["D"] = "i32"
    shape = {"K": 8, "BLOCK": MOST_COLUMNS}
    return [
        Kernel("forward", _combine, forward, shape, ("D",)),
        Kernel("backward", _combine_backward, backward, shape, ("D",)),
    ]


register(
    Op(
        name="expert_combine",
        reference=reference,
        cost=cost,
        implementations={
            "torch": in_torch(reference, batch_invariant=True),
            "triton": in_triton(triton_combine, batch_invariant=True, autograd=expert_combine),
        },
        examples=_examples,
        peers={"torch": reference},
        differentiable=("y", "weights"),
        keeps_dtype=("weights",),
        gradient_cost=lambda y, places, weights: Cost(3 * y.numel(), 2 * y.nbytes, y.nbytes),
        cases=_cases,
        kernels=_kernels,
    )
)
