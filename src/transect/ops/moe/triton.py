"""The kernels of ``grouped_linear.py`` and ``grouped_gate_up.py``.

Tiles of rows are dealt out on the device: expert e needs ``ceil(rows of e / BM)`` of them, and a program finds its
expert from the running sum of these. The grid holds as many tiles as any routing can need, ``R / BM + min(E, R)``. So
it follows from shapes alone and a CUDA graph can capture it; programs without a tile end at once. Those that share a
tile of rows follow one another, so that the rows are read from memory once, and the expert once for its few tiles.

Shapes: R sorted rows, E experts, O outputs and I inputs of each.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...hardware.device import target_of
from ..lang.jit import INTERPRETED, kernel, next_power_of_2, require, tl
from ..lang.tiles import dot

GroupedTiling = tuple[int, int, int, int]
"""BM, BN, BK, warps."""
WEIGHT_GRADIENT: dict[bool, GroupedTiling] = {False: (128, 128, 64, 8), True: (64, 64, 32, 4)}
"""Outputs, inputs and rows of a tile, and warps; by whether numbers are wider than 16 bits."""


FIXED: dict[bool, GroupedTiling] = {False: (64, 64, 64, 4), True: (16, 64, 32, 4)}
"""For every number of rows, by whether numbers are wider than 16 bits: a row's products are then always added in one
order, by one instruction (Hopper's for 16 bits takes 64 rows)."""


def tiling(rows: int, experts: int, gated: bool = False, fixed: torch.dtype | None = None) -> GroupedTiling:
    """Choose a tiling by the average number of rows of an expert; not tuned on any device yet.

    Args:
        gated: for two products at once.
        fixed: of numbers of this type, and such that a row's result does not depend on the other rows.
    """
    if INTERPRETED:
        return 16, 16, 16, 4
    if fixed is not None:
        return FIXED[fixed.itemsize > 2]
    each = rows / max(1, experts)
    if each <= 16:
        return 16, 32 if gated else 64, 128, 4
    if gated and each <= 96:
        return 64, 64, 64, 4
    if each <= 96:
        return 64, 128, 64, 4
    if target_of().bulk_copies:
        return 128, 128, 64, 8
    return (64, 128, 64, 8) if gated else (128, 128, 32, 8)


@kernel
def expert_of_tile(starts, tile, E, BM: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return (expert, first row, end of the expert's rows) of a tile; the expert is E if there is no such tile."""
    e = tl.arange(0, WIDTH)
    first = tl.load(starts + e, e < E, 0)
    last = tl.load(starts + e + 1, e < E, 0)
    tiles = (last - first + BM - 1) // BM
    ends = tl.cumsum(tiles, 0)
    expert = tl.sum(((ends <= tile) & (e < E)).to(tl.int32), 0)
    mine = e == expert
    row = tl.sum(tl.where(mine, first + (tile - ends + tiles) * BM, 0), 0)
    return expert, row, tl.sum(tl.where(mine, last, 0), 0)


@kernel
def rows_of_tile(order, row, end, k_choices, BM: tl.constexpr, ORDERED: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return BM rows from ``row`` on, a mask of those before ``end``, and the row of x that each reads."""
    r = row + tl.arange(0, BM)
    inside = r < end
    source = r
    if ORDERED:
        source = tl.load(order + r, inside, 0) // k_choices
    return r, inside, source


@kernel
def _row_of_nobody(starts, tile, E, BM: tl.constexpr, WIDTH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the first row of a tile after those of all experts: of rows that belong to none."""
    e = tl.arange(0, WIDTH)
    first = tl.load(starts + e, e < E, 0)
    last = tl.load(starts + e + 1, e < E, 0)
    return tl.load(starts + E) + (tile - tl.sum((last - first + BM - 1) // BM, 0)) * BM


@kernel
def _grouped_product(  # type: ignore[no-untyped-def]
    x, weight, bias, x2, weight2, starts, order, out, N, K, E, k_choices, R,
    TRANSPOSED: tl.constexpr, ORDERED: tl.constexpr, BIAS: tl.constexpr, TWO: tl.constexpr, ZEROS: tl.constexpr,
    WIDTH: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute ``out[r, n] = sum_k x[r, k] weight[expert of r, n, k]``, and the bias; ``[.., k, n]`` if TRANSPOSED. With
    TWO the same of ``x2`` and ``weight2`` is added. With ZEROS the rows that belong to no expert, up to R, are 0; there
    must be enough programs for the tiles of these too."""
    expert, row, end = expert_of_tile(starts, tl.program_id(1), E, BM, WIDTH)
    if ZEROS:  # noqa: SIM102  (a constant, without which nothing of this is compiled)
        if expert >= E:
            r = _row_of_nobody(starts, tl.program_id(1), E, BM, WIDTH) + tl.arange(0, BM)
            n = tl.program_id(0) * BN + tl.arange(0, BN)
            place = out + r.to(tl.int64)[:, None] * N + n[None, :]
            tl.store(place, tl.zeros([BM, BN], out.dtype.element_ty), (r < R)[:, None] & (n < N)[None, :])
    if expert < E:
        r, inside, source = rows_of_tile(order, row, end, k_choices, BM, ORDERED)
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        at = expert.to(tl.int64) * N * K
        if TRANSPOSED:
            at += n[None, :]
        else:
            at += n[None, :] * K
        acc = tl.zeros([BM, BN], tl.float32)
        for start in range(0, K, BK):
            k = start + tl.arange(0, BK)
            rows = source.to(tl.int64)[:, None] * K + k[None, :]
            there = inside[:, None] & (k < K)[None, :]
            step = k[:, None] * N if TRANSPOSED else k[:, None]
            wanted = (n < N)[None, :] & (k < K)[:, None]
            acc = dot(tl.load(x + rows, there, 0.0), tl.load(weight + at + step, wanted, 0.0), acc)
            if TWO:
                acc = dot(tl.load(x2 + rows, there, 0.0), tl.load(weight2 + at + step, wanted, 0.0), acc)
        if BIAS:
            acc += tl.load(bias + expert * N + n, n < N, 0.0).to(tl.float32)[None, :]
        place = out + r.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(place, acc.to(out.dtype.element_ty), inside[:, None] & (n < N)[None, :])


@kernel
def _grouped_gate_up(  # type: ignore[no-untyped-def]
    x, gate, up, starts, order, out, gates, ups, N, K, E, k_choices,
    ORDERED: tl.constexpr, SAVE: tl.constexpr, WIDTH: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute ``out[r, n] = silu(sum_k x[r, k] gate[expert of r, n, k]) * sum_k x[r, k] up[expert of r, n, k]``; with
    SAVE store the two sums too, for the backward pass."""
    expert, row, end = expert_of_tile(starts, tl.program_id(1), E, BM, WIDTH)
    if expert < E:
        r, inside, source = rows_of_tile(order, row, end, k_choices, BM, ORDERED)
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        at = expert.to(tl.int64) * N * K + n[None, :] * K
        g = tl.zeros([BM, BN], tl.float32)
        u = tl.zeros([BM, BN], tl.float32)
        for start in range(0, K, BK):
            k = start + tl.arange(0, BK)
            a = tl.load(x + source.to(tl.int64)[:, None] * K + k[None, :], inside[:, None] & (k < K)[None, :], 0.0)
            there = (n < N)[None, :] & (k < K)[:, None]
            g = dot(a, tl.load(gate + at + k[:, None], there, 0.0), g)
            u = dot(a, tl.load(up + at + k[:, None], there, 0.0), u)
        y = g / (1.0 + tl.exp(-g)) * u
        place = r.to(tl.int64)[:, None] * N + n[None, :]
        there = inside[:, None] & (n < N)[None, :]
        tl.store(out + place, y.to(out.dtype.element_ty), there)
        if SAVE:
            tl.store(gates + place, g.to(gates.dtype.element_ty), there)
            tl.store(ups + place, u.to(ups.dtype.element_ty), there)


@kernel
def _weight_gradient(  # type: ignore[no-untyped-def]
    g, x, starts, order, dw, db, O, I, k_choices,
    ORDERED: tl.constexpr, BIAS: tl.constexpr, BO: tl.constexpr, BI: tl.constexpr, BR: tl.constexpr,
):  # fmt: skip
    """Compute ``dw[e, o, i] = sum over rows of e of g[r, o] x[r, i]``; an expert without rows gets zeros. The programs
    of an expert are consecutive, so that its rows are read from memory once."""
    expert = tl.program_id(2)
    o = tl.program_id(1) * BO + tl.arange(0, BO)
    i = tl.program_id(0) * BI + tl.arange(0, BI)
    first, last = tl.load(starts + expert), tl.load(starts + expert + 1)
    acc = tl.zeros([BO, BI], tl.float32)
    total = tl.zeros([BO], tl.float32)
    for start in range(first, last, BR):
        r = start + tl.arange(0, BR)
        inside = r < last
        source = r
        if ORDERED:
            source = tl.load(order + r, inside, 0) // k_choices
        a = tl.load(g + r.to(tl.int64)[None, :] * O + o[:, None], inside[None, :] & (o < O)[:, None], 0.0)
        b = tl.load(x + source.to(tl.int64)[:, None] * I + i[None, :], inside[:, None] & (i < I)[None, :], 0.0)
        acc = dot(a, b, acc)
        if BIAS:
            total += tl.sum(a.to(tl.float32), 1)
    row = expert.to(tl.int64) * O + o
    tl.store(dw + row[:, None] * I + i[None, :], acc.to(dw.dtype.element_ty), (o < O)[:, None] & (i < I)[None, :])
    if BIAS:
        tl.store(db + row, total.to(db.dtype.element_ty), (o < O) & (tl.program_id(0) == 0))


def triton_grouped_linear(
    x: Tensor, weight: Tensor, starts: Tensor, order: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Compute ``grouped_linear.reference`` in Triton; can be captured in a CUDA graph."""
    experts = len(starts) - 1
    outputs, inputs = weight.shape[0] // experts, weight.shape[1]
    return _run(x, weight.contiguous(), starts, order, bias, outputs, inputs, False)


def triton_fixed_grouped_linear(
    x: Tensor, weight: Tensor, starts: Tensor, order: Tensor | None = None, bias: Tensor | None = None
) -> Tensor:
    """Compute ``triton_grouped_linear``, where a row's result does not depend on the other rows."""
    experts = len(starts) - 1
    outputs, inputs = weight.shape[0] // experts, weight.shape[1]
    return _run(x, weight.contiguous(), starts, order, bias, outputs, inputs, False, fixed=True)


def triton_grouped_gate_up(x: Tensor, gate: Tensor, up: Tensor, starts: Tensor, order: Tensor | None = None) -> Tensor:
    """Compute ``grouped_gate_up.reference`` in Triton; can be captured in a CUDA graph."""
    return gate_up_and_sums(x, gate, up, starts, order, save=False)[0]


def triton_fixed_grouped_gate_up(
    x: Tensor, gate: Tensor, up: Tensor, starts: Tensor, order: Tensor | None = None
) -> Tensor:
    """Compute ``triton_grouped_gate_up``, where a row's result does not depend on the other rows."""
    return gate_up_and_sums(x, gate, up, starts, order, save=False, fixed=True)[0]


def gate_up_and_sums(
    x: Tensor, gate: Tensor, up: Tensor, starts: Tensor, order: Tensor | None, *, save: bool = True, fixed: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """Return (result, gate's products, up's products), ``[R, O]`` each; without ``save`` the last two are the first.
    ``fixed``: see ``FIXED``."""
    require("grouped_gate_up", x, gate, up)
    x, gate, up = x.contiguous(), gate.contiguous(), up.contiguous()
    experts = len(starts) - 1
    rows = len(x) if order is None else len(order)
    n, k = gate.shape[0] // experts, gate.shape[1]
    out = x.new_empty(rows, n)
    gates, ups = (torch.empty_like(out), torch.empty_like(out)) if save else (out, out)
    if rows and n:
        bm, bn, bk, warps = tiling(rows, experts, gated=True, fixed=x.dtype if fixed else None)
        tiles = rows // bm + min(experts, rows)
        _grouped_gate_up[(-(-n // bn), tiles)](
            x, gate, up, starts, starts if order is None else order, out, gates, ups,
            n, k, experts, 1 if order is None else rows // len(x),
            ORDERED=order is not None, SAVE=save, WIDTH=next_power_of_2(experts), BM=bm, BN=bn, BK=bk, num_warps=warps,
        )  # fmt: skip
    return out, gates, ups


def triton_input_gradient(
    grad: Tensor, weight: Tensor, starts: Tensor, grad2: Tensor | None = None, weight2: Tensor | None = None
) -> Tensor:
    """Compute dL/dx of the sorted rows, ``[R, I]``; for two gradients, of two products of the same rows.

    Rows that belong to no expert get a gradient of zeros: a token's rows are summed, whichever rank has their experts.
    """
    experts = len(starts) - 1
    outputs, inputs = weight.shape[0] // experts, weight.shape[1]
    return _run(grad, weight.contiguous(), starts, None, None, inputs, outputs, True, grad2, weight2, zeros=True)


def _run(
    x: Tensor,
    weight: Tensor,
    starts: Tensor,
    order: Tensor | None,
    bias: Tensor | None,
    n: int,
    k: int,
    transposed: bool,
    x2: Tensor | None = None,
    weight2: Tensor | None = None,
    fixed: bool = False,
    zeros: bool = False,
) -> Tensor:
    require("grouped_linear", x, weight)
    x = x.contiguous()
    two = x2 is not None and weight2 is not None
    second = (x2.contiguous(), weight2.contiguous()) if x2 is not None and weight2 is not None else (x, weight)
    experts = len(starts) - 1
    rows = len(x) if order is None else len(order)
    out = x.new_empty(rows, n)
    if rows and n:
        bm, bn, bk, warps = tiling(rows, experts, fixed=x.dtype if fixed else None)
        tiles = rows // bm + min(experts, rows) + zeros  # rows of no expert are like those of one more
        _grouped_product[(-(-n // bn), tiles)](
            x, weight, weight if bias is None else bias.contiguous(), *second,
            starts, starts if order is None else order, out,
            n, k, experts, 1 if order is None else rows // len(x), rows if zeros else 0,
            TRANSPOSED=transposed, ORDERED=order is not None, BIAS=bias is not None, TWO=two, ZEROS=zeros,
            WIDTH=next_power_of_2(experts), BM=bm, BN=bn, BK=bk, num_warps=warps,
        )  # fmt: skip
    return out


def triton_weight_gradient(
    grad: Tensor, x: Tensor, starts: Tensor, order: Tensor | None, like: Tensor, biased: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute (dL/dweight, dL/dbias or None); ``like`` is the weight."""
    grad, x = grad.contiguous(), x.contiguous()
    experts = len(starts) - 1
    outputs, inputs = like.shape[0] // experts, like.shape[1]
    dw = like.new_empty(like.shape)
    db = like.new_empty(len(like)) if biased else None
    bo, bi, br, warps = (16, 16, 16, 4) if INTERPRETED else WEIGHT_GRADIENT[grad.dtype.itemsize > 2]
    _weight_gradient[(-(-inputs // bi), -(-outputs // bo), experts)](
        grad, x, starts, starts if order is None else order, dw, dw if db is None else db, outputs, inputs,
        1 if order is None else len(order) // max(1, len(x)),
        ORDERED=order is not None, BIAS=biased, BO=bo, BI=bi, BR=br, num_warps=warps,
    )  # fmt: skip
    return dw, db
