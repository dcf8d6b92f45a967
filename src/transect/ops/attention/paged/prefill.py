"""The Triton kernel of paged attention for rows with several queries: prefill chunks.

A program holds ``BM / GP`` queries of one row with the G heads that share a key head (GP: G rounded up to a power of
two), and walks over all positions they see. The last tiles of a chunk see most and come first. The arithmetic is in
``paged_attention.py``. Bound by arithmetic from a few hundred queries on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ....hardware.device import target_of
from ....hardware.targets import NVIDIA_TARGETS, TARGETS
from ...lang.jit import INTERPRETED, kernel, next_power_of_2, tl
from ...lang.tiles import let_next_begin, wait_for_previous
from ...registry import Kernel
from ..packed.tiling import find_tile
from .batch import PagedBatch
from .launch import PLAIN, STRIDES, arguments_of, types_of
from .tile import merged, walk, with_sink


@kernel
def _wait_in_one():  # type: ignore[no-untyped-def]
    """Wait in one program for the kernel before, so that this launch ends after it."""
    if tl.program_id(0) + tl.program_id(1) == 0:
        tl.extra.cuda.gdc_wait()


@kernel
def _prefill(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, tables, starts, lengths, out, B, scale2, window, q_t, q_h, cache_b, cache_k, table_b,
    sinks, squeeze, span,
    H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, SINGLES: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
    BESIDE: tl.constexpr, SINKS: tl.constexpr, CAPPED: tl.constexpr, CHUNKED: tl.constexpr, SPAN: tl.constexpr,
):  # fmt: skip
    """Attend with the rows of several queries. Axis 0: key heads; axis 1: tiles of queries, as ``find_tile`` numbers
    them. SINGLES: rows of one query too. DEPENDENT_LAUNCH: the previous kernel may still run; BESIDE: this kernel does
    not wait for it, but ends after it. SINKS, CAPPED, CHUNKED: see ``tile.py``. SPAN: positions that are summed apart
    (``decode_spans.py``); 0: all in one."""
    let_next_begin(DEPENDENT_LAUNCH)
    wait_for_previous(DEPENDENT_LAUNCH and not BESIDE)
    QUERIES: tl.constexpr = BM // GP
    kv_head = tl.program_id(0)
    row, tile = find_tile(tl.num_programs(1) - 1 - tl.program_id(1), starts, B, QUERIES)
    first_token = tl.load(starts + row)
    count = tl.load(starts + row + 1) - first_token
    length = tl.load(lengths + row)
    mine = tile * QUERIES < count
    if not SINGLES:
        mine = mine & (count != 1)
    if mine:
        first_position = length - count + tile * QUERIES
        low = 0
        high = tl.minimum(length, first_position + QUERIES)
        if WINDOW:
            low = tl.maximum(0, first_position - window + 1)
        if CHUNKED:
            low = tl.maximum(low, first_position // span * span)
        r = tl.arange(0, BM)
        query = tile * QUERIES + r // GP
        head = kv_head * G + r % GP
        position = length - count + query
        d = tl.arange(0, DP)
        token = (first_token + query).to(tl.int64)
        inside = ((r % GP < G) & (query < count))[:, None] & (d < D)[None, :]
        queries = tl.load(
            q + token[:, None] * q_t + head[:, None] * q_h + d[None, :], inside, 0.0, cache_modifier=".cg"
        )
        acc = tl.zeros((BM, DP), tl.float32)
        l = tl.zeros((BM,), tl.float32)
        m = tl.full((BM,), -float("inf"), tl.float32)
        n = tl.arange(0, BN)
        table = tables + row.to(tl.int64) * table_b
        full = low // BN * BN
        if not WINDOW and not CHUNKED:  # keys that all of the tile's queries see need no mask
            full = tl.maximum(0, (first_position + 1) // BN * BN)
        if SPAN:
            for span_start in range(low // SPAN * SPAN, high, SPAN):
                begin = tl.maximum(span_start, low // BN * BN)
                end = tl.minimum(span_start + SPAN, high)
                middle = begin
                own_acc = tl.zeros((BM, DP), tl.float32)
                own_l = tl.zeros((BM,), tl.float32)
                own_m = tl.full((BM,), -float("inf"), tl.float32)
                if not WINDOW and not CHUNKED:
                    middle = tl.minimum(tl.maximum(full, begin), span_start + SPAN)
                    own_acc, own_m, own_l = walk(
                        queries, k_cache, v_cache, table, tl.load(table + (begin + n) // BLOCK, begin + n < middle, 0),
                        begin, middle, low, high, position, own_acc, own_m, own_l, kv_head, scale2, window, cache_b,
                        cache_k, squeeze, span, D, DP, BLOCK, BN, WINDOW, False, CAPPED, CHUNKED,
                    )  # fmt: skip
                own_acc, own_m, own_l = walk(
                    queries, k_cache, v_cache, table, tl.load(table + (middle + n) // BLOCK, middle + n < end, 0),
                    middle, end, low, high, position, own_acc, own_m, own_l, kv_head, scale2, window, cache_b, cache_k,
                    squeeze, span, D, DP, BLOCK, BN, WINDOW, True, CAPPED, CHUNKED,
                )  # fmt: skip
                acc, m, l = merged(acc, m, l, own_acc, own_m, own_l)
            full = high
        elif not WINDOW and not CHUNKED:
            acc, m, l = walk(
                queries, k_cache, v_cache, table, tl.load(table + n // BLOCK, n < full, 0), 0, full, low, high,
                position, acc, m, l, kv_head, scale2, window, cache_b, cache_k, squeeze, span, D, DP, BLOCK, BN,
                WINDOW, False, CAPPED, CHUNKED,
            )  # fmt: skip
        if not SPAN:
            block = tl.load(table + (full + n) // BLOCK, full + n < high, 0)
            acc, m, l = walk(
                queries, k_cache, v_cache, table, block, full, high, low, high, position, acc, m, l, kv_head, scale2,
                window, cache_b, cache_k, squeeze, span, D, DP, BLOCK, BN, WINDOW, True, CAPPED, CHUNKED,
            )  # fmt: skip
        if SINKS:
            acc, l = with_sink(acc, m, l, sinks, head, r % GP < G)
        at_out = out + token[:, None] * (H * D) + head[:, None] * D + d[None, :]
        # A row without a position (an unused row of a graph's buffers) gives zeros.
        tl.store(at_out, (acc / tl.where(l == 0, 1.0, l)[:, None]).to(out.dtype.element_ty), inside)
    if BESIDE:
        _wait_in_one()


@dataclass(frozen=True, slots=True)
class PrefillTiling:
    """Knobs of ``prefill``: rows and positions of a tile, warps, stages; positions that are summed apart, 0: none."""

    bm: int = 128
    bn: int = 64
    warps: int = 8
    stages: int = 3
    span: int = 0


SPAN = 256
"""Positions that ``decode_spans.py`` sums apart."""
PREFILL_TILING = PrefillTiling()
SPAN_TILING = PrefillTiling(bn=32, span=SPAN)
"""The tiling that sums in the same order as ``decode_spans.py``."""
SPAN_WIDE_TILING = PrefillTiling(bm=16, bn=32, warps=1, stages=2, span=SPAN)
"""The same for heads of 256 on GPUs without products of warpgroups: there the warps of a program that has fewer rows
than a head has numbers share the columns of a tile, and add in another order than the single warp of a decode row."""
SMALL_TILING = PrefillTiling(bm=64, bn=32, warps=8, stages=2)
"""The tiling of heads of 256 in 99 KiB of shared memory."""
BESIDE_TILING = PrefillTiling(bm=64, bn=32, warps=4)
"""The tiling of a few queries beside decodes: a program and a block of the decode kernel fit on one multiprocessor."""


def prefill(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, scale: float, window: int | None, out: Tensor, *,
    tiling: PrefillTiling, singles: bool, dependent_launch: bool, beside: bool = False, softcap: float | None = None,
    sinks: Tensor | None = None, chunk: int | None = None,
) -> None:  # fmt: skip
    """Compute attention of the rows with several queries, and with ``singles`` of those with one too, and write it to
    their places in ``out`` ``[T, H, d]``. ``dependent_launch``: begin while the previous kernel still runs (Hopper),
    and wait for it. ``beside``: do not wait, but end after it; that kernel is ``PagedDecode`` with ``beside`` too."""
    tokens, heads, d = q.shape
    kv_heads = k_cache.shape[1]
    padded_group = next_power_of_2(heads // kv_heads)
    if INTERPRETED:
        tiling = replace(tiling, bm=16, bn=16, warps=1, stages=1, span=min(tiling.span, 32))
    # AMD has 64 KB of shared memory; on NVIDIA three stages of heads of 256 do not fit.
    stages = min(tiling.stages, 2) if torch.version.hip or d > 128 else tiling.stages
    if d > 128 and not INTERPRETED:
        target = target_of(q.device)
        if tiling.span and target.single_warps:
            tiling = SPAN_WIDE_TILING
        elif not target.large_blocks:
            tiling = replace(SMALL_TILING, span=tiling.span)
    bm = max(tiling.bm, padded_group)
    inputs, sizes, scores, constants = arguments_of(
        q, k_cache, v_cache, batch, scale, window, out,
        softcap=softcap, sinks=sinks, chunk=chunk, dependent_launch=dependent_launch,
    )  # fmt: skip
    _prefill[(kv_heads, tokens // (bm // padded_group) + batch.num_rows)](
        *inputs, *sizes, *scores, GP=padded_group, BM=bm, BN=tiling.bn, SINGLES=singles, BESIDE=beside,
        SPAN=tiling.span, num_warps=tiling.warps, num_stages=stages, **constants,
    )  # fmt: skip


def kernels() -> Sequence[Kernel]:
    """Return the kernels to compile ahead of time."""
    every = dict.fromkeys(PLAIN, True)
    large = tuple(name for name in NVIDIA_TARGETS if TARGETS[name].large_blocks)
    single = tuple(name for name in NVIDIA_TARGETS if TARGETS[name].single_warps)
    small = tuple(name for name in NVIDIA_TARGETS if not TARGETS[name].large_blocks)
    return [
        Kernel(
            name=name,
            function=_prefill,
            arguments=types_of({}),
            constants={
                "H": 32, "G": 4, "GP": 4, "D": d, "DP": d, "BLOCK": 16, "BM": tiling.bm, "BN": tiling.bn,
                "WINDOW": False, "SINGLES": False, "DEPENDENT_LAUNCH": beside, "BESIDE": beside, "SPAN": tiling.span,
                **scores,
            },
            divisible=STRIDES,
            warps=tiling.warps,
            stages=tiling.stages,
            targets=targets,
            options={"launch_pdl": True} if beside else {},
        )
        for name, tiling, beside, targets, d, scores in (
            ("prefill", PREFILL_TILING, False, NVIDIA_TARGETS, 128, PLAIN),
            ("prefill in spans", SPAN_TILING, False, NVIDIA_TARGETS, 128, PLAIN),
            ("prefill in spans, heads of 256", SPAN_WIDE_TILING, False, single, 256, PLAIN),
            ("prefill beside decodes", BESIDE_TILING, True, ("sm_90",), 128, PLAIN),
            ("prefill_256", replace(PREFILL_TILING, stages=2), False, large, 256, PLAIN),
            ("prefill_256, small blocks", SMALL_TILING, False, small, 256, PLAIN),
            ("prefill with sinks, a cap and chunks", PREFILL_TILING, False, NVIDIA_TARGETS, 64, every),
            ("prefill_amd", replace(PREFILL_TILING, stages=2), False, ("gfx942",), 128, PLAIN),
        )
    ]  # fmt: skip
