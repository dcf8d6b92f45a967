"""The rows of a step sorted by expert: a counting sort in static shapes.

Token t and its j-th choice are pair ``t k + j``. Row r of the sorted step is pair ``order[r]``; pair p is row
``places[p]``; expert e has the rows from ``starts[e]`` to before ``starts[e + 1]``. Pairs of one expert keep their
order, so the same step is sorted the same way on every device.

Two launches: blocks of pairs are counted by expert; then each block adds up the counts of the blocks before it, and
places its pairs. The host reads nothing.

Shapes: experts ``[T, k]`` int32; order and places ``[T k]`` int32, starts ``[E + 1]`` int32. No gradient.
Source: counting sort (Knuth, The Art of Computer Programming, volume 3, section 5.2).

Bound by the two launches: 4 bytes read and 8 written for each pair.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...costs.work import Cost
from ..lang.jit import INTERPRETED, in_triton, kernel, next_power_of_2, runs_triton, tl
from ..registry import Case, Kernel, Op, in_torch, register

BLOCK = 128


def reference(experts: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Sort experts ``[T, k]`` -> (order, places, starts)."""
    pairs = experts.flatten().long()
    order = pairs.argsort(stable=True)
    places = torch.empty_like(order).scatter(0, order, torch.arange(len(order), device=order.device))
    counts = torch.zeros(n_experts, dtype=torch.int64, device=order.device)
    counts = counts.scatter_add(0, pairs, torch.ones_like(pairs))
    starts = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    return order.to(torch.int32), places.to(torch.int32), starts.to(torch.int32)


@kernel
def _count(experts, counts, R, E, WIDTH: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Count the pairs of a block for each expert."""
    r = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, WIDTH)
    mine = tl.load(experts + r, r < R, -1)
    found = tl.sum((mine[:, None] == e[None, :]).to(tl.int32), 0)
    tl.store(counts + tl.program_id(0) * E + e, found, e < E)


@kernel
def _place(  # type: ignore[no-untyped-def]
    experts, counts, order, places, starts, R, E, blocks, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Compute the places of a block's pairs; the first block also writes where experts begin."""
    block = tl.program_id(0)
    e = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.int32)
    before = tl.zeros([WIDTH], tl.int32)
    for other in range(0, blocks):
        here = tl.load(counts + other * E + e, e < E, 0)
        total += here
        before += tl.where(other < block, here, 0)
    end = tl.cumsum(total, 0)
    if block == 0:
        tl.store(starts + e + 1, end, e < E)
        tl.store(starts + e, tl.zeros([WIDTH], tl.int32), e == 0)
    index = tl.arange(0, BLOCK)
    r = block * BLOCK + index
    mine = tl.load(experts + r, r < R, -1)
    others = tl.load(experts + block * BLOCK + tl.arange(0, BLOCK), block * BLOCK + tl.arange(0, BLOCK) < R, -2)
    earlier = (mine[:, None] == others[None, :]) & (tl.arange(0, BLOCK)[None, :] < index[:, None])
    rank = tl.sum(earlier.to(tl.int32), 1)
    base = tl.sum(tl.where(mine[:, None] == e[None, :], (end - total + before)[None, :], 0), 1)
    place = base + rank
    tl.store(places + r, place, r < R)
    tl.store(order + place, r, r < R)


def triton_order(experts: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Compute ``reference`` in Triton; can be captured in a CUDA graph."""
    if experts.dtype != torch.int32:
        raise ValueError(f"expert_order: experts must be int32, not {experts.dtype}")
    experts = experts.contiguous()
    rows = experts.numel()
    order, places = experts.new_empty(rows), experts.new_empty(rows)
    starts = experts.new_zeros(n_experts + 1)
    if rows:
        block = 16 if INTERPRETED else BLOCK
        blocks = -(-rows // block)
        counts = experts.new_empty(blocks, n_experts)
        shape = {"WIDTH": next_power_of_2(n_experts), "BLOCK": block}
        _count[(blocks,)](experts, counts, rows, n_experts, **shape)
        _place[(blocks,)](experts, counts, order, places, starts, rows, n_experts, blocks, **shape, num_warps=8)
    return order, places, starts


@torch.library.custom_op("transect::expert_order", mutates_args=())
def expert_order(experts: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the operator for ``torch.compile``: the Triton kernels where they can run, else the reference."""
    return (triton_order if runs_triton(experts) else reference)(experts, n_experts)


@expert_order.register_fake
def _(experts: Tensor, n_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    rows = experts.numel()
    return experts.new_empty(rows), experts.new_empty(rows), experts.new_empty(n_experts + 1)


def cost(experts: Tensor, n_experts: int) -> Cost:
    """Count bytes; there are no FLOPs."""
    return Cost(0, experts.nbytes, 2 * experts.nbytes + 4 * (n_experts + 1))


def draw(tokens: int, k: int, experts: int, seed: int = 0, device: torch.device | str = "cpu") -> Tensor:
    """Draw k different experts for each token, ``[T, k]`` int32; for examples and measurements."""
    generator = torch.Generator(device).manual_seed(seed)
    return torch.rand(tokens, experts, generator=generator, device=device).argsort(-1)[:, :k].to(torch.int32)


def _examples() -> Sequence[dict[str, Any]]:
    shapes = ((1, 2, 8), (13, 4, 5), (37, 1, 60), (0, 2, 4))
    return [{"experts": draw(tokens, k, n), "n_experts": n} for tokens, k, n in shapes]


def _cases() -> Sequence[Case]:
    def case(tokens: int) -> Case:
        def make(device: torch.device, seed: int) -> Mapping[str, Any]:
            return {"experts": draw(tokens, 8, 128, seed, device), "n_experts": 128}

        return Case(f"qwen3-30b-a3b, {tokens} tokens", make)

    return [case(tokens) for tokens in (1, 64, 8192)]


def _kernels() -> Sequence[Kernel]:
    shape = {"WIDTH": 128, "BLOCK": BLOCK}
    count = {"experts": "*i32", "counts": "*i32", "R": "i32", "E": "i32"}
    place = {"experts": "*i32", "counts": "*i32", "order": "*i32", "places": "*i32", "starts": "*i32"}
    place |= {"R": "i32", "E": "i32", "blocks": "i32"}
    return [Kernel("count", _count, count, shape, ("E",)), Kernel("place", _place, place, shape, ("E",), 8)]


register(
    Op(
        name="expert_order",
        reference=reference,
        cost=cost,
        implementations={
            "torch": in_torch(reference, batch_invariant=True),
            "triton": in_triton(triton_order, batch_invariant=True),
        },
        examples=_examples,
        peers={"torch": reference},
        cases=_cases,
        kernels=_kernels,
    )
)
