"""The Triton kernel of paged attention for rows of one query (decode), with its work shared out evenly.

A program holds the G heads that share one key head of one row, and a piece of the row's positions. Rows have any
length, so the batch decides how they are cut: no piece is longer than the positions of all rows together over the
number of pieces wanted. A longer row is cut into pieces of one length. A row of length 0 is one empty piece, which
writes zeros. The pieces of all rows are numbered, one row after the other. Every program finds its own piece by summing
up the numbers of pieces from the lengths. So the host knows only bounds, and a captured step can be replayed with other
lengths.

A row that was cut is put together from its parts (m, l and o of each piece, see ``paged_attention.py``; flash decoding,
Dao et al. 2023). The piece that finishes last among FAN neighbours merges theirs, and so on with the results, always in
the order of their positions. So the result has the same bits in every run.

Bound by bytes: 4 H d FLOPs for each 2 K d cached elements.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ....hardware.device import target_of
from ....hardware.targets import FP8_TARGETS
from ... import tuning
from ...lang.jit import INTERPRETED, TRITON_TARGETS, kernel, multiprocessors, next_power_of_2, tl
from ...lang.tiles import also, let_next_begin, wait_for_previous
from ...registry import Kernel
from .batch import PagedBatch
from .launch import PLAIN, STRIDES, arguments_of, types_of
from .tile import walk, with_sink


@kernel
def _decode(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, tables, starts, lengths, out, part_o, part_l, arrivals, B, scale2, window, q_t, q_h, cache_b,
    cache_k, table_b, wanted, least, most, sinks, squeeze, span,
    H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, MIXED: tl.constexpr, ROWS: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr, CHUNK: tl.constexpr, FAN: tl.constexpr,
    SINKS: tl.constexpr, CAPPED: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """Attend with the rows of one query. Axis 0: at most ``most`` splits, and for each the key heads. MIXED: the batch
    may hold rows of several queries, which are skipped. ROWS: a power of two that holds the batch's rows. SINKS,
    CAPPED, CHUNKED: see ``tile.py``.

    Lengths and tables are read while the kernel before may still run: it writes neither. They bypass the L1 cache,
    which may hold old values.
    """
    let_next_begin(DEPENDENT_LAUNCH)
    K: tl.constexpr = H // G
    piece = tl.program_id(0) // K
    kv_head = tl.program_id(0) % K
    b = tl.arange(0, ROWS)
    length_b = tl.load(lengths + b, b < B, 0, cache_modifier=".cg")
    token_b = b
    mine_b = b < B
    if MIXED:
        token_b = tl.load(starts + b, b < B, 0, cache_modifier=".cg")
        mine_b = mine_b & (tl.load(starts + b + 1, b < B, 0, cache_modifier=".cg") - token_b == 1)
    low_b = tl.zeros_like(length_b)
    if WINDOW:
        low_b = tl.maximum(length_b - window, 0)
    if CHUNKED:
        low_b = tl.maximum(low_b, tl.maximum(length_b - 1, 0) // span * span)
    low_b = low_b // BN * BN
    seen_b = tl.where(mine_b, length_b - low_b, 0)
    size = tl.maximum(least, tl.cdiv(tl.sum(seen_b, 0), wanted))
    pieces_b = tl.where(mine_b, tl.maximum(tl.cdiv(seen_b, tl.cdiv(size, BN) * BN), 1), 0)
    end_b = tl.cumsum(pieces_b, 0)
    row = tl.minimum(tl.sum((end_b <= piece).to(tl.int32), 0), B - 1)
    here = (b == row) & (piece < end_b)  # nowhere, if there are fewer pieces
    pieces = tl.sum(tl.where(here, pieces_b, 0), 0)
    first = tl.sum(tl.where(here, end_b - pieces_b, 0), 0)
    length = tl.sum(tl.where(here, length_b, 0), 0)
    low = 0
    oldest = 0
    token = row
    if WINDOW or CHUNKED:
        low = tl.sum(tl.where(here, low_b, 0), 0)
    if WINDOW:
        oldest = tl.maximum(length - window, 0)
    if CHUNKED:
        oldest = tl.maximum(oldest, tl.maximum(length - 1, 0) // span * span)
    if MIXED:
        token = tl.sum(tl.where(here, token_b, 0), 0)
    size = tl.cdiv(tl.cdiv(length - low, tl.maximum(pieces, 1)), BN) * BN  # of every piece of this row
    index = piece - first
    low += index * size
    high = tl.minimum(length, low + size)
    j = low + tl.arange(0, BN)
    table = tables + row.to(tl.int64) * table_b
    block = tl.load(table + j // BLOCK, also((j < high) & (j >= oldest), pieces > 0), 0, cache_modifier=".cg")
    wait_for_previous(DEPENDENT_LAUNCH)
    if pieces > 0:
        head = kv_head * G + tl.arange(0, BM)
        d = tl.arange(0, DP)
        real = tl.arange(0, BM) < G
        inside = real[:, None] & (d < D)[None, :]
        queries = tl.load(q + token.to(tl.int64) * q_t + head[:, None] * q_h + d[None, :], inside, 0.0)
        acc = tl.zeros((BM, DP), tl.float32)
        l = tl.zeros((BM,), tl.float32)
        m = tl.full((BM,), -float("inf"), tl.float32)
        position = tl.zeros((BM,), tl.int32) + (length - 1)
        acc, m, l = walk(
            queries, k_cache, v_cache, table, block, low, high, oldest, high, position, acc, m, l, kv_head, scale2,
            window, cache_b, cache_k, squeeze, span, D, DP, BLOCK, BN, WINDOW, True, CAPPED, False,
        )  # fmt: skip
        if pieces == 1:
            if SINKS:
                acc, l = with_sink(acc, m, l, sinks, head, real)
            at_out = out + token.to(tl.int64) * (H * D) + head[:, None] * D + d[None, :]
            # A row without a position (an unused row of a graph's buffers) gives zeros.
            tl.store(at_out, (acc / tl.where(l == 0, 1.0, l)[:, None]).to(out.dtype.element_ty), inside)
        else:
            part = piece.to(tl.int64) * H + head
            tl.store(part_o + part[:, None] * D + d[None, :], acc, inside)
            tl.store(part_l + part * 2, m, real)
            tl.store(part_l + part * 2 + 1, l, real)
            tl.debug_barrier()
            _combine(
                out, part_o, part_l, arrivals, token, kv_head, first, index, pieces, most, sinks, H, G, GP, D, DP,
                CHUNK, FAN, SINKS,
            )  # fmt: skip


@kernel
def _combine(  # type: ignore[no-untyped-def]
    out, part_o, part_l, arrivals, token, kv_head, first, index, pieces, most, sinks,
    H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr,
    FAN: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """Combine the parts of a row. Each split calls this after writing its part: the last of FAN neighbouring splits
    merges theirs, and the last of those merges all. The result does not depend on which one is last."""
    K: tl.constexpr = H // G
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    head = kv_head * G + g
    inside = (g < G)[:, None] & (d < D)[None, :]
    leader = first + index // FAN * FAN
    members = tl.minimum(FAN, first + pieces - leader)
    counter = arrivals + leader * K + kv_head
    if tl.atomic_add(counter, 1, sem="acq_rel") == members - 1:
        tl.store(counter, 0)
        at = leader.to(tl.int64) * H + head
        m, l, acc = _merge(part_o, part_l, at, members, H, G, GP, D, DP, CHUNK)
        groups = tl.cdiv(pieces, FAN)
        done = groups == 1
        if not done:
            tl.debug_barrier()
            tl.store(part_o + at[:, None] * D + d[None, :], acc, inside)
            tl.store(part_l + at * 2, m, g < G)
            tl.store(part_l + at * 2 + 1, l, g < G)
            tl.debug_barrier()
            counter = arrivals + (most + first) * K + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == groups - 1:
                tl.store(counter, 0)
                done = True
                at = first.to(tl.int64) * H + head
                m, l, acc = _merge(part_o, part_l, at, groups, FAN * H, G, GP, D, DP, CHUNK)
        if done:
            if SINKS:
                acc, l = with_sink(acc, m, l, sinks, head, g < G)
            at_out = out + token.to(tl.int64) * (H * D) + head[:, None] * D + d[None, :]
            tl.store(at_out, (acc / tl.where(l == 0, 1.0, l)[:, None]).to(out.dtype.element_ty), inside)


@kernel
def _merge(  # type: ignore[no-untyped-def]
    part_o, part_l, first, count, apart, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """Merge ``count`` parts, for each head every ``apart``th from place ``first`` on, into one: (m, l, o), CHUNK at a
    time."""
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    n = tl.arange(0, CHUNK)
    m = tl.full((GP,), -float("inf"), tl.float32)
    l = tl.zeros((GP,), tl.float32)
    acc = tl.zeros((GP, DP), tl.float32)
    for start in range(0, count, CHUNK):
        part = first[None, :] + (start + n)[:, None] * apart
        inside = (start + n < count)[:, None] & (g < G)[None, :]
        m_n = tl.load(part_l + part * 2, inside, -float("inf"), cache_modifier=".cg")
        l_n = tl.load(part_l + part * 2 + 1, inside, 0.0, cache_modifier=".cg")
        o_n = tl.load(
            part_o + part[:, :, None] * D + d[None, None, :], inside[:, :, None] & (d < D)[None, None, :], 0.0,
            cache_modifier=".cg",
        )  # fmt: skip
        new_m = tl.maximum(m, tl.max(m_n, 0))
        shift = tl.where(new_m == -float("inf"), 0.0, new_m)
        weight = tl.exp2(m_n - shift[None, :])
        fade = tl.exp2(m - shift)
        l = l * fade + tl.sum(l_n * weight, 0)
        acc = acc * fade[:, None] + tl.sum(o_n * weight[:, :, None], 0)
        m = new_m
    return m, l, acc


@dataclass(frozen=True, slots=True)
class DecodeTiling:
    """Knobs of ``decode``."""

    bn: int = 32
    """Positions of a tile."""
    warps: int = 1
    stages: int = 2
    programs: int = 14
    """Pieces wanted for each multiprocessor."""
    least: int = 64
    """The least number of positions in a piece, where a row is cut."""
    chunk: int = 8
    """Parts that are loaded at a time when they are combined."""
    fan: int = 16
    """Number of neighbouring parts merged first, before their results are merged."""


PORTABLE = DecodeTiling(programs=7)
"""Tiling on other GPUs than Hopper, where this kernel runs all decode rows: on an H200 that acts as an Ada card within
4% of the quickest of 120 at 1 to 64 rows and 536 to 8,000 positions."""


def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, scale: float, window: int | None, out: Tensor, *,
    tiling: DecodeTiling, mixed: bool, dependent_launch: bool, softcap: float | None = None,
    sinks: Tensor | None = None, chunk: int | None = None,
) -> None:  # fmt: skip
    """Compute attention of the rows with one query, and write it to their places in ``out`` ``[T, H, d]``.

    ``mixed``: there may be rows with several queries, which are left alone. ``dependent_launch``: see
    ``paged_prefill.prefill``.
    """
    _, heads, d = q.shape
    kv_heads, rows = k_cache.shape[1], batch.num_rows
    group = heads // kv_heads
    if not rows:
        return
    if INTERPRETED:
        tiling = replace(tiling, bn=16, warps=1, stages=1, chunk=4, fan=3, least=16)
    elif k_cache.element_size() == 1 and tiling.warps == 1 and not target_of(q.device).hopper:
        tiling = replace(tiling, warps=2)  # one warp's registers do not hold a tile in both formats
    wanted = _round_up(tiling.programs * multiprocessors(q.device) / kv_heads)
    most = _round_up(min(wanted + rows, rows * -(-batch.max_seq_len // tiling.least)))
    part_o = q.new_empty((most, heads, d), dtype=torch.float32)
    part_l = q.new_empty((most, heads, 2), dtype=torch.float32)
    inputs, sizes, scores, constants = arguments_of(
        q, k_cache, v_cache, batch, scale, window, out,
        softcap=softcap, sinks=sinks, chunk=chunk, dependent_launch=dependent_launch,
    )  # fmt: skip
    _decode[(most * kv_heads,)](
        *inputs, part_o, part_l, batch.arrivals(2 * most * kv_heads), *sizes, wanted, tiling.least, most, *scores,
        GP=next_power_of_2(group), BM=max(16, next_power_of_2(group)), BN=tiling.bn, MIXED=mixed,
        ROWS=next_power_of_2(rows), CHUNK=tiling.chunk, FAN=tiling.fan, num_warps=tiling.warps,
        num_stages=tiling.stages, **constants,
    )  # fmt: skip


def _round_up(n: float) -> int:
    """Round up to a multiple of 16: Triton compiles one kernel for such numbers and one for others, and batches come in
    all sizes."""
    return -(-round(n) // 16) * 16


DECODE_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "bn": (32, 64, 128), "warps": (1, 2, 4, 8), "stages": (2, 3), "programs": (4, 7, 14, 28), "least": (64, 128),
}  # fmt: skip


def decode_rule(size: tuple[int, int, int]) -> Mapping[str, Any]:
    """Return the knobs for (rows times key heads, longest row, head dimension)."""
    tiling = DecodeTiling() if target_of().hopper else PORTABLE
    return {name: getattr(tiling, name) for name in DECODE_CHOICES}


@cache
def tuned(units: int, longest: int, d: int, device: torch.device) -> DecodeTiling:
    """Return the fastest known tiling, or the rule's."""
    return replace(DecodeTiling(), **tuning.choose("paged_attention", (units, longest, d), device, decode_rule))


def kernels() -> Sequence[Kernel]:
    """Return the kernels to compile ahead of time."""
    own = {"part_o": "*fp32", "part_l": "*fp32", "arrivals": "*i32", "wanted": "i32", "least": "i32", "most": "i32"}
    bf16, fp8, int8 = "*bf16", "*fp8e4nv", "*i8"

    def others(targets: Sequence[str]) -> tuple[str, ...]:
        return tuple(name for name in targets if name != "sm_90")

    return [
        Kernel(
            name=name,
            function=_decode,
            arguments=types_of(own, cache),
            constants={
                "H": 32, "G": 4, "GP": 4, "D": 128, "DP": 128, "BLOCK": 16, "BM": 16, "BN": 32, "WINDOW": False,
                "MIXED": False, "ROWS": 64, "DEPENDENT_LAUNCH": False, "CHUNK": 8, "FAN": 16, **scores,
            },
            divisible=(*STRIDES, "wanted", "least", "most"),
            warps=warps,
            stages=2,
            targets=targets,
        )
        for name, warps, cache, targets, scores in (
            ("decode", 1, bf16, TRITON_TARGETS, PLAIN),
            ("decode, cache in fp8", 1, fp8, ("sm_90",), PLAIN),
            ("decode, cache in fp8, other targets", 2, fp8, others(FP8_TARGETS), PLAIN),
            ("decode, cache in int8", 1, int8, ("sm_90",), PLAIN),
            ("decode, cache in int8, other targets", 2, int8, others(TRITON_TARGETS), PLAIN),
            ("decode with sinks, a cap and chunks", 1, bf16, TRITON_TARGETS, dict.fromkeys(PLAIN, True)),
        )
    ]  # fmt: skip
