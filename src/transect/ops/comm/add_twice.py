"""A sum that is written to two places: in a gradient, and in the memory that another rank reads.

    first = second = a + b        and where they are asked for, sums of the squares of that, one for each BLOCK numbers

Apart, an add would write the sum once, and a copy read it again: two reads and two writes in one launch, in place of
three reads and two writes in two. The sum is rounded once, so both places hold the bits of ``torch.add``. Squares are
of the rounded sum, at no further bytes: the norm of gradients needs no pass of its own.

Shapes: contiguous vectors ``[n]`` of one dtype, float32 or 16 bits; squares float32 ``[n / BLOCK]``, rounded up.
``first`` may be a or b; ``second`` overlaps none. Both, and squares, change in place; no gradient.

Bound by bytes: one FLOP for two reads and two writes, 1/8 FLOP per byte in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...costs.work import Cost
from ..lang.jit import in_triton, kernel, require, runs_triton, tl
from ..numerics import compute_dtype, sample
from ..registry import Case, Kernel, Op, in_torch, register

BLOCK = 4096


def reference(a: Tensor, b: Tensor, first: Tensor, second: Tensor, squares: Tensor | None = None) -> None:
    """Write the sum to ``first`` and ``second``."""
    total = a.to(compute_dtype(a.dtype)) + b.to(compute_dtype(a.dtype))
    first.copy_(total)
    second.copy_(first)
    if squares is not None:
        for place, part in zip(squares, first.to(compute_dtype(a.dtype)).split(BLOCK), strict=False):
            place.copy_(part.square().sum())


@kernel
def _add_twice(  # type: ignore[no-untyped-def]
    a, b, first, second, squares, n, SQUARES: tl.constexpr, BLOCK: tl.constexpr
):
    """Add BLOCK numbers a program."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.load(a + at, inside, 0.0).to(tl.float32) + tl.load(b + at, inside, 0.0).to(tl.float32)
    rounded = total.to(first.dtype.element_ty)
    tl.store(first + at, rounded, inside)
    tl.store(second + at, rounded, inside)
    if SQUARES:
        rounded = rounded.to(tl.float32)
        tl.store(squares + tl.program_id(0), tl.sum(rounded * rounded, 0))


def refusal(a: Tensor, b: Tensor, first: Tensor, second: Tensor, squares: Tensor | None = None) -> str | None:
    """Return the reason, as a sentence, why the kernel does not take these vectors; None if it does."""
    for x in (a, b, first, second):
        if x.shape != a.shape or x.dtype != a.dtype or x.dim() != 1 or not x.is_contiguous():
            return (
                f"add_twice: contiguous vectors of one size and dtype are needed; got {x.dtype} {list(x.shape)} beside "
                f"{a.dtype} {list(a.shape)}"
            )
    if squares is not None and (squares.dtype != torch.float32 or len(squares) < -(-len(a) // BLOCK)):
        found = f"{squares.dtype} {list(squares.shape)}"
        return f"add_twice: squares are float32, one for each {BLOCK} numbers; got {found}"
    return None


def triton_add_twice(a: Tensor, b: Tensor, first: Tensor, second: Tensor, squares: Tensor | None = None) -> None:
    """Compute ``reference`` in one launch.

    Raises:
        ValueError: ``refusal`` gives the reason.
    """
    require("add_twice", a, b, first, second)
    reason = refusal(a, b, first, second, squares)
    if reason:
        raise ValueError(reason)
    if len(a):
        _add_twice[(-(-len(a) // BLOCK),)](
            a, b, first, second, a if squares is None else squares, len(a), SQUARES=squares is not None, BLOCK=BLOCK,
            num_warps=8,
        )  # fmt: skip


def add_twice(a: Tensor, b: Tensor, first: Tensor, second: Tensor, squares: Tensor | None = None) -> None:
    """Add by the Triton kernel on a GPU, else by torch; the results are bit-identical."""
    if a.is_cuda and runs_triton(a, b, first, second):
        triton_add_twice(a, b, first, second, squares)
        return
    torch.add(a, b, out=first)
    second.copy_(first)
    if squares is not None:
        for place, part in zip(squares[: -(-len(a) // BLOCK)], first.split(BLOCK), strict=False):
            place.copy_(part.float().square().sum())


def cost(a: Tensor, b: Tensor, first: Tensor, second: Tensor, squares: Tensor | None = None) -> Cost:
    """Count a sum for two reads and two writes, and the cost of the squares."""
    more = 0 if squares is None else squares.nbytes
    return Cost((3 if more else 1) * a.numel(), a.nbytes + b.nbytes, first.nbytes + second.nbytes + more)


def _inputs(n: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    a, b = (sample(n, seed=seed).to(device, dtype) for seed in (0, 1))
    squares = torch.zeros(-(-n // BLOCK), device=device)
    return {"a": a, "b": b, "first": torch.zeros_like(a), "second": torch.zeros_like(a), "squares": squares}


def _examples() -> Sequence[dict[str, Any]]:
    return [_inputs(n) for n in (33, 0, BLOCK + 5)]


def _cases() -> Sequence[Case]:
    def make(device: torch.device, seed: int) -> Mapping[str, Any]:
        return _inputs(2**24, device, torch.bfloat16)

    return [Case("half of a chunk of gradients, 32 MiB", make)]


def _by_add_and_copy(a: Tensor, b: Tensor, first: Tensor, second: Tensor, squares: Tensor | None = None) -> None:
    torch.add(a, b, out=first)
    second.copy_(first)
    if squares is not None:
        squares[:1] = torch.linalg.vector_norm(first, dtype=torch.float32).square()


def _kernels() -> Sequence[Kernel]:
    types = dict.fromkeys(("a", "b", "first", "second"), "*bf16") | {"squares": "*fp32", "n": "i32"}
    return [Kernel("add_twice", _add_twice, types, {"SQUARES": True, "BLOCK": BLOCK}, ("n",), 8)]


register(
    Op(
        name="add_twice",
        reference=reference,
        cost=cost,
        implementations={
            "torch": in_torch(reference, batch_invariant=True),
            "triton": in_triton(triton_add_twice, batch_invariant=True, refusal=refusal),
        },
        examples=_examples,
        peers={"torch, an add and a copy": _by_add_and_copy},
        mutates=("first", "second", "squares"),
        directions=("forward",),
        cases=_cases,
        kernels=_kernels,
    )
)
