r"""Vector add, the teaching example: every part that an operator file has, at its smallest.

    z = x + y            dL/dx = dL/dz        dL/dy = dL/dz

Shapes: x, y and the result of one shape, any number of dimensions, one dtype.

A GPU runs many *programs* of one kernel. Program p of this one owns elements ``[p * BLOCK, (p + 1) * BLOCK)``: it makes
their indices with ``arange``, masks those past the end, loads two tiles, adds, stores one. A *tile* is a block of
values that lives in the registers of the threads of one program. With 128 threads and BLOCK = 1024 a thread holds 8
neighbours, 16 bytes of bfloat16, which is the widest access that a GPU has.

Bound by bytes: one FLOP an element against two reads and one write, 1 / (3 * 2) FLOPs per byte in bfloat16. Nothing
helps except enough loads in flight.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...costs.work import Cost
from .. import shapes
from ..lang import cuda
from ..lang.jit import in_triton, kernel, require, runs_triton, tl
from ..numerics import sample
from ..peers import compiled
from ..registry import Case, Kernel, KernelTrace, Knobs, Op, register
from ..tuning import Config, choose, flat_rule


def reference(x: Tensor, y: Tensor) -> Tensor:
    """Add x and y of one shape."""
    return x + y


@kernel
def _add_kernel(x_ptr, y_ptr, z_ptr, n, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < n
    x = tl.load(x_ptr + index, mask=inside).to(tl.float32)
    y = tl.load(y_ptr + index, mask=inside).to(tl.float32)
    tl.store(z_ptr + index, x + y, mask=inside)


def triton_add(x: Tensor, y: Tensor, *, config: Config | None = None) -> Tensor:
    """Compute ``reference`` by ``_add_kernel``; strided inputs are copied. ValueError if shapes or dtypes differ."""
    require("vector_add", x, y)
    if x.shape != y.shape or x.dtype != y.dtype:
        raise ValueError(
            f"vector_add: shapes and dtypes must agree; got {list(x.shape)} {x.dtype}, {list(y.shape)} {y.dtype}"
        )
    x, y = x.contiguous(), y.contiguous()
    z = torch.empty_like(x)
    n = x.numel()
    if n:
        knobs = config or choose("vector_add", n, x.device, flat_rule)
        _add_kernel[(-(-n // knobs["block"]),)](x, y, z, n, BLOCK=knobs["block"], num_warps=knobs["warps"])
    return z


def cuda_add(x: Tensor, y: Tensor) -> Tensor:
    """Compute ``reference`` by ``vector_add.cu``: float32 on an NVIDIA GPU; strided inputs are copied."""
    x, y = cuda.aligned(x), cuda.aligned(y)
    z = torch.empty_like(x)
    cuda.launcher("vector_add", "transect_vector_add")(x, y, z, x.numel())
    return z


@torch.library.custom_op("transect::vector_add", mutates_args=())
def vector_add(x: Tensor, y: Tensor) -> Tensor:
    """Run the operator for autograd and ``torch.compile``: the Triton kernel where it can run, else the
    reference."""
    return triton_add(x, y) if runs_triton(x, y) else reference(x, y)


@vector_add.register_fake
def _(x: Tensor, y: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    return grad, grad.clone()


vector_add.register_autograd(_backward)


def cost(x: Tensor, y: Tensor) -> Cost:
    """Count one FLOP an element."""
    return Cost(x.numel(), x.nbytes + y.nbytes, x.nbytes)


def _examples() -> Sequence[dict[str, Any]]:
    made = [{"x": sample(*shape), "y": sample(*shape, seed=1)} for shape in ((5000,), (3, 5, 7), (1,), (0,), (4, 0))]
    return [*made, {"x": torch.tensor([3e38, -3e38, 1e-38]), "y": torch.tensor([-1e38, 1e38, 1e-38])}]


def _peer(x: Tensor, y: Tensor) -> Tensor:
    return x + y


def _cases() -> Sequence[Case]:
    def case(name: str, rows: int, width: int, only: tuple[str, ...]) -> Case:
        def make(device: torch.device, seed: int) -> Mapping[str, Any]:
            generator = torch.Generator(device).manual_seed(seed)
            x, y = torch.randn(2, rows, width, device=device, dtype=torch.bfloat16, generator=generator)
            return {"x": x, "y": y}

        return Case(f"residual of {name}, {rows} tokens", make, only=only)

    made = [case(shapes.LLAMA_8B.name, shapes.rows_for_bytes(2 * shapes.LLAMA_8B.dim), shapes.LLAMA_8B.dim, ())]
    for name, model in shapes.by_size(lambda model: model.dim):
        made += [case(name, rows, model.dim, ("triton", "torch")) for rows in shapes.DECODE_ROWS]
    return made


def _trace() -> KernelTrace:
    """Trace five programs with tiles of 8, over 37 elements."""
    return KernelTrace(
        lambda: {"x": sample(37), "y": sample(37, seed=1)},
        functools.partial(triton_add, config={"block": 8, "warps": 1}),
        watch=("_add_kernel", "index", "inside", "x", "y"),
        note="Each element has one program. 37 is not a multiple of 8: look at the last one (--program 4), whose mask "
        "leaves 3 elements off.",
    )


def _kernels() -> Sequence[Kernel]:
    arguments = {"x_ptr": "*bf16", "y_ptr": "*bf16", "z_ptr": "*bf16", "n": "i32"}
    return [Kernel("add", _add_kernel, arguments, {"BLOCK": 2048}, divisible=("n",))]


register(
    Op(
        name="vector_add",
        reference=reference,
        cost=cost,
        implementations={
            "triton": in_triton(triton_add, batch_invariant=True, autograd=vector_add),
            "cuda": cuda.in_cuda("vector_add", cuda_add, batch_invariant=True, dtypes=("float32",)),
        },
        examples=_examples,
        peers={"torch": _peer, "torch.compile": compiled(_peer)},
        differentiable=("x", "y"),
        cases=_cases,
        kernels=_kernels,
        trace=_trace,
        knobs=lambda: [
            Knobs(
                "vector_add",
                {"block": (1024, 2048, 4096, 8192), "warps": (4, 8)},
                flat_rule,
                triton_add,
                dict,
                lambda inputs: inputs["x"].numel(),
            )
        ],
    )
)
