r"""Causal attention of a ragged batch whose keys and values lie in a paged cache, read through the block table.

The math is that of ``attention.py``. A row's queries are the last tokens of its sequence; a query at position i sees
the positions j of its own sequence with i - window < j <= i. Inference only: no gradient.

``tiled`` never holds more than a tile of keys and values: it walks over tiles of about 64 positions, all rows at once,
with a running maximum m and sum l (online softmax, Milakov & Gimelshein 2018, arXiv:1805.02867):

    m' = max(m, max_j s_j)     a = exp(m - m')     l' = a l + sum_j exp(s_j - m')     o' = a o + sum_j exp(s_j - m') v_j

and divides by l at the end. Tiles begin at fixed positions of the sequence, and a tile that a row does not see leaves
its m, l and o as they were, to the bit. So in float32 a row's result depends on nothing but the row, up to what the
matrix product does with its number of queries; ``tiled_uniform`` gives all rows the same number, and takes that away.
Slots that a row does not own may hold anything, NaN too: scores are masked, and so are values, since 0 * NaN is NaN.

Shapes: q ``[T, H, d]``, caches of one layer ``[blocks, K, block_size, d]``, result like q. float32 inside.
Source: Kwon et al. 2023, arXiv:2309.06180 (paging); Dao et al. 2022, arXiv:2205.14135 (tiles).

On a GPU (``PagedTriton``) a program holds one tile of queries of one key head: the heads that share it lie together,
so K and V are read once for all of them. Prefill chunks take ``BM / G`` queries to a tile. A decode row has only its
G heads, too few programs to fill the chip when rows are few, so its positions are cut into splits, each with its own m,
l and o, which are combined by the same rule (flash decoding, Dao et al. 2023): of 16 neighbours by the one that
finishes last, and what came of those likewise.

The host needs shapes and two bounds, no lengths, so a step can be captured in a CUDA graph and replayed with other
lengths (see ``PagedBatch``). The number of splits a row may have follows from the number of rows. How long they are is
worked out on the device from the row's length; programs of splits that a row does not need end at once. With
``Tiles.split`` above 0 every split has that length, at absolute positions: the same bits in any batch.

Bound by bytes in decode: 4 H d FLOPs for each 2 K d cached elements: H / K FLOPs per byte in bfloat16 (3 for SmolLM2).
A prefill chunk of c queries reads them once for all c: c H / K, bound by arithmetic from a few hundred on.
On an H200 a decode step takes about 6 us on top of its bytes: the first keys come after three loads that wait for each
other (length, table, keys), and the combination of the splits takes 2 us, two orders of memory and an atomic.
"""

from __future__ import annotations

import bisect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import paged_attention_hopper as hopper
from . import shapes, tuning
from .counting import visible_keys, visible_pairs
from .flash_attention import LOG2E, find_tile
from .jit import INTERPRETED, TRITON_TARGETS, available, kernel, multiprocessors, next_power_of_2, require, tl
from .kv_cache_write import BLOCK_SIZE, example_batch
from .numerics import compute_dtype, sample
from .paged_batch import PagedBatch, WorkGroup
from .registry import Case, Cost, Implementation, Kernel, Knobs, Op, register
from .tiles import after_previous, dot

TILE = 64
"""Positions of a tile; rounded to whole blocks."""


def reference(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, scale: float, window: int | None = None
) -> Tensor:
    """q ``[T, H, d]`` -> ``[T, H, d]``: each sequence gathered and attended to on its own."""
    dtype = compute_dtype(q.dtype)
    group = q.shape[1] // k_cache.shape[1]
    out = torch.empty_like(q)
    end = 0
    for row, (new, length) in enumerate(batch.lengths()):
        start, end = end, end + new
        position = torch.arange(length, device=q.device)
        block = batch.block_tables[row].long()[position // batch.block_size]
        offset = position % batch.block_size
        keys = k_cache[block, :, offset].to(dtype).repeat_interleave(group, dim=1)
        values = v_cache[block, :, offset].to(dtype).repeat_interleave(group, dim=1)
        scores = torch.einsum("thd,shd->hts", q[start:end].to(dtype), keys) * scale
        distance = position[length - new :, None] - position[None]
        hidden = (distance < 0) if window is None else (distance < 0) | (distance >= window)
        p = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        # A key that no query of this row sees takes no part, even if its value is NaN.
        values = values.masked_fill(hidden.all(0)[:, None, None], 0)
        out[start:end] = torch.einsum("hts,shd->thd", p, values).to(q.dtype)
    return out


def tiled(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, scale: float, window: int | None = None
) -> Tensor:
    """As ``reference``, a tile of positions at a time; decode rows and prefill chunks go through separately."""
    out = torch.empty_like(q)
    for group in batch.split_work:
        _attend(group, q, k_cache, v_cache, scale, window, out)
    return out


def tiled_uniform(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, scale: float, window: int | None = None
) -> Tensor:
    """As ``tiled``, with one shape of work item for every row, so that no row's sums depend on the batch."""
    out = torch.empty_like(q)
    for group in batch.uniform_work:
        _attend(group, q, k_cache, v_cache, scale, window, out)
    return out


def _attend(
    group: WorkGroup, q: Tensor, k_cache: Tensor, v_cache: Tensor, scale: float, window: int | None, out: Tensor
) -> None:
    """Attention of one group of work items, written into ``out`` ``[T, H, d]``."""
    dtype = compute_dtype(q.dtype)
    items, queries = group.tokens_WQ.shape
    _, kv_heads, block_size, size = k_cache.shape
    heads = q.shape[1]
    per_tile = max(1, TILE // block_size)
    tile = per_tile * block_size

    def by_key_head(x_WQHd: Tensor) -> Tensor:
        """[W, Q, H, d] -> [W, K, Q * H / K, d]: queries that read the same key head lie together."""
        x = x_WQHd.view(items, queries, kv_heads, heads // kv_heads, size)
        return x.transpose(1, 2).reshape(items, kv_heads, -1, size)

    q_WKRd = by_key_head(q[group.tokens_WQ].to(dtype) * scale)
    position_W1R1 = group.positions_WQ.repeat_interleave(heads // kv_heads, dim=1)[:, None, :, None]
    last_W11 = group.positions_WQ[:, -1, None, None]
    oldest = torch.zeros_like(group.positions_WQ) if window is None else group.positions_WQ - window + 1
    oldest_W1R1 = oldest.repeat_interleave(heads // kv_heads, dim=1)[:, None, :, None]
    oldest_W11 = oldest[:, 0, None, None]

    m = torch.full_like(q_WKRd[..., :1], -torch.inf)
    l = torch.zeros_like(m)
    o = torch.zeros_like(q_WKRd)
    first_tile = 0 if window is None else max(0, int(oldest_W11.min())) // tile
    for index in range(first_tile, group.last_positions[0] // tile + 1):
        # Items stand in order of how far they see, so those that reach this tile are the first n.
        n = bisect.bisect_right(group.last_positions, -index * tile, key=lambda position: -position)
        blocks = group.blocks_WN[:n, index * per_tile : (index + 1) * per_tile]
        keys = _gather(k_cache, blocks, dtype)
        key_position = torch.arange(index * tile, index * tile + keys.shape[2], device=q.device)
        owned = (key_position <= last_W11[:n]) & (key_position >= oldest_W11[:n])
        values = _gather(v_cache, blocks, dtype).masked_fill(~owned.transpose(1, 2)[:, None], 0)
        visible = (key_position <= position_W1R1[:n]) & (key_position >= oldest_W1R1[:n])
        s = (q_WKRd[:n] @ keys.transpose(-1, -2)).masked_fill(~visible, -torch.inf)
        m_new = torch.maximum(m[:n], s.amax(-1, keepdim=True))
        shift = m_new.masked_fill(m_new == -torch.inf, 0)  # nothing seen yet: exp(-inf - 0) is 0, not NaN
        p = torch.exp(s - shift)
        a = torch.exp(m[:n] - shift)
        l[:n] = a * l[:n] + p.sum(-1, keepdim=True)
        o[:n] = a * o[:n] + p @ values
        m[:n] = m_new

    result = (o / l).view(items, kv_heads, queries, heads // kv_heads, size).transpose(1, 2)
    real = torch.arange(queries, device=q.device) < group.used_W[:, None]
    out[group.tokens_WQ[real]] = result.reshape(items, queries, heads, size)[real].to(out.dtype)


def _gather(cache: Tensor, blocks_WN: Tensor, dtype: torch.dtype) -> Tensor:
    """One tile of a cache: blocks ``[W, n]`` -> ``[W, K, n * block_size, d]``."""
    items, count = blocks_WN.shape
    _, kv_heads, block_size, size = cache.shape
    tile = cache[blocks_WN].transpose(1, 2)
    return tile.reshape(items, kv_heads, count * block_size, size).to(dtype)


@kernel
def _paged(  # type: ignore[no-untyped-def]
    q, k_cache, v_cache, tables, starts, lengths, out, part_o, part_l, arrivals, B, scale2, window, q_t, q_h, cache_b,
    cache_k, table_b, split_length, splits,
    H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, DECODE: tl.constexpr, MIXED: tl.constexpr,
    SPLIT: tl.constexpr, EARLY: tl.constexpr, CHUNK: tl.constexpr, FAN: tl.constexpr,
    LEAST: tl.constexpr,
):  # fmt: skip
    """BM / GP queries of one row with the G heads of one key head (axis 1), over all positions or a split (axis 2).

    Axis 0: rows (DECODE) or tiles of queries. MIXED: the batch holds rows of one query and rows of several, and each
    of the two launches leaves the other's rows alone. Of a row's splits the one that finishes last combines them all,
    CHUNK at a time, in the order of their positions: the same bits whichever it is.
    """
    after_previous(EARLY)
    QUERIES: tl.constexpr = BM // GP
    kv_head = tl.program_id(1)
    if DECODE:
        row = tl.program_id(0)
        tile = 0
    else:
        row, tile = find_tile(tl.num_programs(0) - 1 - tl.program_id(0), starts, B, QUERIES)
    first_token = tl.load(starts + row)
    count = tl.load(starts + row + 1) - first_token
    length = tl.load(lengths + row)
    mine = tile * QUERIES < count
    if MIXED:
        mine = mine & ((count == 1) == DECODE)
    first_position = length - count + tile * QUERIES
    low = 0
    high = min(length, first_position + QUERIES)
    if WINDOW:
        low = max(0, first_position - window + 1)
    oldest = low
    used = 1
    if SPLIT:
        first_split = 0
        if split_length == 0:  # as many splits as there may be, of what this row sees
            first_split = low // BN * BN
            split_length = max(LEAST, tl.cdiv(tl.cdiv(high - first_split, splits), BN) * BN)
        else:
            first_split = low // split_length * split_length
        used = max(1, tl.cdiv(high - first_split, split_length))
        mine = mine & (tl.program_id(2) < used)
        first_split += tl.program_id(2) * split_length
        low = max(low, first_split)
        high = min(high, first_split + split_length)
    if mine:
        r = tl.arange(0, BM)
        query = tile * QUERIES + r // GP
        head = kv_head * G + r % GP
        real = (r % GP < G) & (query < count)
        position = length - count + query
        d = tl.arange(0, DP)
        token = (first_token + query).to(tl.int64)
        inside = real[:, None] & (d < D)[None, :]
        queries = tl.load(q + token[:, None] * q_t + head[:, None] * q_h + d[None, :], inside, 0.0)
        acc = tl.zeros((BM, DP), tl.float32)
        l = tl.zeros((BM,), tl.float32)
        m = tl.full((BM,), -float("inf"), tl.float32)
        first_start = low // BN * BN
        if DECODE:
            # The table is loaded where it is used, so it is pipelined too, and K and V get half of the stages: less
            # shared memory and more programs at a time, which is what decode wants.
            for start in range(first_start, high, BN):
                j = start + tl.arange(0, BN)
                block = tl.load(tables + row * table_b + j // BLOCK, (j < high) & (j >= oldest), 0)
                acc, m, l = _step(
                    queries, k_cache, v_cache, block, j, oldest, high, position, acc, m, l, kv_head, scale2, window,
                    cache_b, cache_k, D, DP, BLOCK, WINDOW, True,
                )  # fmt: skip
        else:
            full = first_start
            if not WINDOW:  # keys that all of the tile's queries see need no mask
                full = max(first_start, (first_position + 1) // BN * BN)
                j = first_start + tl.arange(0, BN)
                block = tl.load(tables + row * table_b + j // BLOCK, j < full, 0)
                for start in range(first_start, full, BN):
                    j = start + tl.arange(0, BN)
                    this = block
                    block = tl.load(tables + row * table_b + (j + BN) // BLOCK, j + BN < full, 0)
                    acc, m, l = _step(
                        queries, k_cache, v_cache, this, j, oldest, high, position, acc, m, l, kv_head, scale2, window,
                        cache_b, cache_k, D, DP, BLOCK, WINDOW, False,
                    )  # fmt: skip
            j = full + tl.arange(0, BN)
            block = tl.load(tables + row * table_b + j // BLOCK, j < high, 0)
            for start in range(full, high, BN):
                j = start + tl.arange(0, BN)
                this = block
                block = tl.load(tables + row * table_b + (j + BN) // BLOCK, j + BN < high, 0)
                acc, m, l = _step(
                    queries, k_cache, v_cache, this, j, oldest, high, position, acc, m, l, kv_head, scale2, window,
                    cache_b, cache_k, D, DP, BLOCK, WINDOW, True,
                )  # fmt: skip
        at_out = out + token[:, None] * (H * D) + head[:, None] * D + d[None, :]
        if used == 1:
            # A row without a token or a position (what is left over in a graph's buffers) gives zeros.
            tl.store(at_out, (acc / tl.where(l == 0, 1.0, l)[:, None]).to(out.dtype.element_ty), inside)
        if SPLIT:  # noqa: SIM102  (decided by the compiler; the next one by the row)
            if used > 1:
                part = (row.to(tl.int64) * H + head) * splits + tl.program_id(2)
                tl.store(part_o + part[:, None] * D + d[None, :], acc, inside)
                tl.store(part_l + part * 2, m, real)
                tl.store(part_l + part * 2 + 1, l, real)
                tl.debug_barrier()
                _combine(
                    out, part_o, part_l, arrivals, first_token, row, kv_head, used, splits, H, G, GP, D, DP, CHUNK, FAN
                )  # fmt: skip


@kernel
def _step(  # type: ignore[no-untyped-def]
    queries, k_cache, v_cache, block, j, oldest, high, position, acc, m, l, kv_head, scale2, window, cache_b, cache_k,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr,
):  # fmt: skip
    """One tile of keys and values, at the positions ``j``, in the cache's blocks ``block``: (acc, m, l) with it.

    Without MASK every query sees all of them, and they all exist.
    """
    d = tl.arange(0, DP)
    at = block.to(tl.int64) * cache_b + kv_head * cache_k + (j % BLOCK) * D
    owned = (j < high) & (j >= oldest)
    inside = (d < D)[None, :]
    if MASK:
        inside = owned[:, None] & inside
    keys = _load(k_cache + at[:, None] + d[None, :], inside, MASK or D < DP)
    s = dot(queries, keys.to(queries.dtype).T, tl.zeros((queries.shape[0], j.shape[0]), tl.float32))
    if MASK:
        seen = owned[None, :] & (j[None, :] <= position[:, None])
        if WINDOW:
            seen = seen & (j[None, :] > position[:, None] - window)
        s = tl.where(seen, s, -float("inf"))
    new_m = tl.maximum(m, tl.max(s, 1) * scale2)
    shift = new_m
    if MASK:
        shift = tl.where(new_m == -float("inf"), 0.0, new_m)
    p = tl.exp2(s * scale2 - shift[:, None])
    fade = tl.exp2(m - shift)
    l = l * fade + tl.sum(p, 1)
    values = _load(v_cache + at[:, None] + d[None, :], inside, MASK or D < DP)
    acc = dot(p.to(queries.dtype), values.to(queries.dtype), acc * fade[:, None])
    return acc, new_m, l


@kernel
def _load(at, inside, MASK: tl.constexpr):  # type: ignore[no-untyped-def]
    if MASK:
        tile = tl.load(at, inside, 0.0)
    else:
        tile = tl.load(at)
    return tile


@kernel
def _combine(  # type: ignore[no-untyped-def]
    out, part_o, part_l, arrivals, token, row, kv_head, used, splits,
    H: tl.constexpr, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, CHUNK: tl.constexpr,
    FAN: tl.constexpr,
):  # fmt: skip
    """Called by each split of a decode row when its part is written: the last of FAN neighbours puts theirs together,
    the last of those who did puts all together. Which one that is does not matter to the result.
    """
    g = tl.arange(0, GP)
    d = tl.arange(0, DP)
    head = kv_head * G + g
    first = (row.to(tl.int64) * H + head) * splits
    inside = (g < G)[:, None] & (d < D)[None, :]
    mine = tl.program_id(2) // FAN
    groups = tl.cdiv(used, FAN)
    counter = arrivals + (row * tl.num_programs(1) + kv_head) * (1 + tl.cdiv(splits, FAN))
    members = min(FAN, used - mine * FAN)
    if tl.atomic_add(counter + 1 + mine, 1, sem="acq_rel") == members - 1:
        tl.store(counter + 1 + mine, 0)
        m, l, acc = _merge(part_o, part_l, first + mine * FAN, members, 1, G, GP, D, DP, CHUNK)
        last = groups == 1
        if not last:
            at = first + mine * FAN
            tl.debug_barrier()
            tl.store(part_o + at[:, None] * D + d[None, :], acc, inside)
            tl.store(part_l + at * 2, m, g < G)
            tl.store(part_l + at * 2 + 1, l, g < G)
            tl.debug_barrier()
            if tl.atomic_add(counter, 1, sem="acq_rel") == groups - 1:
                tl.store(counter, 0)
                last = True
                m, l, acc = _merge(part_o, part_l, first, groups, FAN, G, GP, D, DP, CHUNK)
        if last:
            at_out = out + token.to(tl.int64) * (H * D) + head[:, None] * D + d[None, :]
            tl.store(at_out, (acc / tl.where(l == 0, 1.0, l)[:, None]).to(out.dtype.element_ty), inside)


@kernel
def _merge(  # type: ignore[no-untyped-def]
    part_o, part_l, first, count, apart, G: tl.constexpr, GP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """``count`` parts from ``first`` on, every ``apart``th, as one: (m, l, o), CHUNK at a time, in their order."""
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
class Tiles:
    """Knobs of ``PagedTriton``: rows and positions of a tile for prefill and decode, and the positions of a split."""

    bm: int = 128
    bn: int = 64
    warps: int = 8
    stages: int = 3
    decode_bn: int = 32
    decode_warps: int = 1
    decode_stages: int = 4
    split: int = 0
    """Positions of a split; 0 cuts each row evenly into as many as fill the chip, negative never splits."""
    programs: int = 8
    """Decode programs wanted on each multiprocessor, where ``split`` is 0."""
    least: int = 64
    """Positions of a split at the least, where ``split`` is 0."""
    chunk: int = 8
    """Splits whose parts are loaded at a time."""
    fan: int = 16
    """Splits that are put together first, before what came of them is."""
    whole: bool = False
    """Rows of one query go the way of prefill chunks, in the same tiles and without splits: then a query's sums are the
    same to the bit whatever the batch is, and however its prompt is cut into chunks."""


SMALL = Tiles(16, 16, 1, 1, 16, 1, 1, chunk=4, fan=3, least=16)
"""For the interpreter."""
MOST_SPLITS = 128


@dataclass(frozen=True, slots=True)
class PagedTriton:
    """``paged_attention`` on a GPU. ``tiles``: None takes what was tuned for the device; a ``split`` above 0 makes the
    cuts the same in every batch."""

    tiles: Tiles | None = None
    bulk: bool = False
    """Prefill chunks by the kernel of ``paged_attention_hopper.py``, where that takes the inputs."""

    def __call__(
        self, q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, scale: float, window: int | None = None
    ) -> Tensor:
        """As ``reference``. Reads no length on the host, so that it can be captured in a CUDA graph."""
        require("paged_attention", q, k_cache, v_cache)
        tokens, heads, d = q.shape
        _, kv_heads, block_size, _ = k_cache.shape
        if heads % kv_heads or k_cache.shape != v_cache.shape or k_cache.shape[3] != d:
            raise ValueError(
                f"paged_attention: q {list(q.shape)} does not fit caches {list(k_cache.shape)}, {list(v_cache.shape)}"
            )
        if k_cache.stride() != v_cache.stride() or k_cache.stride()[2:] != (d, 1):
            # Never so in an engine; one set of strides for both saves the registers that a fourth program needs.
            k_cache, v_cache = k_cache.contiguous(), v_cache.contiguous()
        q = q if q.stride(2) == 1 else q.contiguous()
        out = torch.empty((tokens, heads, d), dtype=q.dtype, device=q.device)
        rows = batch.num_rows
        if tokens == 0:
            return out
        group = heads // kv_heads
        padded_group, padded_d = next_power_of_2(group), max(16, next_power_of_2(d))
        tiles = self.tiles or tuned(rows * kv_heads, batch.max_seq_len, d, q.device)
        if INTERPRETED:
            tiles = replace(SMALL, split=min(tiles.split, 32), programs=tiles.programs, whole=tiles.whole)
        bm = max(tiles.bm, padded_group)
        decode_only = batch.decodes_only(tokens)
        early: dict[str, Any] = {"EARLY": False}
        if q.device.type == "cuda" and torch.cuda.get_device_capability(q.device)[0] >= 9:
            early = {"EARLY": True, "launch_pdl": True}
        shared = {
            "H": heads, "G": group, "GP": padded_group, "D": d, "DP": padded_d, "BLOCK": block_size,
            "WINDOW": window is not None, "MIXED": not (decode_only or tiles.whole), **early,
        }  # fmt: skip
        tables = batch.block_tables
        inputs = (q, k_cache, v_cache, tables, batch.query_starts, batch.seq_lens, out)
        numbers = (
            rows, scale * LOG2E, window or 0, *q.stride()[:2], *k_cache.stride()[:2], tables.stride(0),
        )  # fmt: skip
        bulk = self.bulk and not tiles.whole
        if bulk and not hopper.refuses(q, k_cache, v_cache, batch, scale, window):
            hopper.prefill(
                q, k_cache, v_cache, tables, batch.query_starts, batch.seq_lens, batch.max_seq_len, scale, out
            )
        elif tiles.whole or not decode_only:
            stages = min(tiles.stages, 2) if torch.version.hip else tiles.stages  # 64 KB of shared memory
            _paged[(tokens // (bm // padded_group) + rows, kv_heads)](
                *inputs, None, None, None, *numbers, 0, 1, **shared, BM=bm, BN=tiles.bn, DECODE=False, SPLIT=False,
                CHUNK=1, FAN=1, LEAST=1, num_warps=tiles.warps, num_stages=stages,
            )  # fmt: skip
        if tiles.whole:
            return out
        split, splits = _splits(tiles, batch.max_seq_len, rows * kv_heads, q.device)
        part_o = part_l = arrivals = None
        if splits > 1:
            part_o = q.new_empty((rows, heads, splits, d), dtype=torch.float32)
            part_l = q.new_empty((rows, heads, splits, 2), dtype=torch.float32)
            arrivals = batch.arrivals(rows * kv_heads * (1 + -(-splits // tiles.fan)))
        _paged[(rows, kv_heads, splits)](
            *inputs, part_o, part_l, arrivals, *numbers, split, splits, **shared, BM=max(16, padded_group),
            BN=tiles.decode_bn, DECODE=True, SPLIT=splits > 1, CHUNK=tiles.chunk, FAN=tiles.fan, LEAST=tiles.least,
            num_warps=tiles.decode_warps, num_stages=tiles.decode_stages,
        )  # fmt: skip
        return out


DECODE_CHOICES: Mapping[str, tuple[Any, ...]] = {
    "decode_bn": (16, 32, 64, 128), "decode_warps": (1, 2, 4, 8), "decode_stages": (4, 5, 7),
    "programs": (1, 2, 4, 8), "least": (64, 128, 512),
}  # fmt: skip


WHOLE_ROWS = ((132, 128, 8, 5, 1), (264, 128, 8, 4, 2), (528, 64, 4, 4, 4))
"""Programs at a time of an H200, their tile, warps and stages, and how many are wanted on a multiprocessor."""


def decode_rule(size: tuple[int, int, int]) -> Mapping[str, Any]:
    """Knobs of decode for (rows times key heads, longest row, head dimension).

    Many small programs for each row keep most in flight. Where the rows alone fill the chip nearly evenly, one larger
    program for each is as good, and has nothing to combine.
    """
    for places, bn, warps, stages, programs in WHOLE_ROWS:
        if 0.9 * places <= size[0] <= places:
            return {"decode_bn": bn, "decode_warps": warps, "decode_stages": stages, "programs": programs, "least": 512}
    return {name: getattr(Tiles(), name) for name in DECODE_CHOICES}


@cache
def tuned(units: int, longest: int, d: int, device: torch.device) -> Tiles:
    """What is known to be fastest, or the rule."""
    return replace(Tiles(), **tuning.choose("paged_attention", (units, longest, d), device, decode_rule))


def _splits(tiles: Tiles, longest: int, units: int, device: torch.device) -> tuple[int, int]:
    """Positions of a split (0: the kernel cuts each row evenly), and the most splits that a row may have.

    From bounds that the host has; what a row is in fact cut into the kernel works out from its length.
    """
    if tiles.split < 0:
        return longest, 1
    if tiles.split > 0:
        split = -(-tiles.split // tiles.decode_bn) * tiles.decode_bn
        return split, -(-longest // split)
    wanted = max(1, round(tiles.programs * multiprocessors(device) / units))
    return 0, min(wanted, -(-longest // tiles.least), MOST_SPLITS)


def cost(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, scale: float, window: int | None = None
) -> Cost:
    """4 d FLOPs for each visible pair and head; each cached position that a row sees is read once."""
    pairs = cached = 0
    for new, length in batch.lengths():
        pairs += visible_pairs(new, length, window)
        cached += visible_keys(new, length, window)
    _, kv_heads, _, size = k_cache.shape
    read = cached * kv_heads * size * (k_cache.element_size() + v_cache.element_size())
    return Cost(4 * pairs * q.shape[1] * size, q.nbytes + read, q.nbytes)


def _examples() -> Sequence[dict[str, Any]]:
    examples = []
    for rows, heads, kv_heads, size, block_size, window in (
        (((1, 1),), 1, 1, 8, 16, None),
        (((1, 100), (1, 3), (1, 64), (1, 65)), 6, 2, 16, 16, None),
        (((40, 40), (1, 7), (33, 130), (2, 2)), 4, 4, 10, 4, None),
        (((1, 200), (70, 90), (5, 5)), 9, 3, 16, 16, 20),
        (((3, 70),), 2, 1, 8, 128, 5),
    ):
        n_blocks = sum(-(-length // block_size) for _, length in rows) + 3
        examples.append(
            {
                "q": 2 * sample(sum(new for new, _ in rows), heads, size),
                "k_cache": sample(n_blocks, kv_heads, block_size, size, seed=1),
                "v_cache": sample(n_blocks, kv_heads, block_size, size, seed=2),
                "batch": example_batch(rows, block_size, n_blocks),
                "scale": size**-0.5,
                "window": window,
            }
        )
    return examples


def _gathered(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, scale: float, window: int | None = None
) -> Tensor:
    """What torch offers: every sequence copied out of its pages, then its attention; for rows of one length."""
    rows, (_, kv_heads, block, d) = batch.num_rows, k_cache.shape
    length = batch.block_tables.shape[1] * block
    tables = batch.block_tables.long()
    keys, values = (
        cache[tables].transpose(1, 2).reshape(rows, kv_heads, length, d) for cache in (k_cache, v_cache)
    )  # fmt: skip
    queries = q.view(rows, -1, *q.shape[1:]).transpose(1, 2)
    new = queries.shape[2]
    distance = torch.arange(length - new, length, device=q.device)[:, None] - torch.arange(length, device=q.device)
    mask = None if new == 1 and window is None else (distance >= 0) & (distance < (window or length))
    if mask is not None and window is None and new == length:
        out = F.scaled_dot_product_attention(queries, keys, values, is_causal=True, scale=scale, enable_gqa=True)
    else:
        out = F.scaled_dot_product_attention(queries, keys, values, mask, scale=scale, enable_gqa=True)
    return out.transpose(1, 2).reshape(q.shape)


MOST_CASE_BYTES = 5e9


def _cases() -> Sequence[Case]:
    def case(model: shapes.ModelShape, rows: int, context: int, new: int) -> Case:
        def make(device: torch.device, seed: int) -> Mapping[str, Any]:
            generator = torch.Generator(device).manual_seed(seed)
            options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "generator": generator}
            blocks = rows * context // BLOCK_SIZE
            tables = torch.randperm(blocks, device=device, generator=generator).to(torch.int32).view(rows, -1)
            starts = torch.arange(rows + 1, dtype=torch.int32, device=device) * new
            lengths = torch.full((rows,), context, dtype=torch.int32, device=device)
            k_cache, v_cache = (
                torch.randn(blocks, model.n_kv_heads, BLOCK_SIZE, model.head_dim, **options) for _ in range(2)
            )
            return {
                "q": torch.randn(rows * new, model.n_heads, model.head_dim, **options),
                "k_cache": k_cache,
                "v_cache": v_cache,
                "batch": PagedBatch(tables, starts, lengths, BLOCK_SIZE),
                "scale": model.head_dim**-0.5,
            }

        step = "decode" if new == 1 else f"prefill of {new}"
        return Case(f"{model.name}, {step}, {rows} rows at {context}", make)

    per_token = 4 * shapes.LLAMA_8B.n_kv_heads * shapes.LLAMA_8B.head_dim
    decode = [
        case(shapes.LLAMA_8B, rows, context, 1)
        for context in (512, 1024, 4096, 32768)
        for rows in (1, 8, 32, 64, 128, 256)
        if rows * context * per_token < MOST_CASE_BYTES
    ]
    others = [
        case(model, rows, 1024, 1) for model in (shapes.LLAMA_1B, shapes.QWEN3_0_6B) for rows in shapes.DECODE_ROWS
    ]
    chunks = [case(shapes.LLAMA_8B, *sizes) for sizes in ((16, 512, 512), (4, 2048, 2048), (4, 8192, 512))]
    return [*decode, *others, *chunks, case(shapes.QWEN3_0_6B, 16, 512, 512)]


def _launch(q: Tensor, batch: PagedBatch, config: Mapping[str, Any], **others: Any) -> Tensor:
    return PagedTriton(replace(Tiles(), **config))(q, batch=batch, **others)


def _size(arguments: Mapping[str, Any]) -> tuple[int, int, int]:
    batch, cache_ = arguments["batch"], arguments["k_cache"]
    return batch.num_rows * cache_.shape[1], batch.max_seq_len, cache_.shape[3]


def _decodes(arguments: Mapping[str, Any]) -> bool:
    return bool(arguments["batch"].decodes_only(len(arguments["q"])))


def _valid(config: Mapping[str, Any], size: tuple[int, int, int]) -> bool:
    """A warp has at least 16 positions of a tile and at most 64, and a split at least a tile."""
    return 16 <= config["decode_bn"] // config["decode_warps"] <= 64 and config["decode_bn"] <= config["least"]


def _kernels() -> Sequence[Kernel]:
    ints = dict.fromkeys(
        ("B", "window", "q_t", "q_h", "cache_b", "cache_k", "table_b", "split_length", "splits"), "i32"
    )  # fmt: skip
    indices = dict.fromkeys(("tables", "starts", "lengths"), "*i32")
    halves = dict.fromkeys(("q", "k_cache", "v_cache", "out"), "*bf16")
    shape = {
        "H": 32,
        "G": 4,
        "GP": 4,
        "D": 128,
        "DP": 128,
        "BLOCK": 16,
        "WINDOW": False,
        "MIXED": False,
        "EARLY": False,
    }
    parts = {"part_o": "*fp32", "part_l": "*fp32", "arrivals": "*i32"}
    none = dict.fromkeys(parts)
    divisible = ("q_t", "q_h", "cache_b", "cache_k")
    return [
        Kernel(
            name="decode",
            function=_paged,
            arguments={**halves, **indices, **parts, "scale2": "fp32", **ints},
            constants={
                **shape, "BM": 16, "BN": 32, "DECODE": True, "SPLIT": True, "CHUNK": 8, "FAN": 16, "LEAST": 64,
            },
            divisible=divisible,
            warps=1,
            stages=4,
        ),
        *(
            Kernel(
                name=name,
                function=_paged,
                arguments={**halves, **indices, "scale2": "fp32", **ints},
                constants={
                    **shape, "BM": 128, "BN": 64, "DECODE": False, "SPLIT": False, "CHUNK": 1, "FAN": 1, "LEAST": 1,
                    **none,
                },
                divisible=divisible,
                warps=8,
                stages=stages,
                targets=targets,
            )
            for name, stages, targets in (("prefill", 3, ("sm_80", "sm_90")), ("prefill_amd", 2, ("gfx942",)))
        ),
        *hopper.kernels(),
    ]  # fmt: skip


register(
    Op(
        name="paged_attention",
        reference=reference,
        cost=cost,
        implementations={
            "torch": Implementation("torch", lambda: tiled, ("any",)),
            "torch_uniform": Implementation("torch", lambda: tiled_uniform, ("any",), batch_invariant=True),
            "triton": Implementation("triton", available(PagedTriton(bulk=True)), TRITON_TARGETS),
            "triton_uniform": Implementation(
                "triton",
                available(PagedTriton(Tiles(bm=64, warps=4, whole=True))),
                TRITON_TARGETS,
                batch_invariant=True,
            ),
        },
        examples=_examples,
        peers={"torch, gathered": _gathered},
        cases=_cases,
        kernels=_kernels,
        knobs=(Knobs("paged_attention", DECODE_CHOICES, decode_rule, _launch, dict, _size, _valid, _decodes),),
    )
)
