"""A sum that is wanted in two places: in a gradient, and in the memory that another rank reads.

    first = second = a + b

Apart, an add would write the sum once, and a copy read it again: two reads and two writes in one launch, in place of
three reads and two writes in two. The sum is rounded once, so both places hold the bits of ``torch.add``.

Shapes: contiguous vectors ``[n]`` of one dtype, float32 or 16 bits. ``first`` may be a or b; ``second`` overlaps none.
Both change in place; no gradient.

Bound by bytes: one FLOP for two reads and two writes, 1/8 FLOP per byte in bfloat16.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..lang.jit import TRITON_TARGETS, available, kernel, require, runs_triton, tl
from ..numerics import compute_dtype, sample
from ..registry import Case, Cost, Implementation, Kernel, Op, register

BLOCK = 4096


def reference(a: Tensor, b: Tensor, first: Tensor, second: Tensor) -> None:
    """Writes the sum to ``first`` and ``second``."""
    total = a.to(compute_dtype(a.dtype)) + b.to(compute_dtype(a.dtype))
    first.copy_(total)
    second.copy_(first)


@kernel
def _add_twice(a, b, first, second, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """BLOCK numbers a program."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < n
    total = tl.load(a + at, inside, 0.0).to(tl.float32) + tl.load(b + at, inside, 0.0).to(tl.float32)
    tl.store(first + at, total.to(first.dtype.element_ty), inside)
    tl.store(second + at, total.to(second.dtype.element_ty), inside)


def refusal(a: Tensor, b: Tensor, first: Tensor, second: Tensor) -> str | None:
    """Why the kernel does not take these vectors, as a sentence, or None."""
    for x in (a, b, first, second):
        if x.shape != a.shape or x.dtype != a.dtype or x.dim() != 1 or not x.is_contiguous():
            return (
                f"add_twice: contiguous vectors of one size and dtype are needed; got {x.dtype} {list(x.shape)} beside "
                f"{a.dtype} {list(a.shape)}"
            )
    return None


def triton_add_twice(a: Tensor, b: Tensor, first: Tensor, second: Tensor) -> None:
    """``reference`` in one launch.

    Raises:
        ValueError: ``refusal`` says why.
    """
    require("add_twice", a, b, first, second)
    reason = refusal(a, b, first, second)
    if reason:
        raise ValueError(reason)
    if len(a):
        _add_twice[(-(-len(a) // BLOCK),)](a, b, first, second, len(a), BLOCK=BLOCK, num_warps=8)


def add_twice(a: Tensor, b: Tensor, first: Tensor, second: Tensor) -> None:
    """On a GPU by the Triton kernel, else by torch; the same bits."""
    if a.is_cuda and runs_triton(a, b, first, second):
        triton_add_twice(a, b, first, second)
    else:
        torch.add(a, b, out=first)
        second.copy_(first)


def cost(a: Tensor, b: Tensor, first: Tensor, second: Tensor) -> Cost:
    """A sum for two reads and two writes."""
    return Cost(a.numel(), a.nbytes + b.nbytes, first.nbytes + second.nbytes)


def _inputs(n: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> dict[str, Any]:
    a, b = (sample(n, seed=seed).to(device, dtype) for seed in (0, 1))
    return {"a": a, "b": b, "first": torch.zeros_like(a), "second": torch.zeros_like(a)}


def _examples() -> Sequence[dict[str, Any]]:
    return [_inputs(n) for n in (33, 0, BLOCK + 5)]


def _cases() -> Sequence[Case]:
    def make(device: torch.device, seed: int) -> Mapping[str, Any]:
        return _inputs(2**24, device, torch.bfloat16)

    return [Case("half of a chunk of gradients, 32 MiB", make)]


def _by_add_and_copy(a: Tensor, b: Tensor, first: Tensor, second: Tensor) -> None:
    torch.add(a, b, out=first)
    second.copy_(first)


def _kernels() -> Sequence[Kernel]:
    types = dict.fromkeys(("a", "b", "first", "second"), "*bf16") | {"n": "i32"}
    return [Kernel("add_twice", _add_twice, types, {"BLOCK": BLOCK}, ("n",), 8)]


register(
    Op(
        name="add_twice",
        reference=reference,
        cost=cost,
        implementations={
            "torch": Implementation("torch", lambda: reference, ("any",), batch_invariant=True),
            "triton": Implementation(
                "triton", available(triton_add_twice), TRITON_TARGETS, batch_invariant=True, refusal=refusal
            ),
        },
        examples=_examples,
        peers={"torch, an add and a copy": _by_add_and_copy},
        mutates=("first", "second"),
        directions=("forward",),
        cases=_cases,
        kernels=_kernels,
    )
)
