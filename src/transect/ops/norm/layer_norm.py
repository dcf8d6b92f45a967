r"""LayerNorm: shift a vector to mean 0 and variance 1, then scale and shift each element.

    m = mean(x)     r = (mean((x - m)^2) + eps)^(-1/2)     x' = (x - m) * r     y = x' * w + b

Backward, with g = dL/dy * w:

    dL/dx = r * (g - mean(g) - x' * mean(g * x'))
    dL/dw = sum over rows of dL/dy * x'        dL/db = sum over rows of dL/dy

Shapes: x ``[..., D]``, weight and bias ``[D]``, result like x. float32 inside for half inputs, rounded once at the end.
Source: Ba, Kiros & Hinton 2016, arXiv:1607.06450.

Bound by bytes: about 7 FLOPs an element against one read and one write, so 7 / (2 * 2), under 2 FLOPs per byte in
bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...costs.work import Cost
from ..lang.jit import in_triton, kernel, runs_triton, tl
from ..lang.tiles import after_previous, let_next_begin, wait_for_previous
from ..numerics import compute_dtype, sample
from ..peers import compiled
from ..registry import Op, in_torch, register
from ..tuning import Config
from . import norms
from .norms import launch_backward, launch_forward


def reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Normalize x ``[..., D]``, weight and bias ``[D]`` -> ``[..., D]`` in x's dtype."""
    wide = x.to(compute_dtype(x.dtype))
    centred = wide - wide.mean(-1, keepdim=True)
    r = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (centred * r * weight.to(wide.dtype) + bias.to(wide.dtype)).to(x.dtype)


@kernel
def forward_kernel(
    x_ptr, residual_ptr, w_ptr, b_ptr, y_ptr, sum_ptr, n_rows, n_cols, x_stride, r_stride, y_stride, eps,
    ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Normalize ROWS whole rows a program: one read, one write. Arguments are those of ``rms_norm.forward_kernel``,
    because they share a launcher; ADD is not supported here, so there is no residual and no sum."""
    after_previous(DEPENDENT_LAUNCH)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row < n_rows) & (col < n_cols)
    x = tl.load(x_ptr + row * x_stride + col, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + col, mask=col < n_cols, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + col, mask=col < n_cols, other=0.0).to(tl.float32)
    mean = tl.sum(x, 1) / n_cols
    x = tl.where(inside, x - mean[:, None], 0.0)
    r = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / n_cols + eps)
    y = x * r[:, None] * w + b
    tl.store(y_ptr + row * y_stride + col, y.to(y_ptr.dtype.element_ty), mask=inside)


@kernel
def backward_kernel(
    g_ptr, x_ptr, up_ptr, w_ptr, dx_ptr, dw_ptr, db_ptr, n_rows, n_cols, g_stride, x_stride, up_stride, dx_stride,
    eps,
    ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Process the tiles p, p + P, ... of ROWS rows each in program p: write their dL/dx and accumulate dL/dw and dL/db
    in registers.

    The loads of the next STAGES - 1 tiles are on their way to shared memory while a tile is worked on. The sums of a
    row are taken in two rounds: those of x and g, then those of the centred x. There is no ADD here, and so no up.
    """
    wait_for_previous(DEPENDENT_LAUNCH)
    col = tl.arange(0, BLOCK)[None, :]
    used = col < n_cols
    w = tl.load(w_ptr + col, mask=used, other=0.0)
    dw = tl.zeros([1, BLOCK], tl.float32)
    db = tl.zeros([1, BLOCK], tl.float32)
    for tile in tl.range(tl.program_id(0).to(tl.int64), tl.cdiv(n_rows, ROWS), tl.num_programs(0), num_stages=STAGES):
        row = tile * ROWS + tl.arange(0, ROWS)[:, None]
        inside = (row < n_rows) & used
        x = tl.load(x_ptr + row * x_stride + col, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + row * g_stride + col, mask=inside, other=0.0).to(tl.float32)
        gw = g * w.to(tl.float32)
        mean, mean_gw = tl.sum(x, 1, keep_dims=True) / n_cols, tl.sum(gw, 1, keep_dims=True) / n_cols
        x = tl.where(inside, x - mean, 0.0)
        square, dot = tl.sum(x * x, 1, keep_dims=True), tl.sum(gw * x, 1, keep_dims=True)
        r = 1.0 / tl.sqrt_rn(square / n_cols + eps)
        x = tl.where(inside, x * r, 0.0)  # past the last row r may be infinite
        dw += tl.sum(g * x, 0, keep_dims=True)
        db += tl.sum(g, 0, keep_dims=True)
        dx = r * (gw - mean_gw - x * (r * dot / n_cols))
        tl.store(dx_ptr + row * dx_stride + col, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    let_next_begin(DEPENDENT_LAUNCH)
    tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * n_cols + col, dw, mask=used)
    tl.store(db_ptr + tl.program_id(0).to(tl.int64) * n_cols + col, db, mask=used)


def triton_layer_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *,
    dependent_launch: bool = False,
    own_tuning: bool = True,
    config: Config | None = None,
) -> Tensor:
    """Compute ``reference`` in Triton. Any strides; a copy is made only if the elements of a row are not contiguous.

    ``dependent_launch``: begin while the kernel before still runs (dependent launch, Hopper). ``own_tuning``: see
    ``tuning.choices``. ValueError past ``norms.MAX_WIDTH``.
    """
    return launch_forward(
        "layer_norm",
        forward_kernel,
        x,
        None,
        (weight, bias),
        eps,
        dependent_launch=dependent_launch,
        own_tuning=own_tuning,
        config=config,
    )[0]


def triton_backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, *, config: Config | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute (dL/dx, dL/dw, dL/db) in Triton."""
    dx, dw, db = launch_backward(
        "layer_norm.backward", backward_kernel, grad, x, None, weight, eps, vectors=2, tiles=True, config=config
    )
    return dx, dw, db


@torch.library.custom_op("transect::layer_norm", mutates_args=())
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """Run the operator for autograd and ``torch.compile``: the Triton kernel where it can run, else the
    reference."""
    return (
        triton_layer_norm(x, weight, bias, eps)
        if runs_triton(x, weight)
        else reference(x, weight, bias, eps).contiguous()
    )


@torch.library.custom_op("transect::layer_norm_backward", mutates_args=())
def layer_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the operator's gradients, (dL/dx, dL/dw, dL/db)."""
    if runs_triton(grad, x, weight):
        return triton_backward(grad, x, weight, eps)
    return reference_backward(grad, x, weight, eps)


def reference_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the formulas above."""
    dtype = compute_dtype(x.dtype)
    width = x.shape[-1]
    wide, dy = x.to(dtype).reshape(-1, width), grad.to(dtype).reshape(-1, width)
    wide = wide - wide.mean(-1, keepdim=True)
    r = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    hat, g = wide * r, dy * weight.to(dtype)
    dx = r * (g - g.mean(-1, keepdim=True) - hat * (g * hat).mean(-1, keepdim=True))
    dw = (dy * hat).sum(0).to(weight.dtype)
    return dx.reshape(x.shape).to(x.dtype), dw, dy.sum(0).to(weight.dtype)


@layer_norm.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return torch.empty(x.shape, device=x.device, dtype=x.dtype)


@layer_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    dw = torch.empty(weight.shape, device=x.device, dtype=weight.dtype)
    return dx, dw, torch.empty_like(dw)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.eps = inputs[-1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return *layer_norm_backward(grad, *ctx.saved_tensors, ctx.eps), None


layer_norm.register_autograd(_backward, setup_context=_setup)


def cost(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Cost:
    """Count 7 FLOPs an element: sum, subtract, square, sum, times r, times weight, plus bias."""
    return Cost(7 * x.numel(), x.nbytes + weight.nbytes + bias.nbytes, x.nbytes)


def _examples() -> Sequence[dict[str, Any]]:
    return [
        {"x": sample(1, 768), "weight": sample(768, seed=1), "bias": sample(768, seed=2), "eps": 1e-5},
        {"x": 3 + sample(7, 33), "weight": sample(33, seed=1), "bias": sample(33, seed=2), "eps": 1e-5},
        {"x": sample(3, 5, 2), "weight": sample(2, seed=1), "bias": sample(2, seed=2), "eps": 1e-3},
        {"x": sample(0, 8), "weight": sample(8, seed=1), "bias": sample(8, seed=2), "eps": 1e-5},
        {
            "x": torch.cat((sample(1, 16) * 1e3, torch.full((1, 16), 4.0))),
            "weight": sample(16, seed=1),
            "bias": sample(16, seed=2),
            "eps": 1e-5,
        },
    ]


def _peer(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


def _gradient_cost(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Cost:
    return Cost(10 * x.numel(), 2 * x.nbytes + weight.nbytes, x.nbytes + 2 * weight.nbytes)


register(
    Op(
        name="layer_norm",
        reference=reference,
        cost=cost,
        implementations={
            "torch": in_torch(reference, batch_invariant=True),
            "triton": in_triton(triton_layer_norm, batch_invariant=True, autograd=layer_norm),
        },
        examples=_examples,
        peers={"torch": _peer, "torch.compile": compiled(_peer)},
        differentiable=("x", "weight", "bias"),
        gradient_cost=_gradient_cost,
        cases=partial(norms.cases, vectors=2, add=False),
        kernels=partial(norms.kernels, forward_kernel, backward_kernel, vectors=2, add=False, tiles=True),
        knobs=lambda: norms.knobs("layer_norm", triton_layer_norm, triton_backward, tiles=True),
    )
)
