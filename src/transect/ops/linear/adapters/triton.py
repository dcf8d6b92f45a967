"""The kernels of ``add_low_rank.py``: ``low = s A x`` in parts along the inputs, then ``y += B low``.

Shapes: T rows, P parts of R ranks, K inputs; ``low`` ``[splits, T, P, R]`` float32. What the second kernel reads of
``low``, the first has written: both skip the same rows and parts.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from ...lang.jit import INTERPRETED, kernel, kernel_of_numbers, require, tl
from ...lang.tiles import also, dot, let_next_begin, wait_for_previous

FEW = 256
"""Most rows for which each row is a program of its own."""
MOST_SPLITS = 16
SPAN = 512
"""Fewest inputs of a part of the sum."""
A_TILE, B_TILE = 16384, 16384
"""Elements of a factor that a program loads at a time, where a row is a program."""
COLUMNS = 256
"""Outputs of a warp there: a thread has all ranks of eight outputs, so that no sum crosses threads."""
MANY = 2048
"""Rows above which tiles of rows occupy the whole device."""


@kernel
def _outputs_of_tile(tile, N0, N1, N2, BN: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return (part, outputs, a mask of those that belong to the part) of a tile of outputs; no tile has outputs of two
    parts."""
    tiles0 = (N0 + BN - 1) // BN
    tiles1 = tiles0 + (N1 + BN - 1) // BN
    part = (tile >= tiles0).to(tl.int32) + (tile >= tiles1).to(tl.int32)
    first = tl.where(part == 0, 0, tl.where(part == 1, N0, N0 + N1))
    end = tl.where(part == 0, N0, tl.where(part == 1, N0 + N1, N0 + N1 + N2))
    before = tl.where(part == 0, 0, tl.where(part == 1, tiles0, tiles1))
    n = first + (tile - before) * BN + tl.arange(0, BN)
    return part, n, n < end


@kernel
def _factors_of(slots_ptr, scale_ptr, t, part, P: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return (slot, scale) of row t; a slot below 0 if it has no factors. No kernel of a step's layers writes these."""
    slot = tl.load(slots_ptr + t)
    scale = tl.load(scale_ptr + slot * P + part, slot >= 0, 0.0)
    return tl.where(scale != 0.0, slot, -1), scale


@kernel
def _low_of(low_ptr, n_rows, t, part, P: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return ``s A x`` of one row and part, its parts added in one order."""
    low = tl.zeros([R], tl.float32)
    for split in tl.static_range(SPLITS):
        low += tl.load(low_ptr + ((split * n_rows + t).to(tl.int64) * P + part) * R + tl.arange(0, R))
    return low


@kernel_of_numbers("n_rows")
def shrink_rows(  # type: ignore[no-untyped-def]
    x_ptr, a_ptr, scale_ptr, slots_ptr, low_ptr, n_rows, K, x_row, span,
    P: tl.constexpr, R: tl.constexpr, BK: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Compute one row, one part and ``span`` of its inputs a program. The first BK of A arrive before x is there."""
    let_next_begin(DEPENDENT_LAUNCH)
    t, part, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    slot, scale = _factors_of(slots_ptr, scale_ptr, t, part, P)
    begin, end = split * span, tl.minimum(K, (split + 1) * span)
    r, k = tl.arange(0, R), begin + tl.arange(0, BK)
    row = a_ptr + ((slot * P + part).to(tl.int64) * R + r)[:, None] * K
    a = tl.load(row + k[None, :], also((k < end)[None, :], slot >= 0), 0.0)
    wait_for_previous(DEPENDENT_LAUNCH)  # in every program: the end of this kernel is that of those before it
    if slot >= 0:
        x_ptr += t.to(tl.int64) * x_row
        acc = a.to(tl.float32) * tl.load(x_ptr + k, k < end, 0.0).to(tl.float32)[None, :]
        for start in range(begin + BK, end, BK):
            k = start + tl.arange(0, BK)
            x = tl.load(x_ptr + k, k < end, 0.0).to(tl.float32)
            acc += tl.load(row + k[None, :], (k < end)[None, :], 0.0).to(tl.float32) * x[None, :]
        low = low_ptr + ((split * n_rows + t).to(tl.int64) * P + part) * R
        tl.store(low + r, tl.sum(acc, 1) * scale)


@kernel_of_numbers("n_rows")
def expand_rows(  # type: ignore[no-untyped-def]
    y_ptr, b_ptr, scale_ptr, slots_ptr, low_ptr, n_rows, N0, N1, N2, y_row,
    P: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr, BN: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Compute one row and BN of its outputs a program. B arrives before y and ``low`` are there."""
    let_next_begin(DEPENDENT_LAUNCH)
    t = tl.program_id(0)
    part, n, inside = _outputs_of_tile(tl.program_id(1), N0, N1, N2, BN)
    slot, _ = _factors_of(slots_ptr, scale_ptr, t, part, P)
    r = tl.arange(0, R)
    row = b_ptr + (slot.to(tl.int64) * R + r)[:, None] * (N0 + N1 + N2)
    b = tl.load(row + n[None, :], also(inside[None, :], slot >= 0), 0.0)
    wait_for_previous(DEPENDENT_LAUNCH)
    if slot >= 0:
        place = y_ptr + t.to(tl.int64) * y_row + n
        y = tl.load(place, inside, 0.0).to(tl.float32)
        low = _low_of(low_ptr, n_rows, t, part, P, R, SPLITS)
        y += tl.sum(b.to(tl.float32) * low[:, None], 0)
        tl.store(place, y.to(y_ptr.dtype.element_ty), inside)


@kernel_of_numbers("n_rows")
def shrink_tiles(  # type: ignore[no-untyped-def]
    x_ptr, a_ptr, scale_ptr, slots_ptr, low_ptr, n_rows, K, x_row, span,
    P: tl.constexpr, R: tl.constexpr, BT: tl.constexpr, BK: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Compute BT rows, one part and ``span`` of the inputs a program: one product for each adapter that the rows
    have."""
    wait_for_previous(DEPENDENT_LAUNCH)
    let_next_begin(DEPENDENT_LAUNCH)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    part, split = tl.program_id(1), tl.program_id(2)
    left = tl.load(slots_ptr + t, t < n_rows, -1)
    slot = tl.max(left, 0)
    while slot >= 0:
        own = left == slot
        scale = tl.load(scale_ptr + slot * P + part)
        if scale != 0.0:
            r = tl.arange(0, R)
            row = a_ptr + ((slot * P + part).to(tl.int64) * R + r)[None, :] * K
            acc = tl.zeros([BT, R], tl.float32)
            for start in range(split * span, tl.minimum(K, (split + 1) * span), BK):
                k = start + tl.arange(0, BK)
                inside = k < tl.minimum(K, (split + 1) * span)
                x = tl.load(x_ptr + t.to(tl.int64)[:, None] * x_row + k[None, :], own[:, None] & inside[None, :], 0.0)
                acc = dot(x, tl.load(row + k[:, None], inside[:, None], 0.0), acc)
            low = low_ptr + ((split * n_rows + t).to(tl.int64) * P + part)[:, None] * R
            tl.store(low + r[None, :], acc * scale, own[:, None])
        left = tl.where(own, -1, left)
        slot = tl.max(left, 0)


@kernel_of_numbers("n_rows")
def expand_tiles(  # type: ignore[no-untyped-def]
    y_ptr, b_ptr, scale_ptr, slots_ptr, low_ptr, n_rows, N0, N1, N2, y_row,
    P: tl.constexpr, R: tl.constexpr, SPLITS: tl.constexpr, BT: tl.constexpr, BN: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Compute BT rows and BN of their outputs a program: one product for each adapter that the rows have."""
    wait_for_previous(DEPENDENT_LAUNCH)
    let_next_begin(DEPENDENT_LAUNCH)
    t = tl.program_id(0) * BT + tl.arange(0, BT)
    part, n, inside = _outputs_of_tile(tl.program_id(1), N0, N1, N2, BN)
    left = tl.load(slots_ptr + t, t < n_rows, -1)
    slot = tl.max(left, 0)
    while slot >= 0:
        own = left == slot
        if tl.load(scale_ptr + slot * P + part) != 0.0:
            r = tl.arange(0, R)
            low = tl.zeros([BT, R], tl.float32)
            for split in tl.static_range(SPLITS):
                place = low_ptr + ((split * n_rows + t).to(tl.int64) * P + part)[:, None] * R
                low += tl.load(place + r[None, :], own[:, None], 0.0)
            row = b_ptr + (slot.to(tl.int64) * R + r)[:, None] * (N0 + N1 + N2)
            b = tl.load(row + n[None, :], inside[None, :], 0.0)
            place = y_ptr + t.to(tl.int64)[:, None] * y_row + n[None, :]
            there = own[:, None] & inside[None, :]
            y = dot(low.to(b.dtype), b, tl.load(place, there, 0.0).to(tl.float32))
            tl.store(place, y.to(y_ptr.dtype.element_ty), there)
        left = tl.where(own, -1, left)
        slot = tl.max(left, 0)


def triton_add_low_rank(
    y: Tensor | Callable[[], Tensor],
    x: Tensor,
    a: Tensor,
    b: Tensor,
    scale: Tensor,
    slots: Tensor,
    sizes: tuple[int, ...],
    *,
    dependent_launch: bool = False,
    few: int = FEW,
) -> Tensor:
    """Compute ``reference`` in two launches.

    Args:
        y: if a function, it is called between both launches.
        dependent_launch: begin while the kernel before still runs (Hopper), and read factors then. The kernel before
            the first one may write neither ``slots`` nor factors.
        few: rows up to which each is a program of its own.

    Raises:
        ValueError: more than three parts, or a rank that is not a power of two of at least 16.
    """
    require("add_low_rank", x, a, b)
    rows, inputs, rank, parts = len(x), x.shape[1], b.shape[1], len(sizes)
    if parts > 3 or rank < 16 or rank & (rank - 1):
        raise ValueError(f"add_low_rank: up to 3 parts of a rank 16, 32, 64 ...; got {parts} parts of rank {rank}")
    if not rows or not len(a):
        return y() if callable(y) else y
    alone = rows <= few
    height = 1 if alone else 16
    tiles = -(-rows // height)
    most = max(1, min(MOST_SPLITS, inputs // SPAN))
    if not alone:  # two numbers, so that few kernels are compiled
        most = min(most, 4) if rows <= MANY else 1
    deep, across = (A_TILE // rank, B_TILE // rank) if alone else (128, 128) if rank <= 32 else (64, 64)
    warps = max(1, min(8, across // COLUMNS)) if alone else 4
    if INTERPRETED:
        deep, across = 16, 16
    span = deep * -(-inputs // (most * deep))
    splits = -(-inputs // span)
    low = torch.empty(splits, rows, parts, rank, dtype=torch.float32, device=x.device)
    x = x if x.stride(1) == 1 else x.contiguous()
    a, b, scale, slots = a.contiguous(), b.contiguous(), scale.contiguous(), slots.contiguous()
    n = (*sizes, 0, 0)[:3]
    shared = {"P": parts, "R": rank, "DEPENDENT_LAUNCH": dependent_launch}
    shared |= {"launch_pdl": True} if dependent_launch else {}
    held = {} if alone else {"BT": height}
    shrink, expand = (shrink_rows, expand_rows) if alone else (shrink_tiles, expand_tiles)
    shrink[(tiles, parts, splits)](
        x, a, scale, slots, low, rows, inputs, x.stride(0), span, BK=deep, num_warps=4, **held, **shared
    )
    whole = y() if callable(y) else y
    out = whole if whole.stride(1) == 1 else whole.contiguous()
    expand[(tiles, sum(-(-size // across) for size in sizes))](
        out, b, scale, slots, low, rows, *n, out.stride(0), SPLITS=splits, BN=across, num_warps=warps, **held, **shared
    )
    return whole if out is whole else whole.copy_(out)


triton_each_row = partial(triton_add_low_rank, few=2**31)
"""``triton_add_low_rank`` where a row's result does not depend on the others."""
