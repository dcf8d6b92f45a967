r"""Norm of each head of queries and keys, then their rotation (Qwen3), in one kernel forward and one backward.

With the halves a and b of a head x of d elements, and the weight w in halves u and v:

    r = 1 / sqrt(mean(x^2) + eps)      a' = r a u        b' = r b v        then the rotation of ``rotary.py``

Backward, from the gradient of the result turned back, g, with n = r x:

    dL/dw = sum over tokens and heads of g n        dL/dx = r (g w - n mean(g w n))

Shapes: q ``[T, H, d]``, k ``[T, K, d]``, weights ``[d]``, cos and sin ``[T, d/2]``. Results like q and k; float32
inside, rounded once at the end. Source: Henry et al. 2020, arXiv:2010.04245 (norms of queries and keys).

Bound by bytes: forward reads and writes q and k once, where two norms and a rotation would three times.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...costs.work import Cost
from .. import shapes
from ..attention.paged.kv_cache_write import side_by_side
from ..lang.jit import (
    in_triton,
    kernel,
    multiprocessors,
    next_power_of_2,
    require,
    runs_triton,
    tl,
)
from ..norm.rms_norm import reference as norm
from ..numerics import sample
from ..peers import compiled
from ..registry import Case, Kernel, Op, in_torch, register
from . import rotary
from .rotary import check_shapes, joined_projection, turned

HEADS = 8
"""Heads of a tile."""
PROGRAMS = 8
"""Backward: programs for each multiprocessor; each sums the weights' gradients of its tokens."""


def reference(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Normalize and rotate q ``[T, H, d]``, k ``[T, K, d]``."""
    return rotary.reference(norm(q, q_weight, eps), norm(k, k_weight, eps), cos, sin)


@kernel
def _forward_kernel(
    q_ptr, k_ptr, wq_ptr, wk_ptr, cos_ptr, sin_ptr, q_out_ptr, k_out_ptr, q_heads, k_heads, n_planes,
    q_token, q_head, k_token, k_head, q_out_token, k_out_token, cos_token, sin_token, eps, q_groups, groups,
    HEADS: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Process HEADS heads of one token a program: the first ``q_groups`` programs of a token take queries, the others
    keys."""
    token = (tl.program_id(0) // groups).to(tl.int64)
    group = tl.program_id(0) % groups
    plane = tl.arange(0, PLANES)[None, :]
    cos_ptr += token * cos_token
    sin_ptr += token * sin_token
    if group < q_groups:
        head = group * HEADS + tl.arange(0, HEADS)[:, None]
        inside = (head < q_heads) & (plane < n_planes)
        x_ptr = q_ptr + token * q_token + head * q_head + plane
        a, b = turned(x_ptr, wq_ptr, cos_ptr, sin_ptr, plane, n_planes, inside, eps, 1.0, True)
        out = q_out_ptr + token * q_out_token + head * (2 * n_planes) + plane
        tl.store(out, a.to(q_out_ptr.dtype.element_ty), mask=inside)
        tl.store(out + n_planes, b.to(q_out_ptr.dtype.element_ty), mask=inside)
    else:
        head = (group - q_groups) * HEADS + tl.arange(0, HEADS)[:, None]
        inside = (head < k_heads) & (plane < n_planes)
        x_ptr = k_ptr + token * k_token + head * k_head + plane
        a, b = turned(x_ptr, wk_ptr, cos_ptr, sin_ptr, plane, n_planes, inside, eps, 1.0, True)
        out = k_out_ptr + token * k_out_token + head * (2 * n_planes) + plane
        tl.store(out, a.to(k_out_ptr.dtype.element_ty), mask=inside)
        tl.store(out + n_planes, b.to(k_out_ptr.dtype.element_ty), mask=inside)


@kernel
def _back(
    g_ptr, x_ptr, dx_ptr, wa, wb, cos, sin, token, heads, n_planes, plane, g_token, g_head, x_token, x_head, dx_token,
    dx_head, eps, dwa, dwb, HEADS: tl.constexpr,
):  # fmt: skip
    """Process all heads of one token: write their gradient, and return the weight's, in halves, added to the input."""
    for first in range(0, heads, HEADS):
        head = first + tl.arange(0, HEADS)[:, None]
        inside = (head < heads) & (plane < n_planes)
        at_g = g_ptr + token * g_token + head * g_head + plane
        at_x = x_ptr + token * x_token + head * x_head + plane
        up = tl.load(at_g, mask=inside, other=0.0).to(tl.float32)
        low = tl.load(at_g + n_planes, mask=inside, other=0.0).to(tl.float32)
        a = tl.load(at_x, mask=inside, other=0.0).to(tl.float32)
        b = tl.load(at_x + n_planes, mask=inside, other=0.0).to(tl.float32)
        ga = up * cos + low * sin
        gb = low * cos - up * sin
        r = 1.0 / tl.sqrt_rn(tl.sum(a * a + b * b, 1) / (2 * n_planes) + eps)
        a = a * r[:, None]
        b = b * r[:, None]
        dwa += tl.sum(ga * a, 0)
        dwb += tl.sum(gb * b, 0)
        ga = ga * wa
        gb = gb * wb
        mean = tl.sum(ga * a + gb * b, 1) / (2 * n_planes)
        at = dx_ptr + token * dx_token + head * dx_head + plane
        tl.store(at, (r[:, None] * (ga - a * mean[:, None])).to(dx_ptr.dtype.element_ty), mask=inside)
        tl.store(at + n_planes, (r[:, None] * (gb - b * mean[:, None])).to(dx_ptr.dtype.element_ty), mask=inside)
    return dwa, dwb


@kernel
def _backward_kernel(
    gq_ptr, gk_ptr, q_ptr, k_ptr, dq_ptr, dk_ptr, wq_ptr, wk_ptr, cos_ptr, sin_ptr, dw_ptr, tokens, q_heads, k_heads,
    n_planes, gq_token, gq_head, gk_token, gk_head, q_token, q_head, k_token, k_head, dq_token, dq_head, dk_token,
    dk_head, cos_token, sin_token, eps,
    HEADS: tl.constexpr, PLANES: tl.constexpr,
):  # fmt: skip
    """Process tokens p, p + P, ... in program p, and write its share of the weights' gradients to row p of ``dw`` ``[P,
    2, d]``. A head is read before its gradient is written, so the gradient may overwrite it."""
    plane = tl.arange(0, PLANES)[None, :]
    used = plane < n_planes
    qa = tl.load(wq_ptr + plane, mask=used, other=0.0).to(tl.float32)
    qb = tl.load(wq_ptr + n_planes + plane, mask=used, other=0.0).to(tl.float32)
    ka = tl.load(wk_ptr + plane, mask=used, other=0.0).to(tl.float32)
    kb = tl.load(wk_ptr + n_planes + plane, mask=used, other=0.0).to(tl.float32)
    dqa = tl.zeros([PLANES], tl.float32)
    dqb = tl.zeros([PLANES], tl.float32)
    dka = tl.zeros([PLANES], tl.float32)
    dkb = tl.zeros([PLANES], tl.float32)
    for token in range(tl.program_id(0).to(tl.int64), tokens, tl.num_programs(0)):
        cos = tl.load(cos_ptr + token * cos_token + plane, mask=used, other=0.0).to(tl.float32)
        sin = tl.load(sin_ptr + token * sin_token + plane, mask=used, other=0.0).to(tl.float32)
        dqa, dqb = _back(
            gq_ptr, q_ptr, dq_ptr, qa, qb, cos, sin, token, q_heads, n_planes, plane, gq_token, gq_head, q_token,
            q_head, dq_token, dq_head, eps, dqa, dqb, HEADS,
        )  # fmt: skip
        dka, dkb = _back(
            gk_ptr, k_ptr, dk_ptr, ka, kb, cos, sin, token, k_heads, n_planes, plane, gk_token, gk_head, k_token,
            k_head, dk_token, dk_head, eps, dka, dkb, HEADS,
        )  # fmt: skip
    column = tl.arange(0, PLANES)
    mine = dw_ptr + tl.program_id(0).to(tl.int64) * (4 * n_planes) + column
    tl.store(mine, dqa, mask=column < n_planes)
    tl.store(mine + n_planes, dqb, mask=column < n_planes)
    tl.store(mine + 2 * n_planes, dka, mask=column < n_planes)
    tl.store(mine + 3 * n_planes, dkb, mask=column < n_planes)


def _check(name: str, q: Tensor, k: Tensor, weights: Sequence[Tensor], cos: Tensor, sin: Tensor) -> None:
    require(name, q, k, *weights, cos, sin)
    check_shapes(name, q, k, cos, sin)
    if any(weight.shape != q.shape[2:] for weight in weights):
        raise ValueError(f"{name}: weights [{q.shape[2]}] are needed, not {[list(w.shape) for w in weights]}")


def triton_norm_rotary(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Compute ``reference`` in one launch. Any token and head strides; the results are contiguous. ValueError if the
    shapes do not fit each other."""
    _check("norm_rotary", q, k, (q_weight, k_weight), cos, sin)
    q, k, cos, sin = side_by_side(q), side_by_side(k), side_by_side(cos), side_by_side(sin)
    q_out, k_out = (torch.empty(x.shape, device=x.device, dtype=x.dtype) for x in (q, k))
    tokens, q_heads, size = q.shape
    if q.numel() + k.numel():
        q_groups = -(-q_heads // HEADS)
        groups = q_groups - (-k.shape[1] // HEADS)
        _forward_kernel[(tokens * groups,)](
            q, k, q_weight.contiguous(), k_weight.contiguous(), cos, sin, q_out, k_out, q_heads, k.shape[1], size // 2,
            q.stride(0), q.stride(1), k.stride(0), k.stride(1), q_out.stride(0), k_out.stride(0),
            cos.stride(0), sin.stride(0), eps, q_groups, groups,
            HEADS=HEADS, PLANES=next_power_of_2(size // 2), num_warps=max(1, next_power_of_2(size) // 64),
        )  # fmt: skip
    return q_out, k_out


def triton_backward(
    q_grad: Tensor, k_grad: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor,
    sin: Tensor, *, out: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute (dL/dq, dL/dk, dL/dq_weight, dL/dk_weight) in one launch and a sum. ``out``: the tensors to write the
    first two to, with the elements of a head contiguous; it may be ``(q, k)``."""
    _check("norm_rotary.backward", q, k, (q_weight, k_weight), cos, sin)
    q_grad, k_grad, cos, sin = (side_by_side(x) for x in (q_grad, k_grad, cos, sin))
    q, k = side_by_side(q), side_by_side(k)
    dq, dk = out or (
        torch.empty(q.shape, device=q.device, dtype=q.dtype),
        torch.empty(k.shape, device=k.device, dtype=k.dtype),
    )
    tokens, q_heads, size = q.shape
    programs = min(tokens, PROGRAMS * multiprocessors(q.device))
    shares = torch.zeros((max(1, programs), 2, size), device=q.device)
    if q.numel() + k.numel():
        _backward_kernel[(programs,)](
            q_grad, k_grad, q, k, dq, dk, q_weight.contiguous(), k_weight.contiguous(), cos, sin, shares, tokens,
            q_heads, k.shape[1], size // 2, *(n for x in (q_grad, k_grad, q, k, dq, dk) for n in x.stride()[:2]),
            cos.stride(0), sin.stride(0), eps,
            HEADS=HEADS, PLANES=next_power_of_2(size // 2), num_warps=max(1, next_power_of_2(size) // 64),
        )  # fmt: skip
    return dq, dk, shares[:, 0].sum(0).to(q_weight.dtype), shares[:, 1].sum(0).to(k_weight.dtype)


@torch.library.custom_op("transect::norm_rotary", mutates_args=())
def norm_rotary(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    """Run the operator for autograd and ``torch.compile``: the Triton kernel where it can run, else the
    reference."""
    run = triton_norm_rotary if runs_triton(q, k, q_weight, k_weight, cos, sin) else reference
    return run(q, k, q_weight, k_weight, eps, cos, sin)


@torch.library.custom_op("transect::norm_rotary_backward", mutates_args=())
def norm_rotary_backward(
    q_grad: Tensor, k_grad: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the operator's gradients, (dL/dq, dL/dk, dL/dq_weight, dL/dk_weight)."""
    inputs = (q, k, q_weight, k_weight)
    if runs_triton(q_grad, k_grad, *inputs, cos, sin):
        return triton_backward(q_grad, k_grad, *inputs, eps, cos, sin)
    with torch.enable_grad():
        own = [x.detach().requires_grad_() for x in inputs]
        made = reference(own[0], own[1], own[2], own[3], eps, cos, sin)
        found = torch.autograd.grad(made, own, (q_grad, k_grad))
    return found[0], found[1], found[2], found[3]


@norm_rotary.register_fake
def _(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor]:
    return q.new_empty(q.shape), k.new_empty(k.shape)


@norm_rotary_backward.register_fake
def _(
    q_grad: Tensor, k_grad: Tensor, q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor,
    sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    return (
        q.new_empty(q.shape),
        k.new_empty(k.shape),
        q_weight.new_empty(q_weight.shape),
        k_weight.new_empty(k_weight.shape),
    )


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    q, k, q_weight, k_weight, ctx.eps, cos, sin = inputs
    ctx.save_for_backward(q, k, q_weight, k_weight, cos, sin)


def _backward(ctx: Any, q_grad: Tensor, k_grad: Tensor) -> tuple[Any, ...]:
    *inputs, cos, sin = ctx.saved_tensors
    return *norm_rotary_backward(q_grad, k_grad, *inputs, ctx.eps, cos, sin), None, None, None


norm_rotary.register_autograd(_backward, setup_context=_setup)


def cost(q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Cost:
    """Count 4 FLOPs an element for the norm and 3 for the rotation."""
    heads = q.nbytes + k.nbytes
    return Cost(7 * (q.numel() + k.numel()), heads + cos.nbytes + sin.nbytes, heads)


def _gradient_cost(
    q: Tensor, k: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float, cos: Tensor, sin: Tensor
) -> Cost:
    heads = q.nbytes + k.nbytes
    return Cost(13 * (q.numel() + k.numel()), 2 * heads + cos.nbytes + sin.nbytes, heads)


def _examples() -> Sequence[dict[str, Any]]:
    examples = []
    for tokens, heads, kv_heads, size in ((1, 9, 3, 64), (7, 4, 4, 6), (5, 3, 1, 2), (0, 2, 1, 4)):
        angles = 10 * sample(tokens, size // 2, seed=2)
        q, k = sample(tokens, heads, size), sample(tokens, kv_heads, size, seed=1)
        weights = {"q_weight": sample(size, seed=3), "k_weight": sample(size, seed=4)}
        examples.append({"q": q, "k": k, **weights, "eps": 1e-6, "cos": angles.cos(), "sin": angles.sin()})
    return examples


def _cases() -> Sequence[Case]:
    def make(device: torch.device, seed: int) -> Mapping[str, Any]:
        model = shapes.QWEN3_0_6B
        heads, angles = joined_projection(model, 8192, device, seed)
        weights = {name: torch.ones(model.head_dim, device=device).bfloat16() for name in ("q_weight", "k_weight")}
        return {"q": heads["q"], "k": heads["k"], **weights, "eps": 1e-6, **angles}

    return [Case(f"{shapes.QWEN3_0_6B.name}, 8192 tokens", make)]


def _kernels() -> Sequence[Kernel]:
    def arguments(pointers: Sequence[str], strides: Sequence[str], last: Sequence[str]) -> dict[str, str]:
        wide = {name: "*fp32" if name in ("cos_ptr", "sin_ptr", "dw_ptr") else "*bf16" for name in pointers}
        return {**wide, **dict.fromkeys(strides, "i32"), "eps": "fp32", **dict.fromkeys(last, "i32")}

    tile = {"HEADS": HEADS, "PLANES": 64}
    heads = ("q_heads", "k_heads", "n_planes")
    inputs = ("q_token", "q_head", "k_token", "k_head")
    table = ("cos_token", "sin_token")
    pointers = ("q_ptr", "k_ptr", "wq_ptr", "wk_ptr", "cos_ptr", "sin_ptr", "q_out_ptr", "k_out_ptr")
    strides = (*inputs, "q_out_token", "k_out_token", *table)
    forward = arguments(pointers, (*heads, *strides), ("q_groups", "groups"))
    gradients = ("gq_ptr", "gk_ptr", "q_ptr", "k_ptr", "dq_ptr", "dk_ptr", "wq_ptr", "wk_ptr", "cos_ptr", "sin_ptr")
    back = (*(f"{name}_{of}" for name in ("gq", "gk") for of in ("token", "head")), *inputs)
    back = (*back, *(f"{name}_{of}" for name in ("dq", "dk") for of in ("token", "head")), *table)
    backward = arguments((*gradients, "dw_ptr"), ("tokens", *heads, *back), ())
    return [
        Kernel("forward", _forward_kernel, forward, tile, ("n_planes", *strides), warps=2),
        Kernel("backward", _backward_kernel, backward, tile, ("n_planes", *back), warps=2),
    ]


register(
    Op(
        name="norm_rotary",
        reference=reference,
        cost=cost,
        implementations={
            "torch": in_torch(reference, batch_invariant=True),
            "triton": in_triton(triton_norm_rotary, batch_invariant=True, autograd=norm_rotary),
        },
        examples=_examples,
        peers={"torch": reference, "torch.compile": compiled(reference)},
        differentiable=("q", "k", "q_weight", "k_weight"),
        keeps_dtype=("cos", "sin"),
        gradient_cost=_gradient_cost,
        cases=_cases,
        kernels=_kernels,
    )
)
