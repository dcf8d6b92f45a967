r"""The loss of a language model from its last hidden states, without the logits of all tokens ever existing at once.

    z_t = x_t W^T        loss = 1/n sum_t (log sum_v exp z_tv - z_t,target(t))        n: tokens not ignored

Backward, for an upstream gradient g of the loss, with p = softmax(z):

    dz_tv = g / n (p_tv - [v = target(t)])        dx = dz W        dW = dz^T x

dz costs nothing more while z is at hand, so both gradients are made in the forward pass: a chunk of tokens at a time,
z for that chunk, its loss, z overwritten by dz, then the chunk's dx and its share of dW. The backward pass multiplies
by g. Memory beside the gradients: CHUNK x V logits instead of T x V, and the products are the same three that
autograd makes.

Shapes: x ``[T, D]``, weight ``[V, D]`` of one dtype, target ``[T]`` int64 (``ignore_index`` counts for nothing), loss
a float32 scalar. Logits are rounded to x's dtype, sums over the vocabulary are float32. Shares of dW are added in
float32 and kept in the weight's dtype.

Bound by arithmetic: 6 T V D FLOPs with gradients against 2 (T + V) D elements read.
Source: chunks as in Liger (Hsu et al. 2024, arXiv:2410.10989); never holding logits: Wijmans et al. 2024,
arXiv:2411.09009.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .jit import INTERPRETED, TRITON_TARGETS, available, kernel, require, tl
from .matmul import matmul
from .numerics import compute_dtype, sample
from .registry import Cost, Implementation, Kernel, Op, register

IGNORE = -100
CHUNK = 1024
"""Tokens whose logits exist at one time."""


def reference(x: Tensor, weight: Tensor, target: Tensor, ignore_index: int = IGNORE) -> Tensor:
    """x ``[T, D]``, weight ``[V, D]``, target ``[T]`` -> mean loss (0 where every token is ignored)."""
    dtype = compute_dtype(x.dtype)
    total = F.cross_entropy(x.to(dtype) @ weight.to(dtype).T, target, ignore_index=ignore_index, reduction="sum")
    return total / (target != ignore_index).sum().clamp(min=1)


@kernel
def _loss_and_gradient(  # type: ignore[no-untyped-def]
    logits, target, loss, count, V, row_stride, ignore_index, GRADIENT: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """One row: its loss over ``count``, and in place of the logits the gradient of that."""
    row = tl.program_id(0)
    wanted = tl.load(target + row)
    z = logits + row.to(tl.int64) * row_stride
    v = tl.arange(0, BLOCK)
    real = wanted != ignore_index
    share = tl.where(real, 1.0, 0.0) / tl.maximum(tl.load(count), 1).to(tl.float32)
    peak = tl.full((BLOCK,), -float("inf"), tl.float32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, V, BLOCK):
        x = tl.load(z + start + v, start + v < V, -float("inf")).to(tl.float32)
        new = tl.maximum(peak, x)
        shift = tl.where(new == -float("inf"), 0.0, new)
        total = total * tl.exp(peak - shift) + tl.exp(x - shift)
        peak = new
    top = tl.max(peak, 0)
    mass = tl.sum(total * tl.exp(peak - top), 0)
    at_target = tl.load(z + wanted, real, 0.0).to(tl.float32)
    tl.store(loss + row, tl.where(real, (top + tl.log(mass) - at_target) * share, 0.0))
    if GRADIENT:
        tl.debug_barrier()  # the target's logit is read before it is overwritten
        for start in range(0, V, BLOCK):
            x = tl.load(z + start + v, start + v < V, 0.0).to(tl.float32)
            p = tl.exp(x - top) / mass - tl.where(start + v == wanted, 1.0, 0.0)
            tl.store(z + start + v, (p * share).to(logits.dtype.element_ty), start + v < V)


def loss_and_gradients(
    x: Tensor, weight: Tensor, target: Tensor, ignore_index: int, need: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Loss, and the gradients of x and weight for an upstream gradient of 1 (empty where not needed)."""
    require("linear_cross_entropy", x, weight)
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1] or target.shape != x.shape[:1]:
        raise ValueError(
            f"linear_cross_entropy: x [T, D], weight [V, D] and target [T] do not fit: {list(x.shape)}, "
            f"{list(weight.shape)}, {list(target.shape)}"
        )
    tokens, vocab = x.shape[0], weight.shape[0]
    losses = torch.zeros(tokens, dtype=torch.float32, device=x.device)
    dx = torch.empty(x.shape if need else 0, dtype=x.dtype, device=x.device)
    dw = torch.zeros(weight.shape if need else 0, dtype=weight.dtype, device=x.device)
    count = (target != ignore_index).sum()
    for start in range(0, tokens, CHUNK):
        part = x[start : start + CHUNK]
        logits = matmul(part, weight)
        _loss_and_gradient[(part.shape[0],)](
            logits, target[start : start + CHUNK].contiguous(), losses[start : start + CHUNK], count, vocab,
            logits.stride(0), ignore_index, GRADIENT=need, BLOCK=64 if INTERPRETED else 4096, num_warps=8,
        )  # fmt: skip
        if need:
            dx[start : start + CHUNK] = matmul(logits, weight.T)
            matmul(logits.T, part.T, residual=dw, out=dw)
        del logits
    return losses.sum(), dx, dw


def linear_cross_entropy(x: Tensor, weight: Tensor, target: Tensor, ignore_index: int = IGNORE) -> Tensor:
    """As ``reference``, logits of CHUNK tokens at a time; the loss only."""
    return loss_and_gradients(x, weight, target, ignore_index, False)[0]


@torch.library.custom_op("transect::linear_cross_entropy", mutates_args=())
def _op(
    x: Tensor, weight: Tensor, target: Tensor, ignore_index: int = IGNORE, need: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    return loss_and_gradients(x, weight, target, ignore_index, need)


@_op.register_fake
def _(
    x: Tensor, weight: Tensor, target: Tensor, ignore_index: int = IGNORE, need: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        x.new_empty((), dtype=torch.float32),
        x.new_empty(x.shape if need else (0,)),
        weight.new_empty(weight.shape if need else (0,)),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    ctx.mark_non_differentiable(output[1], output[2])
    ctx.save_for_backward(output[1], output[2])


def _backward(ctx: Any, g: Tensor, _dx: Any, _dw: Any) -> tuple[Tensor | None, ...]:
    dx, dw = ctx.saved_tensors
    return dx * g.to(dx.dtype), dw * g.to(dw.dtype), None, None, None


_op.register_autograd(_backward, setup_context=_save)


def linear_cross_entropy_autograd(x: Tensor, weight: Tensor, target: Tensor, ignore_index: int = IGNORE) -> Tensor:
    """As ``linear_cross_entropy``, with gradients, made in the forward pass."""
    need = torch.is_grad_enabled() and (x.requires_grad or weight.requires_grad)
    return _op(x, weight, target, ignore_index, need)[0]


linear_cross_entropy_autograd.operator = _op  # type: ignore[attr-defined]


# ----------------------------------------------------------------------------------------------------- registry entry


def cost(x: Tensor, weight: Tensor, target: Tensor, ignore_index: int = IGNORE) -> Cost:
    """One product; the softmax is not counted."""
    return Cost(2 * x.shape[0] * weight.numel(), x.nbytes + weight.nbytes + target.nbytes, 4)


def gradient_cost(x: Tensor, weight: Tensor, target: Tensor, ignore_index: int = IGNORE) -> Cost:
    """Two products."""
    return Cost(4 * x.shape[0] * weight.numel(), x.nbytes + weight.nbytes, x.nbytes + weight.nbytes)


def _peer(x: Tensor, weight: Tensor, target: Tensor, ignore_index: int = IGNORE) -> Tensor:
    """torch: all logits, then its cross entropy."""
    return F.cross_entropy(F.linear(x, weight), target, ignore_index=ignore_index)


def _examples() -> Sequence[dict[str, Any]]:
    def inputs(tokens: int, vocab: int, dim: int, ignored: int) -> dict[str, Any]:
        target = torch.randint(0, vocab, (tokens,), generator=torch.Generator().manual_seed(2))
        target[:ignored] = IGNORE
        return {
            "x": sample(tokens, dim), "weight": 3 * sample(vocab, dim, seed=1) / math.sqrt(dim), "target": target
        }  # fmt: skip

    return [inputs(1, 5, 3, 0), inputs(17, 130, 24, 3), inputs(33, 40, 16, 0)]


def _kernels() -> Sequence[Kernel]:
    return [
        Kernel(
            name="loss_and_gradient",
            function=_loss_and_gradient,
            arguments={
                "logits": "*bf16", "target": "*i64", "loss": "*fp32", "count": "*i64", "V": "i32", "row_stride": "i32",
                "ignore_index": "i32",
            },
            constants={"GRADIENT": True, "BLOCK": 4096},
            divisible=("V", "row_stride"),
            warps=8,
            targets=TRITON_TARGETS,
        )
    ]  # fmt: skip


register(
    Op(
        name="linear_cross_entropy",
        reference=reference,
        cost=cost,
        gradient_cost=gradient_cost,
        implementations={
            "triton": Implementation(
                "triton",
                available(linear_cross_entropy),
                TRITON_TARGETS,
                autograd=available(linear_cross_entropy_autograd),
            )
        },
        examples=_examples,
        peers={"torch": _peer},
        differentiable=("x", "weight"),
        kernels=_kernels,
    )
)
