r"""Sum of all elements, in two levels.

    s = sum_i x_i            dL/dx_i = dL/ds

Shapes: x of any shape -> a scalar in x's dtype; accumulated in float32.

One program cannot read fast enough. All programs cannot add to one number without waiting for each other, and not in
the same order twice. So a fixed number of programs each walk over the input in strides and keep one running sum per
lane. Each writes its sum to memory; a second, single program adds those. The order is fixed, so every run gives the
same bits.

Bound by bytes: one FLOP an element against one read, 1/2 a FLOP per byte in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...costs.work import Cost
from .. import shapes
from ..lang import cuda
from ..lang.jit import (
    in_triton,
    kernel,
    multiprocessors,
    next_power_of_2,
    require,
    runs_triton,
    tl,
)
from ..numerics import compute_dtype, sample
from ..peers import compiled
from ..registry import Case, Kernel, Knobs, Op, register
from ..tuning import Config, choose


def reference(x: Tensor) -> Tensor:
    """Sum x of any shape -> scalar in x's dtype."""
    return x.to(compute_dtype(x.dtype)).sum().to(x.dtype)


@kernel
def _partial_kernel(x_ptr, part_ptr, n, BLOCK: tl.constexpr):
    """Add the blocks p, p + P, p + 2P, ... of the input in program p."""
    total = tl.zeros([BLOCK], tl.float32)
    step = tl.num_programs(0).to(tl.int64) * BLOCK
    for start in range(tl.program_id(0).to(tl.int64) * BLOCK, n, step):
        index = start + tl.arange(0, BLOCK)
        total += tl.load(x_ptr + index, mask=index < n, other=0.0).to(tl.float32)
    tl.store(part_ptr + tl.program_id(0), tl.sum(total, 0))


@kernel
def _combine_kernel(part_ptr, out_ptr, n, BLOCK: tl.constexpr):
    """Add the partial sums in one program."""
    index = tl.arange(0, BLOCK)
    total = tl.sum(tl.load(part_ptr + index, mask=index < n, other=0.0), 0)
    tl.store(out_ptr, total.to(out_ptr.dtype.element_ty))


def rule(n: int) -> Config:
    """Choose eight programs a multiprocessor, 16 elements a thread."""
    return {"block": 4096, "warps": 8, "waves": 8}


def combine(parts: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the second level: float32 partial sums ``[P]`` -> scalar of ``dtype``."""
    out = torch.empty((), device=parts.device, dtype=dtype)
    _combine_kernel[(1,)](parts, out, parts.numel(), BLOCK=next_power_of_2(parts.numel()), num_warps=4)
    return out


def triton_sum(x: Tensor, *, config: Config | None = None) -> Tensor:
    """Compute ``reference`` in Triton; an input that is not contiguous is copied."""
    require("sum", x)
    x = x.contiguous()
    n = x.numel()
    if not n:
        return torch.zeros((), device=x.device, dtype=x.dtype)
    knobs = config or choose("sum", n, x.device, rule)
    programs = min(-(-n // knobs["block"]), multiprocessors(x.device) * knobs["waves"])
    parts = torch.empty(programs, device=x.device, dtype=torch.float32)
    _partial_kernel[(programs,)](x, parts, n, BLOCK=knobs["block"], num_warps=knobs["warps"])
    return combine(parts, x.dtype)


CUDA_BLOCKS = 1024


def cuda_sum(x: Tensor) -> Tensor:
    """Compute ``reference`` by ``sum.cu``: float32 on an NVIDIA GPU; an input that is not contiguous is copied."""
    x = cuda.aligned(x)
    parts, out = x.new_empty(CUDA_BLOCKS), x.new_empty(())
    cuda.launcher("sum", "transect_sum")(x, parts, out, x.numel(), CUDA_BLOCKS)
    return out


@torch.library.custom_op("transect::sum", mutates_args=())
def total(x: Tensor) -> Tensor:
    """Run the operator for autograd and ``torch.compile``: the Triton kernels where they can run, else the
    reference."""
    return triton_sum(x) if runs_triton(x) else reference(x)


@total.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty((), device=x.device, dtype=x.dtype)


def _setup(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.shape = inputs[0].shape


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    return grad.expand(ctx.shape)


total.register_autograd(_backward, setup_context=_setup)


def cost(x: Tensor) -> Cost:
    """Count one FLOP an element."""
    return Cost(x.numel(), x.nbytes, x.element_size())


def _examples() -> Sequence[dict[str, Any]]:
    return [{"x": sample(*shape)} for shape in ((9000,), (7, 33), (1,), (0,))]


def _peer(x: Tensor) -> Tensor:
    return x.sum()


def _cases() -> Sequence[Case]:
    rows = shapes.rows_for_bytes(2 * shapes.LLAMA_8B.dim)

    def make(device: torch.device, seed: int) -> Mapping[str, Any]:
        generator = torch.Generator(device).manual_seed(seed)
        return {"x": torch.randn(rows, shapes.LLAMA_8B.dim, device=device, dtype=torch.bfloat16, generator=generator)}

    return [Case(f"residual of {shapes.LLAMA_8B.name}, {rows} tokens", make)]


def _kernels() -> Sequence[Kernel]:
    partial = {"x_ptr": "*bf16", "part_ptr": "*fp32", "n": "i32"}
    combined = {"part_ptr": "*fp32", "out_ptr": "*bf16", "n": "i32"}
    return [
        Kernel("partial", _partial_kernel, partial, {"BLOCK": 4096}, ("n",), warps=8),
        Kernel("combine", _combine_kernel, combined, {"BLOCK": 2048}),
    ]


CHOICES = {"block": (2048, 4096, 8192), "warps": (4, 8, 16), "waves": (4, 8, 16)}

register(
    Op(
        name="sum",
        reference=reference,
        cost=cost,
        implementations={
            "triton": in_triton(triton_sum, autograd=total),
            "cuda": cuda.in_cuda("sum", cuda_sum, dtypes=("float32",)),
        },
        examples=_examples,
        peers={"torch": _peer, "torch.compile": compiled(_peer)},
        differentiable=("x",),
        cases=_cases,
        kernels=_kernels,
        knobs=lambda: [Knobs("sum", CHOICES, rule, triton_sum, dict, lambda inputs: inputs["x"].numel())],
    )
)
