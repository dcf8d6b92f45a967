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


def reference(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """x ``[..., D]``, weight and bias ``[D]`` -> ``[..., D]`` in x's dtype."""
    wide = x.to(compute_dtype(x.dtype))
    centred = wide - wide.mean(-1, keepdim=True)
    r = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    return (centred * r * weight.to(wide.dtype) + bias.to(wide.dtype)).to(x.dtype)


MAX_WIDTH = 65536
"""The longest row that a program holds."""


@kernel
def _forward_kernel(x_ptr, w_ptr, b_ptr, y_ptr, n_rows, n_cols, stride, eps, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """ROWS whole rows a program: one read, one write."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row < n_rows) & (col < n_cols)
    x = tl.load(x_ptr + row * stride + col, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + col, mask=col < n_cols, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + col, mask=col < n_cols, other=0.0).to(tl.float32)
    mean = tl.sum(x, 1) / n_cols
    x = tl.where(inside, x - mean[:, None], 0.0)
    r = 1.0 / tl.sqrt_rn(tl.sum(x * x, 1) / n_cols + eps)
    y = x * r[:, None] * w + b
    tl.store(y_ptr + row * n_cols + col, y.to(y_ptr.dtype.element_ty), mask=inside)


@kernel
def _backward_kernel(
    g_ptr, x_ptr, w_ptr, dx_ptr, dw_ptr, db_ptr, n_rows, n_cols, g_stride, x_stride, eps, BLOCK: tl.constexpr
):
    """Program p takes rows p, p + P, ...: it writes their dL/dx and keeps its share of dL/dw in registers."""
    col = tl.arange(0, BLOCK)
    used = col < n_cols
    w = tl.load(w_ptr + col, mask=used, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], tl.float32)
    db = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0).to(tl.int64), n_rows, tl.num_programs(0)):
        x = tl.load(x_ptr + row * x_stride + col, mask=used, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + row * g_stride + col, mask=used, other=0.0).to(tl.float32)
        mean = tl.sum(x, 0) / n_cols
        x = tl.where(used, x - mean, 0.0)
        r = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / n_cols + eps)
        x = x * r
        dw += g * x
        db += g
        g = g * w
        dx = r * (g - tl.sum(g, 0) / n_cols - x * (tl.sum(g * x, 0) / n_cols))
        tl.store(dx_ptr + row * n_cols + col, dx.to(dx_ptr.dtype.element_ty), mask=used)
    tl.store(dw_ptr + tl.program_id(0).to(tl.int64) * n_cols + col, dw, mask=used)
    tl.store(db_ptr + tl.program_id(0).to(tl.int64) * n_cols + col, db, mask=used)


def _check_width(width: int) -> None:
    if width > MAX_WIDTH:
        raise ValueError(f"layer_norm: a row of {width} elements is past {MAX_WIDTH}; use the reference")


def triton_layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float, *, config: Config | None = None) -> Tensor:
    """``reference`` in Triton. Any strides; a copy is made only if neighbours of a row are apart."""
    require("layer_norm", x, weight, bias)
    flat = rows_of(x)
    rows, width = flat.shape
    _check_width(width)
    y = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    if flat.numel():
        knobs = config or choose("layer_norm", width, x.device, row_rule)
        _forward_kernel[(-(-rows // knobs["rows"]),)](
            flat,
            weight.contiguous(),
            bias.contiguous(),
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
) -> tuple[Tensor, Tensor, Tensor]:
    """(dL/dx, dL/dw, dL/db) in Triton; the shares of dL/dw are added by torch, ``[programs, D]`` float32."""
    require("layer_norm backward", grad, x, weight)
    g, flat = rows_of(grad), rows_of(x)
    rows, width = flat.shape
    _check_width(width)
    dx = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    if not flat.numel():
        return dx, torch.zeros_like(weight), torch.zeros_like(weight)
    knobs = config or choose("layer_norm.backward", width, x.device, _backward_rule)
    programs = min(rows, multiprocessors(x.device) * knobs["waves"])
    dw = torch.empty(programs, width, device=x.device, dtype=torch.float32)
    db = torch.empty_like(dw)
    _backward_kernel[(programs,)](
        g,
        flat,
        weight.contiguous(),
        dx,
        dw,
        db,
        rows,
        width,
        g.stride(0),
        flat.stride(0),
        eps,
        BLOCK=next_power_of_2(width),
        num_warps=knobs["warps"],
    )
    return dx, dw.sum(0).to(weight.dtype), db.sum(0).to(weight.dtype)


def _backward_rule(width: int) -> Config:
    warps = min(16, max(1, next_power_of_2(width) // 256))
    return {"warps": warps, "waves": max(1, 32 // warps)}


@torch.library.custom_op("transect::layer_norm", mutates_args=())
def layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    """The operator for autograd and ``torch.compile``: the Triton kernel where it can run, else the reference."""
    return (
        triton_layer_norm(x, weight, bias, eps)
        if runs_triton(x, weight)
        else reference(x, weight, bias, eps).contiguous()
    )


@torch.library.custom_op("transect::layer_norm_backward", mutates_args=())
def layer_norm_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Its gradients."""
    if runs_triton(grad, x, weight):
        return triton_backward(grad, x, weight, eps)
    return reference_backward(grad, x, weight, eps)


def reference_backward(grad: Tensor, x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The formulas above."""
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
    """7 FLOPs an element: sum, subtract, square, sum, times r, times weight, plus bias."""
    return Cost(7 * x.numel(), x.nbytes + weight.nbytes + bias.nbytes, x.nbytes)


def _examples() -> Sequence[dict[str, Any]]:
    return [
        {"x": sample(1, 768), "weight": sample(768, seed=1), "bias": sample(768, seed=2), "eps": 1e-5},
        {"x": 3 + sample(7, 33), "weight": sample(33, seed=1), "bias": sample(33, seed=2), "eps": 1e-5},
        {"x": sample(3, 5, 2), "weight": sample(2, seed=1), "bias": sample(2, seed=2), "eps": 1e-3},
    ]


def _peer(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias, eps)


CHOICES = {"rows": (1, 2, 4), "warps": (2, 4, 8, 16)}


def _gradient_cost(x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Cost:
    return Cost(10 * x.numel(), 2 * x.nbytes + weight.nbytes, x.nbytes + 2 * weight.nbytes)


def _cases() -> Sequence[Case]:
    def case(model: shapes.ModelShape) -> Case:
        rows = shapes.rows_for_bytes(2 * model.dim)

        def make(device: torch.device, seed: int) -> Mapping[str, Any]:
            generator = torch.Generator(device).manual_seed(seed)
            options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "generator": generator}
            x, weight = torch.randn(rows, model.dim, **options), torch.randn(model.dim, **options)
            return {"x": x, "weight": weight, "bias": torch.randn(model.dim, **options), "eps": 1e-5}

        return Case(f"{model.name}, {rows} tokens x {model.dim}", make)

    return [case(model) for model in (shapes.LLAMA_8B, shapes.LLAMA_1B, shapes.QWEN3_0_6B)]


def _kernels() -> Sequence[Kernel]:
    integers = {"n_rows": "i32", "n_cols": "i32"}
    forward = {"x_ptr": "*bf16", "w_ptr": "*bf16", "b_ptr": "*bf16", "y_ptr": "*bf16", **integers, "stride": "i32"}
    backward = {
        **dict.fromkeys(("g_ptr", "x_ptr", "w_ptr", "dx_ptr"), "*bf16"),
        **dict.fromkeys(("dw_ptr", "db_ptr"), "*fp32"),
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
        name="layer_norm",
        reference=reference,
        cost=cost,
        implementations={
            "torch": Implementation("torch", lambda: reference, ("any",), batch_invariant=True),
            "triton": Implementation(
                "triton",
                available(triton_layer_norm),
                TRITON_TARGETS,
                batch_invariant=True,
                autograd=lambda: layer_norm,
            ),
        },
        examples=_examples,
        peers={"torch": _peer},
        differentiable=("x", "weight", "bias"),
        gradient_cost=_gradient_cost,
        cases=_cases,
        kernels=_kernels,
        knobs=[
            Knobs("layer_norm", CHOICES, row_rule, triton_layer_norm, dict, lambda inputs: inputs["x"].shape[-1]),
            Knobs(
                "layer_norm.backward",
                {"warps": (1, 2, 4, 8, 16), "waves": (2, 4, 8, 16)},
                _backward_rule,
                triton_backward,
                _prepare_backward,
                lambda inputs: inputs["x"].shape[-1],
            ),
        ],
    )
)
