r"""Softmax over the last dimension.

    m = max(x)        y_i = exp(x_i - m) / sum_j exp(x_j - m)

Backward, with g = dL/dy:

    dL/dx_i = y_i * (g_i - sum_j g_j y_j)

Shapes: x and the result ``[..., D]``. float32 inside for half inputs, rounded once at the end. A row that is -inf
throughout has no answer and gives NaN, as in torch.
Sources: Milakov & Gimelshein 2018, arXiv:1805.02867 (the running maximum).

Bound by bytes: about 5 FLOPs an element against one read and one write, 5 / (2 * 2) FLOPs per byte in bfloat16, if
the row is read once. A row of up to 32768 elements stays in the registers of one program. A longer one, such as the
scores over a vocabulary, is read twice; the second time backwards, so that what was read last, and is still in the L2
cache, comes first. The first pass keeps a maximum and a sum *per lane* of 8 neighbours: one exponential an element,
and one for each lane to rescale its sum. Exponentials run at an eighth of the rate of additions, so they are worth
counting.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from . import shapes
from .jit import TRITON_TARGETS, available, kernel, next_power_of_2, require, rows_of, runs_triton, tl
from .numerics import compute_dtype, sample
from .registry import Case, Cost, Implementation, Kernel, Knobs, Op, register
from .tuning import Config, choose

ONE_PASS = 32768
"""The longest row that stays in registers."""


def reference(x: Tensor) -> Tensor:
    """x ``[..., D]`` -> ``[..., D]`` in x's dtype."""
    wide = x.to(compute_dtype(x.dtype))
    e = (wide - wide.amax(-1, keepdim=True).detach()).exp() if wide.numel() else wide.exp()
    return (e / e.sum(-1, keepdim=True)).to(x.dtype)


def reference_backward(grad: Tensor, y: Tensor) -> Tensor:
    """dL/dx from dL/dy and the result y, both ``[..., D]``."""
    wide = compute_dtype(y.dtype)
    g, p = grad.to(wide), y.to(wide)
    return (p * (g - (g * p).sum(-1, keepdim=True))).to(y.dtype)


@kernel
def _rows_kernel(x_ptr, y_ptr, n_rows, n_cols, x_stride, y_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """ROWS whole rows a program."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row < n_rows) & (col < n_cols)
    x = tl.load(x_ptr + row * x_stride + col, mask=inside, other=-float("inf")).to(tl.float32)
    e = tl.exp2((x - tl.max(x, 1)[:, None]) * 1.4426950408889634)
    y = e * (1.0 / tl.sum(e, 1))[:, None]
    tl.store(y_ptr + row * y_stride + col, y.to(y_ptr.dtype.element_ty), mask=inside)


@kernel
def _long_kernel(x_ptr, y_ptr, n_cols, x_stride, y_stride, BLOCK: tl.constexpr):
    """One long row a program: a pass for maximum and sum, and one, backwards, for the result."""
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * x_stride
    y_ptr += row * y_stride
    lane = tl.arange(0, BLOCK // 8)[:, None] * 8 + tl.arange(0, 8)[None, :]
    top = tl.full([BLOCK // 8], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK // 8], tl.float32)
    blocks = tl.cdiv(n_cols, BLOCK)
    for block in range(blocks):
        col = block * BLOCK + lane
        x = tl.load(x_ptr + col, mask=col < n_cols, other=-float("inf")).to(tl.float32)
        higher = tl.maximum(top, tl.max(x, 1))
        base = tl.where(higher == -float("inf"), 0.0, higher)  # a lane that has seen nothing yet
        e = tl.exp2((x - base[:, None]) * 1.4426950408889634)
        total = total * tl.exp2((top - base) * 1.4426950408889634) + tl.sum(e, 1)
        top = higher
    peak = tl.max(top, 0)
    base = tl.where(peak == -float("inf"), 0.0, peak)
    scale = 1.0 / tl.sum(total * tl.exp2((top - base) * 1.4426950408889634), 0)
    for block in range(blocks):
        col = (blocks - 1 - block) * BLOCK + lane
        x = tl.load(x_ptr + col, mask=col < n_cols, other=-float("inf")).to(tl.float32)
        y = tl.exp2((x - base) * 1.4426950408889634) * scale
        tl.store(y_ptr + col, y.to(y_ptr.dtype.element_ty), mask=col < n_cols)


@kernel
def _rows_backward_kernel(
    g_ptr, y_ptr, dx_ptr, n_rows, n_cols, g_stride, y_stride, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, BLOCK)[None, :]
    inside = (row < n_rows) & (col < n_cols)
    g = tl.load(g_ptr + row * g_stride + col, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + row * y_stride + col, mask=inside, other=0.0).to(tl.float32)
    dx = y * (g - tl.sum(g * y, 1)[:, None])
    tl.store(dx_ptr + row * n_cols + col, dx.to(dx_ptr.dtype.element_ty), mask=inside)


@kernel
def _long_backward_kernel(g_ptr, y_ptr, dx_ptr, n_cols, g_stride, y_stride, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    g_ptr += row * g_stride
    y_ptr += row * y_stride
    dx_ptr += row * n_cols
    lane = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    blocks = tl.cdiv(n_cols, BLOCK)
    for block in range(blocks):
        col = block * BLOCK + lane
        g = tl.load(g_ptr + col, mask=col < n_cols, other=0.0).to(tl.float32)
        total += g * tl.load(y_ptr + col, mask=col < n_cols, other=0.0).to(tl.float32)
    dot = tl.sum(total, 0)
    for block in range(blocks):
        col = (blocks - 1 - block) * BLOCK + lane
        g = tl.load(g_ptr + col, mask=col < n_cols, other=0.0).to(tl.float32)
        y = tl.load(y_ptr + col, mask=col < n_cols, other=0.0).to(tl.float32)
        tl.store(dx_ptr + col, (y * (g - dot)).to(dx_ptr.dtype.element_ty), mask=col < n_cols)


def rule(width: int) -> Config:
    """By the row's width alone, so that a row's result does not depend on how many rows there are."""
    if width > ONE_PASS:
        return {"block": 8192, "warps": 16}
    block = next_power_of_2(width)
    rows = max(1, 2048 // block)
    return {"rows": rows, "warps": min(16, max(1, rows * block // 512))}


def triton_softmax(x: Tensor, *, config: Config | None = None) -> Tensor:
    """``reference`` in Triton. Any strides; a copy is made only if neighbours of a row are apart."""
    require("softmax", x)
    flat = rows_of(x)
    y = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    rows, width = flat.shape
    if not flat.numel():
        return y
    knobs = config or choose("softmax", width, x.device, rule)
    if width <= ONE_PASS:
        grid = (-(-rows // knobs["rows"]),)
        block = next_power_of_2(width)
        _rows_kernel[grid](
            flat, y, rows, width, flat.stride(0), width, ROWS=knobs["rows"], BLOCK=block, num_warps=knobs["warps"]
        )
    else:
        _long_kernel[(rows,)](flat, y, width, flat.stride(0), width, BLOCK=knobs["block"], num_warps=knobs["warps"])
    return y


def triton_backward(grad: Tensor, y: Tensor, *, config: Config | None = None) -> Tensor:
    """``reference_backward`` in Triton."""
    require("softmax backward", grad, y)
    g, flat = rows_of(grad), rows_of(y)
    dx = torch.empty(y.shape, device=y.device, dtype=y.dtype)
    rows, width = flat.shape
    if not flat.numel():
        return dx
    knobs = config or choose("softmax.backward", width, y.device, rule)
    strides = (g.stride(0), flat.stride(0))
    if width <= ONE_PASS:
        grid = (-(-rows // knobs["rows"]),)
        block = next_power_of_2(width)
        _rows_backward_kernel[grid](
            g, flat, dx, rows, width, *strides, ROWS=knobs["rows"], BLOCK=block, num_warps=knobs["warps"]
        )
    else:
        _long_backward_kernel[(rows,)](g, flat, dx, width, *strides, BLOCK=knobs["block"], num_warps=knobs["warps"])
    return dx


@torch.library.custom_op("transect::softmax", mutates_args=())
def softmax(x: Tensor) -> Tensor:
    """The operator for autograd and ``torch.compile``: the Triton kernel where it can run, else the reference."""
    return triton_softmax(x) if runs_triton(x) else reference(x)


@torch.library.custom_op("transect::softmax_backward", mutates_args=())
def softmax_backward(grad: Tensor, y: Tensor) -> Tensor:
    """Its gradient, as an operator of its own."""
    return triton_backward(grad, y) if runs_triton(grad, y) else reference_backward(grad, y)


@softmax.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty(x.shape, device=x.device, dtype=x.dtype)


@softmax_backward.register_fake
def _(grad: Tensor, y: Tensor) -> Tensor:
    return torch.empty(y.shape, device=y.device, dtype=y.dtype)


def _setup(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(output)


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    (y,) = ctx.saved_tensors
    return softmax_backward(grad, y)


softmax.register_autograd(_backward, setup_context=_setup)


def cost(x: Tensor) -> Cost:
    """5 FLOPs an element: maximum, subtract, exp, add, product."""
    return Cost(5 * x.numel(), x.nbytes, x.nbytes)


def _examples() -> Sequence[dict[str, Any]]:
    made = [{"x": 3 * sample(*shape)} for shape in ((5, 33), (2, 3, 130), (1, 1), (3, 0), (0, 4))]
    extreme = 5 * sample(4, 40)
    extreme[0] = -float("inf")
    extreme[1, 5:] = -float("inf")
    extreme[2, 3] = 1e4
    extreme[3] -= 1e4
    return [*made, {"x": extreme}, {"x": 4 * sample(2, ONE_PASS + 7)}]


def _cases() -> Sequence[Case]:
    def case(name: str, rows: int, width: int) -> Case:
        def make(device: torch.device, seed: int) -> Mapping[str, Any]:
            generator = torch.Generator(device).manual_seed(seed)
            return {"x": 4 * torch.randn(rows, width, device=device, dtype=torch.bfloat16, generator=generator)}

        return Case(f"{name}, [{rows}, {width}]", make)

    made = [case("attention scores", shapes.rows_for_bytes(2 * width), width) for width in (1024, 4096, 16384)]
    vocabularies = sorted({model.vocab_size: model.name for model in shapes.MODELS}.items())
    return [*made, *(case(f"vocabulary of {name}", shapes.rows_for_bytes(2 * v), v) for v, name in vocabularies)]


def _kernels() -> Sequence[Kernel]:
    row = {"n_rows": "i32", "n_cols": "i32"}
    forward = {"x_ptr": "*bf16", "y_ptr": "*bf16"}
    backward = {"g_ptr": "*bf16", "y_ptr": "*bf16", "dx_ptr": "*bf16"}
    strides, back_strides = {"x_stride": "i32", "y_stride": "i32"}, {"g_stride": "i32", "y_stride": "i32"}
    long = {"n_cols": "i32"}
    sizes = ("n_cols", "x_stride", "y_stride", "g_stride")
    tile = {"ROWS": 1, "BLOCK": 4096}
    return [
        Kernel("forward, 4096 wide", _rows_kernel, {**forward, **row, **strides}, tile, sizes, warps=8),
        Kernel("forward, long", _long_kernel, {**forward, **long, **strides}, {"BLOCK": 8192}, sizes, warps=16),
        Kernel("backward, 4096 wide", _rows_backward_kernel, {**backward, **row, **back_strides}, tile, sizes, warps=8),
        Kernel(
            "backward, long",
            _long_backward_kernel,
            {**backward, **long, **back_strides},
            {"BLOCK": 8192},
            sizes,
            warps=16,
        ),
    ]


def _prepare_backward(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"grad": torch.randn_like(inputs["x"]), "y": torch.softmax(inputs["x"], -1)}


_CHOICES = {"rows": (1, 2, 4), "block": (4096, 8192, 16384), "warps": (4, 8, 16, 32)}

register(
    Op(
        name="softmax",
        reference=reference,
        cost=cost,
        implementations={
            "triton": Implementation(
                "triton", available(triton_softmax), TRITON_TARGETS, batch_invariant=True, autograd=lambda: softmax
            )
        },
        examples=_examples,
        peers={"torch": lambda x: torch.softmax(x, -1)},
        differentiable=("x",),
        gradient_cost=lambda x: Cost(4 * x.numel(), 2 * x.nbytes, x.nbytes),
        cases=_cases,
        kernels=_kernels,
        knobs=[
            Knobs("softmax", _CHOICES, rule, triton_softmax, dict, lambda inputs: inputs["x"].shape[-1]),
            Knobs(
                "softmax.backward",
                _CHOICES,
                rule,
                triton_backward,
                _prepare_backward,
                lambda inputs: inputs["x"].shape[-1],
            ),
        ],
    )
)
