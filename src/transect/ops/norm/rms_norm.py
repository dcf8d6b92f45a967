r"""RMSNorm: divide a vector by its root mean square, then scale each element.

    r = (mean(x^2) + eps)^(-1/2)            y = x * r * w

Backward, with g = dL/dy * w and x' = x * r:

    dL/dx = r * (g - x' * mean(g * x'))     dL/dw = sum over rows of dL/dy * x'

Shapes: x ``[..., D]``, weight ``[D]``, result like x. float32 inside for half inputs, rounded once at the end.
Source: Zhang & Sennrich 2019, arXiv:1910.07467.

Bound by bytes: about 4 FLOPs an element against one read and one write, so 4 / (2 * 2) = 1 FLOP per byte in bfloat16,
two orders of magnitude below where any current device turns to being bound by arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...costs.work import Cost
from ..cpu import gradients
from ..lang.jit import in_triton, kernel, runs_triton, tl
from ..lang.tiles import after_previous, let_next_begin, wait_for_previous
from ..numerics import compute_dtype, sample
from ..peers import compiled
from ..registry import Op, in_torch, register
from ..tuning import Config
from . import norms
from .norms import launch_backward, launch_forward


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalize x ``[..., D]``, weight ``[D]`` -> ``[..., D]`` in x's dtype."""
    wide = x.to(compute_dtype(x.dtype))
    r = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * r * weight.to(wide.dtype)).to(x.dtype)


@kernel
def forward_kernel(
    x_ptr, residual_ptr, w_ptr, y_ptr, sum_ptr, n_rows, n_cols, x_stride, r_stride, y_stride, eps,
    ADD: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Normalize ROWS whole rows a program: one read, one write. With ADD the norm is of x + residual, which is written
    too."""
    if ADD:
        after_previous(DEPENDENT_LAUNCH)
    else:  # what begins by this finds all that was there before this kernel: see embed_tokens.py
        wait_for_previous(DEPENDENT_LAUNCH)
        let_next_begin(DEPENDENT_LAUNCH)
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row < n_rows) & (col < n_cols)
    x = tl.load(x_ptr + row * x_stride + col, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(residual_ptr + row * r_stride + col, mask=inside, other=0.0).to(tl.float32)
        rounded = x.to(sum_ptr.dtype.element_ty)
        tl.store(sum_ptr + row * n_cols + col, rounded, mask=inside)
        x = rounded.to(tl.float32)
    w = tl.load(w_ptr + col, mask=col < n_cols, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / n_cols + eps)
    y = x * r[:, None] * w
    tl.store(y_ptr + row * y_stride + col, y.to(y_ptr.dtype.element_ty), mask=inside)


@kernel
def backward_kernel(
    g_ptr, x_ptr, up_ptr, w_ptr, dx_ptr, dw_ptr, n_rows, n_cols, g_stride, x_stride, up_stride, dx_stride,
    eps,
    ADD: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Process rows p, p + P, ... in program p: write their dL/dx and accumulate dL/dw in registers.

    The loads of the next STAGES - 1 rows are on their way to shared memory while a row is worked on. Both sums of a
    row are taken before either is used, so that they need not wait for each other. With ADD, up is added to dL/dx.
    """
    wait_for_previous(DEPENDENT_LAUNCH)
    col = tl.arange(0, BLOCK)
    used = col < n_cols
    w = tl.load(w_ptr + col, mask=used, other=0.0)
    dw = tl.zeros([BLOCK], tl.float32)
    for row in tl.range(tl.program_id(0).to(tl.int64), n_rows, tl.num_programs(0), num_stages=STAGES):
        x = tl.load(x_ptr + row * x_stride + col, mask=used, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + row * g_stride + col, mask=used, other=0.0).to(tl.float32)
        gw = g * w.to(tl.float32)
        square, dot = tl.sum(x * x, 0), tl.sum(gw * x, 0)
        r = 1.0 / tl.sqrt_rn(square / n_cols + eps)
        x = x * r
        dw += g * x
        dx = r * (gw - x * (r * dot / n_cols))
        if ADD:
            dx += tl.load(up_ptr + row * up_stride + col, mask=used, other=0.0).to(tl.float32)
        tl.store(dx_ptr + row * dx_stride + col, dx.to(dx_ptr.dtype.element_ty), mask=used)
    let_next_begin(DEPENDENT_LAUNCH)
    tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * n_cols + col, dw, mask=used)


def triton_rms_norm(
    x: Tensor,
    weight: Tensor,
    eps: float,
    *,
    out: Tensor | None = None,
    dependent_launch: bool = False,
    own_tuning: bool = True,
    config: Config | None = None,
) -> Tensor:
    """Compute ``reference`` in Triton. Any strides; a copy is made only if the elements of a row are not contiguous.

    ``out``: where the result goes; the rows of a matrix may be apart. ``dependent_launch``: begin while the kernel
    before still runs (Hopper). ``own_tuning``: see ``tuning.choices``. ValueError past ``norms.MAX_WIDTH``.
    """
    places = None if out is None else (out, x)
    made = launch_forward(
        "rms_norm",
        forward_kernel,
        x,
        None,
        (weight,),
        eps,
        out=places,
        dependent_launch=dependent_launch,
        own_tuning=own_tuning,
        config=config,
    )
    return made[0]


def triton_backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, *, config: Config | None = None
) -> tuple[Tensor, Tensor]:
    """Compute (dL/dx, dL/dw) in Triton."""
    dx, dw = launch_backward("rms_norm.backward", backward_kernel, grad, x, None, weight, eps, vectors=1, config=config)
    return dx, dw


@torch.library.custom_op("transect::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Run the operator for autograd and ``torch.compile``: the Triton kernel where it can run, else the
    reference."""
    return triton_rms_norm(x, weight, eps) if runs_triton(x, weight) else reference(x, weight, eps).contiguous()


@torch.library.custom_op("transect::rms_norm_backward", mutates_args=())
def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute the operator's gradients, (dL/dx, dL/dw)."""
    if runs_triton(grad, x, weight):
        return triton_backward(grad, x, weight, eps)
    return reference_backward(grad, x, weight, eps)


def reference_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute the formulas above."""
    dtype = compute_dtype(x.dtype)
    width = x.shape[-1]
    wide, dy = x.to(dtype).reshape(-1, width), grad.to(dtype).reshape(-1, width)
    r = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    hat, g = wide * r, dy * weight.to(dtype)
    dx = r * (g - hat * (g * hat).mean(-1, keepdim=True))
    dw = (dy * hat).sum(0).to(weight.dtype)
    return dx.reshape(x.shape).to(x.dtype), dw


@rms_norm.register_fake
def _(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty(x.shape, device=x.device, dtype=x.dtype)


@rms_norm_backward.register_fake
def _(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dx = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    dw = torch.empty(weight.shape, device=x.device, dtype=weight.dtype)
    return dx, dw


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0], inputs[1])
    ctx.eps = inputs[-1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    return *rms_norm_backward(grad, *ctx.saved_tensors, ctx.eps), None


rms_norm.register_autograd(_backward, setup_context=_setup)


def cost(x: Tensor, weight: Tensor, eps: float) -> Cost:
    """Count 4 FLOPs an element: square, add, times r, times weight."""
    return Cost(4 * x.numel(), x.nbytes + weight.nbytes, x.nbytes)


def _examples() -> Sequence[dict[str, Any]]:
    return [
        {"x": sample(1, 576), "weight": sample(576, seed=1), "eps": 1e-5},
        {"x": sample(7, 33), "weight": sample(33, seed=1), "eps": 1e-6},
        {"x": sample(3, 5, 1), "weight": sample(1, seed=1), "eps": 1e-6},
        {"x": sample(0, 8), "weight": sample(8, seed=1), "eps": 1e-6},
        {"x": torch.cat((sample(1, 16) * 1e3, torch.zeros(1, 16))), "weight": sample(16, seed=1), "eps": 1e-5},
    ]


def _peer(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _gradient_cost(x: Tensor, weight: Tensor, eps: float) -> Cost:
    return Cost(10 * x.numel(), 2 * x.nbytes + weight.nbytes, x.nbytes + weight.nbytes)


register(
    Op(
        name="rms_norm",
        reference=reference,
        cost=cost,
        implementations={
            "torch": in_torch(reference, batch_invariant=True),
            "cpu": gradients.implementation(gradients.rms_norm, reference),
            "triton": in_triton(triton_rms_norm, batch_invariant=True, autograd=rms_norm),
        },
        examples=_examples,
        peers={"torch": _peer, "torch.compile": compiled(_peer)},
        differentiable=("x", "weight"),
        gradient_cost=_gradient_cost,
        cases=partial(norms.cases, vectors=1, add=False),
        kernels=partial(norms.kernels, forward_kernel, backward_kernel, vectors=1, add=False),
        knobs=lambda: norms.knobs("rms_norm", triton_rms_norm, triton_backward),
    )
)
