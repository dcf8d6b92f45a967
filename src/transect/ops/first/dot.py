r"""Dot product of two tensors of one shape, in two levels as in ``sum.py``.

    s = sum_i x_i y_i            dL/dx = dL/ds * y        dL/dy = dL/ds * x

Shapes: x and y of one shape and dtype -> a scalar in that dtype; accumulated in float32.

Bound by bytes: 2 FLOPs an element against two reads, 1/2 a FLOP per byte in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...costs.work import Cost
from .. import shapes
from ..lang.jit import in_triton, kernel, multiprocessors, require, runs_triton, tl
from ..numerics import compute_dtype, sample
from ..peers import compiled
from ..registry import Case, Kernel, Knobs, Op, register
from ..tuning import Config, choose, flat_rule
from .sum import CHOICES, combine, rule


def reference(x: Tensor, y: Tensor) -> Tensor:
    """Compute the dot product of x and y of one shape -> scalar in x's dtype."""
    wide = compute_dtype(x.dtype)
    return (x.to(wide) * y.to(wide)).sum().to(x.dtype)


@kernel
def _partial_kernel(x_ptr, y_ptr, part_ptr, n, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], tl.float32)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, step):
        index = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + index, mask=index < n, other=0.0).to(tl.float32)
        total += x * tl.load(y_ptr + index, mask=index < n, other=0.0).to(tl.float32)
    tl.store(part_ptr + tl.program_id(0), tl.sum(total, 0))


@kernel
def _backward_kernel(g_ptr, x_ptr, y_ptr, dx_ptr, dy_ptr, n, BLOCK: tl.constexpr):
    """Compute both gradients: each is the upstream gradient times the other input."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(g_ptr).to(tl.float32)
    x = tl.load(x_ptr + index, mask=index < n, other=0.0).to(tl.float32)
    y = tl.load(y_ptr + index, mask=index < n, other=0.0).to(tl.float32)
    tl.store(dx_ptr + index, (g * y).to(dx_ptr.dtype.element_ty), mask=index < n)
    tl.store(dy_ptr + index, (g * x).to(dy_ptr.dtype.element_ty), mask=index < n)


def triton_dot(x: Tensor, y: Tensor, *, config: Config | None = None) -> Tensor:
    """Compute ``reference`` in Triton; inputs that are not contiguous are copied. ValueError if shapes or dtypes
    differ."""
    require("dot", x, y)
    if x.shape != y.shape or x.dtype != y.dtype:
        raise ValueError(f"dot: shapes and dtypes must agree; got {list(x.shape)} {x.dtype}, {list(y.shape)} {y.dtype}")
    x, y = x.contiguous(), y.contiguous()
    n = x.numel()
    if not n:
        return torch.zeros((), device=x.device, dtype=x.dtype)
    knobs = config or choose("dot", n, x.device, rule)
    programs = min(-(-n // knobs["block"]), multiprocessors(x.device) * knobs["waves"])
    parts = torch.empty(programs, device=x.device, dtype=torch.float32)
    _partial_kernel[(programs,)](x, y, parts, n, BLOCK=knobs["block"], num_warps=knobs["warps"])
    return combine(parts, x.dtype)


def triton_backward(grad: Tensor, x: Tensor, y: Tensor, *, config: Config | None = None) -> tuple[Tensor, Tensor]:
    """Compute (dL/dx, dL/dy) in one launch; grad is dL/ds, a scalar on the device."""
    require("dot backward", grad, x, y)
    x, y = x.contiguous(), y.contiguous()
    dx, dy = torch.empty_like(x), torch.empty_like(y)
    n = x.numel()
    if n:
        knobs = config or choose("dot.backward", n, x.device, flat_rule)
        grid = (-(-n // knobs["block"]),)
        _backward_kernel[grid](grad, x, y, dx, dy, n, BLOCK=knobs["block"], num_warps=knobs["warps"])
    return dx, dy


@torch.library.custom_op("transect::dot", mutates_args=())
def dot(x: Tensor, y: Tensor) -> Tensor:
    """Run the operator for autograd and ``torch.compile``: the Triton kernels where they can run, else the
    reference."""
    return triton_dot(x, y) if runs_triton(x, y) else reference(x, y)


@dot.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty((), device=x.device, dtype=x.dtype)


@torch.library.custom_op("transect::dot_backward", mutates_args=())
def dot_backward(grad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the operator's gradients, (dL/dx, dL/dy)."""
    return triton_backward(grad, x, y) if runs_triton(grad, x, y) else (grad * y.contiguous(), grad * x.contiguous())


@dot_backward.register_fake
def _(grad: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format),
        torch.empty_like(y, memory_format=torch.contiguous_format),
    )


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    return dot_backward(grad, *ctx.saved_tensors)


dot.register_autograd(_backward, setup_context=_setup)


def cost(x: Tensor, y: Tensor) -> Cost:
    """Count a product and a sum an element."""
    return Cost(2 * x.numel(), x.nbytes + y.nbytes, x.element_size())


def _examples() -> Sequence[dict[str, Any]]:
    return [{"x": sample(*shape), "y": sample(*shape, seed=1)} for shape in ((9000,), (7, 33), (1,), (0,))]


def _peer(x: Tensor, y: Tensor) -> Tensor:
    return torch.dot(x.reshape(-1), y.reshape(-1))


def _cases() -> Sequence[Case]:
    rows = shapes.rows_for_bytes(2 * shapes.LLAMA_8B.dim)

    def make(device: torch.device, seed: int) -> Mapping[str, Any]:
        generator = torch.Generator(device).manual_seed(seed)
        x, y = torch.randn(2, rows, shapes.LLAMA_8B.dim, device=device, dtype=torch.bfloat16, generator=generator)
        return {"x": x, "y": y}

    return [Case(f"residual of {shapes.LLAMA_8B.name}, {rows} tokens", make)]


def _kernels() -> Sequence[Kernel]:
    arguments = {"x_ptr": "*bf16", "y_ptr": "*bf16", "part_ptr": "*fp32", "n": "i32"}
    back = dict.fromkeys(("g_ptr", "x_ptr", "y_ptr", "dx_ptr", "dy_ptr"), "*bf16")
    return [
        Kernel("partial", _partial_kernel, arguments, {"BLOCK": 4096}, ("n",), warps=8),
        Kernel("backward", _backward_kernel, {**back, "n": "i32"}, {"BLOCK": 2048}, ("n",)),
    ]


register(
    Op(
        name="dot",
        reference=reference,
        cost=cost,
        implementations={"triton": in_triton(triton_dot, autograd=dot)},
        examples=_examples,
        peers={"torch": _peer, "torch.compile": compiled(_peer)},
        differentiable=("x", "y"),
        gradient_cost=lambda x, y: Cost(2 * x.numel(), x.nbytes + y.nbytes, x.nbytes + y.nbytes),
        cases=_cases,
        kernels=_kernels,
        knobs=lambda: [Knobs("dot", CHOICES, rule, triton_dot, dict, lambda inputs: inputs["x"].numel())],
    )
)
