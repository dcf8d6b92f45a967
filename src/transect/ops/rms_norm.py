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

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import shapes
from .jit import TRITON_TARGETS, available, kernel, multiprocessors, next_power_of_2, require, rows_of, runs_triton, tl
from .numerics import compute_dtype, sample
from .registry import Case, Cost, Implementation, Kernel, Knobs, Op, register
from .tuning import Config, choose, row_rule


def reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x ``[..., D]``, weight ``[D]`` -> ``[..., D]`` in x's dtype."""
    wide = x.to(compute_dtype(x.dtype))
    r = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * r * weight.to(wide.dtype)).to(x.dtype)


MAX_WIDTH = 65536
"""The longest row that a program holds."""


@kernel
def _forward_kernel(x_ptr, w_ptr, y_ptr, n_rows, n_cols, stride, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """ROWS whole rows a program: one read, one write."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row < n_rows) & (col < n_cols)
    x = tl.load(x_ptr + row * stride + col, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + col, mask=col < n_cols, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / n_cols + eps)
    y = x * r[:, None] * w
    tl.store(y_ptr + row * n_cols + col, y.to(y_ptr.dtype.element_ty), mask=inside)


@kernel
def _backward_kernel(g_ptr, x_ptr, w_ptr, dx_ptr, dw_ptr, n_rows, n_cols, g_stride, x_stride, eps, BLOCK: tl.constexpr):
    """Program p takes rows p, p + P, ...: it writes their dL/dx and keeps its share of dL/dw in registers."""
    col = tl.arange(0, BLOCK)
    used = col < n_cols
    w = tl.load(w_ptr + col, mask=used, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0).to(tl.int64), n_rows, tl.num_programs(0)):
        x = tl.load(x_ptr + row * x_stride + col, mask=used, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + row * g_stride + col, mask=used, other=0.0).to(tl.float32)
        r = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / n_cols + eps)
        x = x * r
        dw += g * x
        g = g * w
        dx = r * (g - x * (tl.sum(g * x, 0) / n_cols))
        tl.store(dx_ptr + row * n_cols + col, dx.to(dx_ptr.dtype.element_ty), mask=used)
    tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * n_cols + col, dw, mask=used)


def _check_width(width: int) -> None:
    if width > MAX_WIDTH:
        raise ValueError(f"rms_norm: a row of {width} elements is past {MAX_WIDTH}; use the reference")


def triton_rms_norm(x: Tensor, weight: Tensor, eps: float, *, config: Config | None = None) -> Tensor:
    """``reference`` in Triton. Any strides; a copy is made only if neighbours of a row are apart."""
    require("rms_norm", x, weight)
    flat = rows_of(x)
    rows, width = flat.shape
    _check_width(width)
    y = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    if flat.numel():
        knobs = config or choose("rms_norm", width, x.device, row_rule)
        _forward_kernel[(-(-rows // knobs["rows"]),)](
            flat,
            weight.contiguous(),
            y,
            rows,
            width,
            flat.stride(0),
            eps,
            ROWS=knobs["rows"],
            BLOCK=next_power_of_2(width),
            num_warps=knobs["warps"],
        )
    return y


def triton_backward(
    grad: Tensor, x: Tensor, weight: Tensor, eps: float, *, config: Config | None = None
) -> tuple[Tensor, Tensor]:
    """(dL/dx, dL/dw) in Triton; the shares of dL/dw are added by torch, ``[programs, D]`` float32."""
    require("rms_norm backward", grad, x, weight)
    g, flat = rows_of(grad), rows_of(x)
    rows, width = flat.shape
    _check_width(width)
    dx = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    if not flat.numel():
        return dx, torch.zeros_like(weight)
    knobs = config or choose("rms_norm.backward", width, x.device, _backward_rule)
    programs = min(rows, multiprocessors(x.device) * knobs["waves"])
    dw = torch.empty(programs, width, device=x.device, dtype=torch.float32)
    _backward_kernel[(programs,)](
        g,
        flat,
        weight.contiguous(),
        dx,
        dw,
        rows,
        width,
        g.stride(0),
        flat.stride(0),
        eps,
        BLOCK=next_power_of_2(width),
        num_warps=knobs["warps"],
    )
    return dx, dw.sum(0).to(weight.dtype)


def _backward_rule(width: int) -> Config:
    warps = min(16, max(1, next_power_of_2(width) // 256))
    return {"warps": warps, "waves": max(1, 32 // warps)}


@torch.library.custom_op("transect::rms_norm", mutates_args=())
def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The operator for autograd and ``torch.compile``: the Triton kernel where it can run, else the reference."""
    return triton_rms_norm(x, weight, eps) if runs_triton(x, weight) else reference(x, weight, eps).contiguous()


@torch.library.custom_op("transect::rms_norm_backward", mutates_args=())
def rms_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Its gradients."""
    if runs_triton(grad, x, weight):
        return triton_backward(grad, x, weight, eps)
    return reference_backward(grad, x, weight, eps)


def reference_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The formulas above."""
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
    """4 FLOPs an element: square, add, times r, times weight."""
    return Cost(4 * x.numel(), x.nbytes + weight.nbytes, x.nbytes)


def _examples() -> Sequence[dict[str, Any]]:
    return [
        {"x": sample(1, 576), "weight": sample(576, seed=1), "eps": 1e-5},
        {"x": sample(7, 33), "weight": sample(33, seed=1), "eps": 1e-6},
        {"x": sample(3, 5, 1), "weight": sample(1, seed=1), "eps": 1e-6},
    ]


def _peer(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


CHOICES = {"rows": (1, 2, 4), "warps": (2, 4, 8, 16)}


def _gradient_cost(x: Tensor, weight: Tensor, eps: float) -> Cost:
    return Cost(10 * x.numel(), 2 * x.nbytes + weight.nbytes, x.nbytes + weight.nbytes)


def _cases() -> Sequence[Case]:
    def case(model: shapes.ModelShape) -> Case:
        rows = shapes.rows_for_bytes(2 * model.dim)

        def make(device: torch.device, seed: int) -> Mapping[str, Any]:
            generator = torch.Generator(device).manual_seed(seed)
            options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "generator": generator}
            x, weight = torch.randn(rows, model.dim, **options), torch.randn(model.dim, **options)
            return {"x": x, "weight": weight, "eps": 1e-5}

        return Case(f"{model.name}, {rows} tokens x {model.dim}", make)

    return [case(model) for model in (shapes.LLAMA_8B, shapes.LLAMA_1B, shapes.QWEN3_0_6B)]


def _kernels() -> Sequence[Kernel]:
    integers = {"n_rows": "i32", "n_cols": "i32"}
    forward = {"x_ptr": "*bf16", "w_ptr": "*bf16", "y_ptr": "*bf16", **integers, "stride": "i32"}
    backward = {
        **dict.fromkeys(("g_ptr", "x_ptr", "w_ptr", "dx_ptr"), "*bf16"),
        **dict.fromkeys(("dw_ptr",), "*fp32"),
        **integers,
        "g_stride": "i32",
        "x_stride": "i32",
        "eps": "fp32",
    }
    sizes = ("n_cols", "stride", "g_stride", "x_stride")
    return [
        Kernel("forward", _forward_kernel, {**forward, "eps": "fp32"}, {"ROWS": 1, "BLOCK": 4096}, sizes, warps=8),
        Kernel("backward", _backward_kernel, backward, {"BLOCK": 4096}, sizes, warps=16),
    ]


def _prepare_backward(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    kept = {key: inputs[key] for key in ("x", "weight", "eps")}
    return {"grad": torch.randn_like(inputs["x"]), **kept}


register(
    Op(
        name="rms_norm",
        reference=reference,
        cost=cost,
        implementations={
            "torch": Implementation("torch", lambda: reference, ("any",), batch_invariant=True),
            "triton": Implementation(
                "triton", available(triton_rms_norm), TRITON_TARGETS, batch_invariant=True, autograd=lambda: rms_norm
            ),
        },
        examples=_examples,
        peers={"torch": _peer},
        differentiable=("x", "weight"),
        gradient_cost=_gradient_cost,
        cases=_cases,
        kernels=_kernels,
        knobs=[
            Knobs("rms_norm", CHOICES, row_rule, triton_rms_norm, dict, lambda inputs: inputs["x"].shape[-1]),
            Knobs(
                "rms_norm.backward",
                {"warps": (1, 2, 4, 8, 16), "waves": (2, 4, 8, 16)},
                _backward_rule,
                triton_backward,
                _prepare_backward,
                lambda inputs: inputs["x"].shape[-1],
            ),
        ],
    )
)
