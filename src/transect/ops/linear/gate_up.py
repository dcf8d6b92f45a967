r"""The first half of a gated MLP: one product with the joined gate and up weights, and the gate.

    [A, B] = X [V, W]^T + [c, b]        Y = silu(A) * B

Shapes: x ``[T, D]``, weight ``[2 F, D]`` (V above W), bias ``[2 F]`` or None, result ``[T, F]``, all of one dtype.
Inference only; training computes it as ``linear`` and ``swiglu``, or ``matmul`` with a gate.

Bound by bytes for few rows (the weights, read once), by arithmetic from a few hundred on. For many rows the gate is
part of the product's epilogue (``many_rows/matmul.py``), which saves writing and reading ``[T, 2 F]``; where its tiles
would leave much of a GPU idle, cuBLAS multiplies and another launch applies the gate. For few rows the product is cut
along K and its parts are added up at the end, so the gate is a kernel of its own: it moves ``3 T F`` elements, 1 % of
the weights at 16 rows of an 8B model. On Hopper up to 256 rows both are one launch for the weights where that was
quicker (``few_rows/cuda.py``, ``few_rows/hopper.py``, ``few_rows/triton.py``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...costs.work import Cost
from .. import shapes
from ..activation import swiglu
from ..lang.jit import INTERPRETED, TRITON_TARGETS, available, kernel, next_power_of_2, tl
from ..lang.tiles import after_previous
from ..numerics import compute_dtype, sample
from ..registry import Case, Implementation, Kernel, Op, in_torch, register
from .linear import fixed_rows


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``silu(gate) * up`` of x ``[T, D]``, weight ``[2 F, D]``, bias ``[2 F]`` -> ``[T, F]`` in x's dtype."""
    dtype = compute_dtype(x.dtype)
    both = x.to(dtype) @ weight.to(dtype).T
    if bias is not None:
        both = both + bias.to(dtype)
    gate, up = both.chunk(2, dim=-1)
    return (gate * gate.sigmoid() * up).to(x.dtype)


def by_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``reference`` through ``linear``; the product is rounded to x's dtype before the gate."""
    gate, up = torch.nn.functional.linear(x, weight, bias).chunk(2, dim=-1)
    return swiglu.by_exp(gate, up)


def by_fixed_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``by_linear`` with ``linear.fixed_rows``: a row's result does not depend on the others."""
    gate, up = fixed_rows(x, weight, bias).chunk(2, dim=-1)
    return swiglu.by_exp(gate, up)


@kernel
def _halves(both, out, F, TURNS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute part of one row (axis 0): ``[T, 2 F]`` -> ``[T, F]``, both contiguous."""
    after_previous(DEPENDENT_LAUNCH)
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < F
    place, apart = (column // TURNS * 2 * TURNS + column % TURNS, TURNS) if TURNS else (column, F)
    gate = tl.load(both + row * 2 * F + place, inside, 0.0).to(tl.float32)
    up = tl.load(both + row * 2 * F + place + apart, inside, 0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp2(-1.4426950408889634 * gate)) * up
    tl.store(out + row * F + column, y.to(out.dtype.element_ty), inside)


def gate_halves(both: Tensor, *, turns: int = 0, dependent_launch: bool = False) -> Tensor:
    """Compute ``silu(first half) * second half`` of ``[T, 2 F]`` -> ``[T, F]``.

    ``turns``: the halves alternate in groups of this many columns, a power of two, instead of one after the other.
    ``dependent_launch``: begin while the kernel before still runs (Hopper).
    """
    rows, width = both.shape[0], both.shape[1] // 2
    out = both.new_empty((rows, width))
    if out.numel() == 0:
        return out
    block = 64 if INTERPRETED else min(1024, next_power_of_2(width))
    options: dict[str, Any] = {"launch_pdl": True} if dependent_launch else {}
    _halves[(rows, -(-width // block))](
        both, out, width, TURNS=turns, BLOCK=block, DEPENDENT_LAUNCH=dependent_launch, num_warps=4, **options
    )
    return out


def best_launcher() -> Callable[..., Tensor]:
    """Load the kernels of ``few_rows/small_matmul.py`` for few rows, and those of ``many_rows/matmul.py`` for more."""
    from .few_rows import small_matmul
    from .many_rows import matmul
    from .many_rows.tiling import cublas_is_quicker, leaves_idle

    few = available(small_matmul.best_launcher())()
    at_once = small_matmul.gated_launcher()

    def gate_up(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, dependent_launch: bool = False) -> Tensor:
        """Compute ``reference`` on the GPU. ``dependent_launch``: the weight may be read while the previous kernel
        still runs."""
        if x.shape[0] <= small_matmul.MOST_ROWS:
            y = at_once(x, weight, dependent_launch=dependent_launch) if bias is None else None
            return (
                gate_halves(few(x, weight, bias, dependent_launch=dependent_launch), dependent_launch=dependent_launch)
                if y is None
                else y
            )
        if cublas_is_quicker(x, weight) and (bias is not None or leaves_idle(len(x), weight.shape[0] // 2, x.device)):
            return gate_halves(torch.nn.functional.linear(x, weight, bias), dependent_launch=dependent_launch)
        if bias is not None:
            return gate_halves(matmul.matmul(x, weight, bias), dependent_launch=dependent_launch)
        gate, up = weight.chunk(2)
        return matmul.matmul(x, up, gate=gate)

    return gate_up


def _triton_fixed() -> Callable[..., Tensor]:
    """Load the products in a fixed order of sums, for many and for few rows."""
    from .few_rows.invariant import InvariantRows

    products = InvariantRows()
    available(products.gated)()

    def gate_up(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, dependent_launch: bool = False) -> Tensor:
        """Compute ``reference`` on the GPU; a row's result does not depend on the number of rows."""
        if bias is None:
            return products.gated(x, weight, dependent_launch=dependent_launch)
        both = products.linear(x, weight, bias, dependent_launch=dependent_launch)
        return gate_halves(both, dependent_launch=dependent_launch)

    return gate_up


def cost(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Cost:
    """Count the product, and 5 FLOPs for each output."""
    tokens, both = x.shape[0], weight.shape[0]
    flops = 2 * tokens * weight.numel() + 5 * tokens * both // 2 + (0 if bias is None else tokens * both)
    read = x.nbytes + weight.nbytes + (0 if bias is None else bias.nbytes)
    return Cost(flops, read, tokens * both // 2 * x.element_size())


def _examples() -> Sequence[dict[str, Any]]:
    def inputs(tokens: int, dim: int, width: int, bias: bool) -> dict[str, Any]:
        made: dict[str, Any] = {
            "x": sample(tokens, dim),
            "weight": 2 * sample(2 * width, dim, seed=1) / math.sqrt(dim),
        }
        return made | {"bias": sample(2 * width, seed=2) if bias else None}

    return [inputs(1, 64, 48, False), inputs(7, 33, 20, True), inputs(3, 16, 1, False), inputs(0, 8, 4, False)]


def _peer(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    gate, up = torch.nn.functional.linear(x, weight, bias).chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def _cases() -> Sequence[Case]:
    cases = []
    for model in (shapes.LLAMA_8B, shapes.QWEN3_0_6B):
        for rows in (*shapes.DECODE_ROWS, *shapes.PREFILL_ROWS):

            def make(device: torch.device, seed: int, model: Any = model, rows: int = rows) -> Mapping[str, Any]:
                generator = torch.Generator(device).manual_seed(seed)

                def normal(*shape: int) -> Tensor:
                    return torch.randn(*shape, device=device, dtype=torch.bfloat16, generator=generator)

                weight = normal(2 * model.ffn_dim, model.dim) / math.sqrt(model.dim)
                return {"x": normal(rows, model.dim), "weight": weight, "bias": None}

            cases.append(Case(f"{model.name}, {rows} tokens", make))
    return cases


def _kernels() -> Sequence[Kernel]:
    arguments = {"both": "*bf16", "out": "*bf16", "F": "i32"}
    return [Kernel("halves", _halves, arguments, {"TURNS": 0, "BLOCK": 1024, "DEPENDENT_LAUNCH": False}, ("F",))]


register(
    Op(
        name="gate_up",
        reference=reference,
        cost=cost,
        implementations={
            "torch": in_torch(by_linear),
            "torch_fixed_rows": in_torch(by_fixed_rows, batch_invariant=True),
            "triton": Implementation("triton", best_launcher, TRITON_TARGETS),
            "triton_fixed_rows": Implementation("triton", _triton_fixed, TRITON_TARGETS, batch_invariant=True),
        },
        examples=_examples,
        peers={"torch": _peer},
        cases=_cases,
        kernels=_kernels,
    )
)
