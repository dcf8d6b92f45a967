"""The Triton kernel of paged attention for rows of one query whose sums do not depend on the batch.

The positions of a row are cut at the multiples of SPAN. Each span is summed by itself, in tiles of BN positions; spans
are then added in order (``tile.merged``). ``prefill.py`` does the same with the spans of its queries, so a token has
the same bits in a prompt, in any chunk of it, and as a decode row in any batch. Here spans of a row run side by side.

A program holds the G heads that share one key head of a row, and takes span after span. The pieces of all rows are
numbered, one row after the other, and every program finds its own from the lengths. So the host knows only bounds, and
a captured step can be replayed with other lengths. The piece of a row that finishes last adds all. Rows for whose parts
there is no room are summed by one program each, with the same bits; its sum so far is in memory, not in registers.

Bound by bytes: 4 H d FLOPs for each 2 K d cached elements. On Hopper ``paged_spans_hopper.cu`` has the same bits
faster, of a cache in bfloat16.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ....hardware.device import target_of
from ....hardware.targets import TARGETS
from ...lang import cuda
from ...lang.jit import INTERPRETED, TRITON_TARGETS, kernel, multiprocessors, next_power_of_2, tl
from ...lang.tiles import let_next_begin, wait_for_previous
from ...registry import Kernel
from ..packed.tiling import LOG2E
from .batch import PagedBatch
from .decode_hopper import AT_ONCE, BLOCK_SIZE, mixed_refusal
from .launch import PLAIN, STRIDES, arguments_of, types_of
from .prefill import SPAN
from .tile import merged, walk, with_sink

MOST_WARPS = 4
"""Most warps of a block of ``paged_spans_hopper.cu``."""
ROOM = 2048
"""Most parts of rows that a launch keeps for adding."""


@kernel
def _decode(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, tables, starts, lengths, out, part_o, part_l, arrivals, B, scale2, window, q_t, q_h, cache_b,
    cache_k, table_b, room, sinks, squeeze, span,
    H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, SPAN: tl.constexpr, WINDOW: tl.constexpr, MIXED: tl.constexpr,
    ROWS: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr, AT_ONCE: tl.constexpr,
    SINKS: tl.constexpr, CAPPED: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """Attend with the rows of one query. Axis 0: programs, and for each the key heads. MIXED: the batch may hold rows
    of several queries, which are skipped. ROWS: a power of two that holds the batch's rows. AT_ONCE: parts that are
    loaded together. SINKS, CAPPED, CHUNKED: see ``tile.py``.

    Lengths are read while the kernel before may still run: it does not write them. They bypass the L1 cache, which may
    hold old values.
    """
    let_next_begin(DEPENDENT_LAUNCH)
    K: tl.constexpr = H // G
    kv_head = tl.program_id(0) % K
    b = tl.arange(0, ROWS)
    length_b = tl.load(lengths + b, b < B, 0, cache_modifier=".cg")
    token_b = b
    mine_b = b < B
    if MIXED:
        token_b = tl.load(starts + b, b < B, 0, cache_modifier=".cg")
        mine_b = mine_b & (tl.load(starts + b + 1, b < B, 0, cache_modifier=".cg") - token_b == 1)
    oldest_b = tl.zeros_like(length_b)
    if WINDOW:
        oldest_b = tl.maximum(length_b - window, 0)
    if CHUNKED:
        oldest_b = tl.maximum(oldest_b, tl.maximum(length_b - 1, 0) // span * span)
    spans_b = tl.maximum(tl.cdiv(length_b, SPAN) - oldest_b // SPAN, 1)
    wanted_b = tl.where(mine_b, spans_b, 0)
    pieces_b = tl.where(tl.cumsum(wanted_b, 0) <= room, wanted_b, mine_b.to(tl.int32))
    end_b = tl.cumsum(pieces_b, 0)
    wait_for_previous(DEPENDENT_LAUNCH)
    for piece in range(tl.program_id(0) // K, tl.sum(pieces_b, 0), tl.num_programs(0) // K):
        row = tl.sum((end_b <= piece).to(tl.int32), 0)
        here = b == row
        pieces = tl.sum(tl.where(here, pieces_b, 0), 0)
        first = tl.sum(tl.where(here, end_b - pieces_b, 0), 0)
        length = tl.sum(tl.where(here, length_b, 0), 0)
        oldest = 0
        token = row
        if WINDOW or CHUNKED:
            oldest = tl.sum(tl.where(here, oldest_b, 0), 0)
        if MIXED:
            token = tl.sum(tl.where(here, token_b, 0), 0)
        low = oldest // SPAN * SPAN
        high = length
        if pieces > 1:
            low += (piece - first) * SPAN
            high = tl.minimum(length, low + SPAN)
        head = kv_head * G + tl.arange(0, BM)
        d = tl.arange(0, DP)
        n = tl.arange(0, BN)
        real = tl.arange(0, BM) < G
        inside = real[:, None] & (d < D)[None, :]
        queries = tl.load(q + token.to(tl.int64) * q_t + head[:, None] * q_h + d[None, :], inside, 0.0)
        position = tl.zeros((BM,), tl.int32) + (length - 1)
        table = tables + row.to(tl.int64) * table_b
        acc = tl.zeros((BM, DP), tl.float32)
        l = tl.zeros((BM,), tl.float32)
        m = tl.full((BM,), -float("inf"), tl.float32)
        running = (room + tl.program_id(0) // K) * H + head  # the sum so far, of a row that is not shared
        for start in range(low, high, SPAN):
            begin = tl.maximum(start, oldest // BN * BN)
            end = tl.minimum(start + SPAN, high)
            block = tl.load(table + (begin + n) // BLOCK, begin + n < end, 0)
            acc, m, l = walk(
                queries, k_cache, v_cache, table, block, begin, end, oldest, length, position,
                tl.zeros((BM, DP), tl.float32), tl.full((BM,), -float("inf"), tl.float32), tl.zeros((BM,), tl.float32),
                kv_head, scale2, window, cache_b, cache_k, squeeze, span, D, DP, BLOCK, BN, WINDOW, True, CAPPED, False,
            )  # fmt: skip
            if start > low:
                at = part_o + running[:, None] * D + d[None, :]
                sum_m = tl.load(part_l + running * 2, real, -float("inf"))
                sum_l = tl.load(part_l + running * 2 + 1, real, 0.0)
                acc, m, l = merged(tl.load(at, inside, 0.0), sum_m, sum_l, acc, m, l)
            if start + SPAN < high:
                tl.store(part_o + running[:, None] * D + d[None, :], acc, inside)
                tl.store(part_l + running * 2, m, real)
                tl.store(part_l + running * 2 + 1, l, real)
        if pieces == 1:
            if SINKS:
                acc, l = with_sink(acc, m, l, sinks, head, real)
            at_out = out + token.to(tl.int64) * (H * D) + head[:, None] * D + d[None, :]
            # A row without a position (an unused row of a graph's buffers) gives zeros.
            tl.store(at_out, (acc / tl.where(l == 0, 1.0, l)[:, None]).to(out.dtype.element_ty), inside)
        else:
            part = piece * H + head
            tl.store(part_o + part[:, None] * D + d[None, :], acc, inside)
            tl.store(part_l + part * 2, m, real)
            tl.store(part_l + part * 2 + 1, l, real)
            tl.debug_barrier()
            counter = arrivals + first * K + kv_head
            if tl.atomic_add(counter, 1, sem="acq_rel") == pieces - 1:
                tl.store(counter, 0)
                _add(out, part_o, part_l, token, kv_head, first, pieces, sinks, H, G, GP, D, DP, AT_ONCE, SINKS)


@kernel
def _add(  # type: ignore[no-untyped-def]
    out, part_o, part_l, token, kv_head, first, pieces, sinks,
    H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, AT_ONCE: tl.constexpr,
    SINKS: tl.constexpr,
):  # fmt: skip
    """Add the parts of a row in order, and write the result."""
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    head = kv_head * G + g
    real = g < G
    inside = real[:, None] & (d < D)[None, :]
    acc = tl.zeros((GP, DP), tl.float32)
    l = tl.zeros((GP,), tl.float32)
    m = tl.full((GP,), -float("inf"), tl.float32)
    for start in range(0, pieces, AT_ONCE):
        for i in tl.static_range(AT_ONCE):  # the loads of all come before the first is needed
            part = (first + start + i) * H + head
            there = real & (start + i < pieces)
            own_m = tl.load(part_l + part * 2, there, -float("inf"), cache_modifier=".cg")
            own_l = tl.load(part_l + part * 2 + 1, there, 0.0, cache_modifier=".cg")
            at = part_o + part[:, None] * D + d[None, :]
            own_acc = tl.load(at, inside & (start + i < pieces), 0.0, cache_modifier=".cg")
            acc, m, l = merged(acc, m, l, own_acc, own_m, own_l)
    if SINKS:
        acc, l = with_sink(acc, m, l, sinks, head, real)
    at_out = out + token.to(tl.int64) * (H * D) + head[:, None] * D + d[None, :]
    tl.store(at_out, (acc / tl.where(l == 0, 1.0, l)[:, None]).to(out.dtype.element_ty), inside)


@dataclass(frozen=True, slots=True)
class SpansTiling:
    """Knobs of ``decode``. Bits depend on ``bn`` and ``span``, which are those of ``prefill.SPAN_TILING``."""

    bm: int = 64
    """Rows of a tile: the heads of a key head, and padding up to what a warpgroup multiplies."""
    bn: int = 32
    """Positions of a tile."""
    warps: int = 4
    stages: int = 3
    programs: int = 6
    """Programs for each multiprocessor."""
    at_once: int = 8
    """Parts that are loaded at a time when they are added."""
    span: int = SPAN
    registers: int = 168
    """Most registers of a thread on Hopper, with heads of up to 128 and a cache of 16 bits: three programs fit on a
    multiprocessor. 0: as many as there are."""


TILING = SpansTiling()
NARROW = replace(TILING, bm=16, warps=1, programs=14, registers=0)
"""The tiling for rows that keep all multiprocessors busy, and for every GPU without products of warpgroups: programs of
one warp, whose products (mma.sync) round, and whose threads add, as those of warpgroups do. (Of two or four warps each
has other columns, and adds in another order.)"""
BUSY = 2
"""From this number of (row, key head) pairs for each multiprocessor on, ``NARROW`` is taken."""


def choose_tiling(rows: int, kv_heads: int, units: int, cache_bytes: int = 2, warpgroups: bool = True) -> SpansTiling:
    """Return the tiling of ``rows`` rows of one query on a GPU of ``units`` multiprocessors, with or without products
    of ``warpgroups``.

    On an H200 256 rows of 640 positions take 202 us with ``NARROW`` and 217 without, one row of 1024 17 and 8. One
    warp's registers do not hold a tile in 8 bits and in 16.
    """
    return NARROW if not warpgroups or (rows * kv_heads >= BUSY * units and cache_bytes > 1) else TILING


def decode(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, scale: float, window: int | None, out: Tensor, *,
    mixed: bool, dependent_launch: bool, tiling: SpansTiling | None = None, softcap: float | None = None,
    sinks: Tensor | None = None, chunk: int | None = None,
) -> None:  # fmt: skip
    """Compute attention of the rows with one query, and write it to their places in ``out`` ``[T, H, d]``.

    ``mixed``: there may be rows with several queries, which are left alone. ``dependent_launch``: see
    ``prefill.prefill``. ``tiling``: None for ``choose_tiling``.
    """
    _, heads, d = q.shape
    kv_heads, rows = k_cache.shape[1], batch.num_rows
    group = heads // kv_heads
    if not rows:
        return
    if tiling is None:
        wide = INTERPRETED or not target_of(q.device).single_warps
        tiling = choose_tiling(rows, kv_heads, multiprocessors(q.device), k_cache.element_size(), wide)
    if INTERPRETED:
        tiling = replace(tiling, bm=16, bn=16, warps=1, stages=1, at_once=2, span=32)
    spans = rows * -(-batch.max_seq_len // tiling.span)
    room = min(spans, 6 if INTERPRETED else ROOM)
    programs = min(spans, -(-tiling.programs * multiprocessors(q.device) // kv_heads))
    part_o = q.new_empty((room + programs, heads, d), dtype=torch.float32)
    part_l = q.new_empty((room + programs, heads, 2), dtype=torch.float32)
    bm = max(tiling.bm, next_power_of_2(group))
    inputs, sizes, scores, constants = arguments_of(
        q, k_cache, v_cache, batch, scale, window, out,
        softcap=softcap, sinks=sinks, chunk=chunk, dependent_launch=dependent_launch,
    )  # fmt: skip
    roomy = d <= 128 and k_cache.element_size() == 2  # else sums would not fit into these registers
    if roomy and tiling.registers and not INTERPRETED and target_of(q.device).hopper:
        constants["maxnreg"] = tiling.registers
    _decode[(programs * kv_heads,)](
        *inputs, part_o, part_l, batch.arrivals(room * kv_heads), *sizes, room, *scores,
        GP=bm if INTERPRETED else next_power_of_2(group), BM=bm, BN=tiling.bn, SPAN=tiling.span, MIXED=mixed,
        ROWS=next_power_of_2(rows), AT_ONCE=tiling.at_once, num_warps=tiling.warps,
        num_stages=min(tiling.stages, 2) if d > 128 else tiling.stages, **constants,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class SpansHopperTiling:
    """Division of a batch into work items of ``paged_spans_hopper.cu``."""

    ranks: int = 0
    """Blocks of a cluster, at least 2, that share a row and a key head; 0: an even cut, by a block for each
    multiprocessor."""
    warps: int = MOST_WARPS
    """Warps of a block, each of which takes one span; of an even cut equally many, one after another."""
    together: bool = False
    """True if the warps of a block of a cluster share one span after another."""

    def buffers(self, d: int) -> int:
        """Return the number of a warp's buffers, of 32 keys or 32 values each; these are compiled."""
        if not self.ranks:
            return 4 if d == 128 else 8
        if d < 128:
            return 12
        return 16 if self.warps == 1 else 6


def choose(items: int, spans: int) -> SpansHopperTiling:
    """Return a tiling for ``items`` rows times key heads of up to ``spans`` spans.

    A cluster takes an item where all clusters run at once, as in ``decode_hopper.choose``; of pairs of blocks with two
    warps twice as many do. Where there is a block for each span its warps share that. Adding sums takes less time in
    shared memory than those of an even cut do in memory.
    """
    for ranks in (2, 4, 8):
        if spans <= ranks:
            if items <= AT_ONCE[ranks]:
                return SpansHopperTiling(ranks, 1, together=True)
            break
    for ranks in (8, 4, 2):
        warps = -(-spans // ranks)
        at_once = AT_ONCE[ranks] * (2 if ranks == 2 and warps <= 2 else 1)
        if items <= at_once and ranks < 2 * spans and warps <= MOST_WARPS:
            return SpansHopperTiling(ranks, warps)
    return SpansHopperTiling()


class PagedSpans:
    """``decode`` by ``paged_spans_hopper.cu``, with the same bits, on one device.

    Raises:
        Unavailable: not a Hopper GPU, or no nvcc to build the kernels with.
        RuntimeError: made inside a CUDA graph capture.
    """

    SIGNATURE = "p" * 10 + "i" * 6 + "liif" + "i" * 8 + "p"
    """The types of the launcher's arguments, see ``cuda.bind``."""
    ROOM = 1 << 24
    """Most numbers of parts of rows. Where there could be more, a warp keeps rows whole."""

    def __init__(self, device: torch.device | None = None) -> None:
        self._launch = cuda.bind_on_hopper("paged_spans_hopper", "transect_paged_spans", self.SIGNATURE, device)

    @staticmethod
    def mixed_refusal(
        q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, window: int | None = None, **scores: object
    ) -> str | None:
        """Return the reason why this kernel does not take these inputs; None if it does. ``scores``: see ``decode``."""
        if window is not None or k_cache.dtype != torch.bfloat16 or any(each is not None for each in scores.values()):
            return "it attends to all positions, cached in bfloat16, without sinks, caps and chunks"
        return mixed_refusal(q, k_cache, v_cache, batch)

    def __call__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, scale: float, window: int | None = None,
        *, sinks: Tensor | None = None, out: Tensor | None = None, dependent_launch: bool = False,
        beside: bool = False, tiling: SpansHopperTiling | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute ``decode``. ``out``, ``dependent_launch`` and ``beside``: see ``PagedDecode``.

        Raises:
            RuntimeError: the launch failed.
        """
        tokens, heads, d = q.shape
        kv_heads, rows = k_cache.shape[1], batch.num_rows
        out = torch.empty_like(q, memory_format=torch.contiguous_format) if out is None else out
        if not rows:
            return out
        group, items, longest = heads // kv_heads, rows * kv_heads, -(-batch.max_seq_len // SPAN)
        tiling = tiling or choose(items, longest)
        whole = items * longest * group * d > self.ROOM
        kept = 0 if whole or tiling.ranks else items * longest
        parts = q.new_empty((kept, group, d), dtype=torch.float32)
        parts_ml = q.new_empty((kept, group, 2), dtype=torch.float32)
        tables = batch.block_tables
        code = self._launch(
            q.data_ptr(), k_cache.data_ptr(), v_cache.data_ptr(), tables.data_ptr(),
            0 if batch.decodes_only(tokens) else batch.query_starts.data_ptr(), batch.seq_lens.data_ptr(),
            out.data_ptr(), parts.data_ptr(), parts_ml.data_ptr(), batch.arrivals(items).data_ptr(), rows,
            tables.shape[1], tables.stride(0), kv_heads, group, d, q.stride(0), q.stride(1),
            k_cache.stride(0) // (BLOCK_SIZE * d), scale * LOG2E, multiprocessors(q.device), tiling.warps,
            tiling.buffers(d), tiling.ranks, -(-longest // tiling.ranks) if tiling.together else 0, int(whole),
            2 if dependent_launch and not batch.fresh else 1, int(beside),
            torch.cuda.current_stream(q.device).cuda_stream,
        )  # fmt: skip
        if code:
            raise RuntimeError(f"paged_spans_hopper.cu: the launch of {tiling} for {rows} rows returned {code}")
        return out


def refusal(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, scale: float, window: int | None = None,
    **scores: object,
) -> str | None:  # fmt: skip
    """Return the reason why ``PagedSpans`` does not take a batch of decode rows alone; None if it does."""
    reason = PagedSpans.mixed_refusal(q, k_cache, v_cache, batch, window, **scores)
    return reason or (None if batch.decodes_only(len(q)) else "it attends rows of one query")


def kernels() -> Sequence[Kernel]:
    """Return the kernels to compile ahead of time."""
    wide = tuple(name for name in TRITON_TARGETS if not TARGETS[name].single_warps)
    own = {"part_o": "*fp32", "part_l": "*fp32", "arrivals": "*i32", "room": "i32"}
    return [
        Kernel(
            name=name,
            function=_decode,
            arguments=types_of(own, cache),
            constants={
                "H": 32, "G": 4, "GP": 4, "D": 128, "DP": 128, "BLOCK": 16, "BM": tiling.bm, "BN": tiling.bn,
                "SPAN": SPAN, "WINDOW": False, "MIXED": False, "ROWS": 64, "DEPENDENT_LAUNCH": False,
                "AT_ONCE": tiling.at_once, **scores,
            },
            divisible=STRIDES,
            warps=tiling.warps,
            stages=tiling.stages,
            targets=targets,
        )
        for name, tiling, cache, targets, scores in (
            ("decode in spans", TILING, "*bf16", wide, PLAIN),
            ("decode in spans, many rows", NARROW, "*bf16", TRITON_TARGETS, PLAIN),
            ("decode in spans, cache in int8", TILING, "*i8", ("sm_90",), PLAIN),
            ("decode in spans with sinks, a cap and chunks", TILING, "*bf16", ("sm_90",), dict.fromkeys(PLAIN, True)),
        )
    ]  # fmt: skip
