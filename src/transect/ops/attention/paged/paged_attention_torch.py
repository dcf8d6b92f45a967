"""Paged attention in plain torch, a tile of positions at a time: for the CPU, and wherever no kernel runs.

It never holds more than a tile of keys and values: it walks over tiles of about 64 positions, all rows at once. Tiles
begin at fixed positions of the sequence. A tile that a row does not see leaves its m, l and o (see
``paged_attention.py``) as they were, to the bit. So in float32 a row's result depends on nothing but the row, except
for how the matrix product treats its number of queries. ``tiled_uniform`` gives all rows the same number, and removes
that too.
"""

from __future__ import annotations

import bisect

import torch
from torch import Tensor

from ...numerics import compute_dtype
from .batch import PagedBatch, WorkGroup
from .cache_codes import values_of

TILE = 64
"""Positions of a tile; rounded to whole blocks."""


def tiled(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None = None,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Compute ``paged_attention.reference`` by tiles; decode rows and prefill chunks are processed separately."""
    out = torch.empty_like(q)
    for group in batch.split_work:
        _attend(group, q, k_cache, v_cache, scale, window, out, softcap, sinks, chunk)
    return out


def tiled_uniform(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    batch: PagedBatch,
    scale: float,
    window: int | None = None,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Compute ``tiled`` with one shape of work item for every row, so that no row's sums depend on the batch."""
    out = torch.empty_like(q)
    for group in batch.uniform_work:
        _attend(group, q, k_cache, v_cache, scale, window, out, softcap, sinks, chunk)
    return out


def _attend(
    group: WorkGroup,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    scale: float,
    window: int | None,
    out: Tensor,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
) -> None:
    """Attend with one group of work items, and write the results to ``out`` ``[T, H, d]``."""
    dtype = compute_dtype(q.dtype)
    items, queries = group.tokens_WQ.shape
    _, kv_heads, block_size, _ = k_cache.shape
    heads, size = q.shape[1:]
    per_tile = max(1, TILE // block_size)
    tile = per_tile * block_size
    # Whole tiles, however wide the batch's block table is: the length of a sum decides how its terms are grouped.
    blocks_WN = torch.nn.functional.pad(group.blocks_WN, (0, -group.blocks_WN.shape[1] % per_tile))

    def by_key_head(x_WQHd: Tensor) -> Tensor:
        """Reorder [W, Q, H, d] to [W, K, Q * H / K, d]: queries that read the same key head become adjacent."""
        x = x_WQHd.view(items, queries, kv_heads, heads // kv_heads, size)
        return x.transpose(1, 2).reshape(items, kv_heads, -1, size)

    q_WKRd = by_key_head(q[group.tokens_WQ].to(dtype) * scale)
    position_W1R1 = group.positions_WQ.repeat_interleave(heads // kv_heads, dim=1)[:, None, :, None]
    last_W11 = group.positions_WQ[:, -1, None, None]
    oldest = torch.zeros_like(group.positions_WQ) if window is None else group.positions_WQ - window + 1
    if chunk is not None:
        oldest = torch.maximum(oldest, group.positions_WQ // chunk * chunk)
    oldest_W1R1 = oldest.repeat_interleave(heads // kv_heads, dim=1)[:, None, :, None]
    oldest_W11 = oldest[:, 0, None, None]

    m = torch.full_like(q_WKRd[..., :1], -torch.inf)
    l = torch.zeros_like(m)
    o = torch.zeros_like(q_WKRd)
    first_tile = 0 if window is None and chunk is None else max(0, int(oldest_W11.min())) // tile
    for index in range(first_tile, group.last_positions[0] // tile + 1):
        # Items stand in order of how far they see, so those that reach this tile are the first n.
        n = bisect.bisect_right(group.last_positions, -index * tile, key=lambda position: -position)
        blocks = blocks_WN[:n, index * per_tile : (index + 1) * per_tile]
        keys = _gather(k_cache, blocks, dtype)
        key_position = torch.arange(index * tile, index * tile + keys.shape[2], device=q.device)
        owned = (key_position <= last_W11[:n]) & (key_position >= oldest_W11[:n])
        values = _gather(v_cache, blocks, dtype).masked_fill(~owned.transpose(1, 2)[:, None], 0)
        visible = (key_position <= position_W1R1[:n]) & (key_position >= oldest_W1R1[:n])
        s = q_WKRd[:n] @ keys.transpose(-1, -2)
        if softcap is not None:
            s = softcap * torch.tanh(s / softcap)
        s = s.masked_fill(~visible, -torch.inf)
        m_new = torch.maximum(m[:n], s.amax(-1, keepdim=True))
        shift = m_new.masked_fill(m_new == -torch.inf, 0)  # nothing seen yet: exp(-inf - 0) is 0, not NaN
        p = torch.exp(s - shift)
        a = torch.exp(m[:n] - shift)
        l[:n] = a * l[:n] + p.sum(-1, keepdim=True)
        o[:n] = a * o[:n] + p @ values
        m[:n] = m_new

    if sinks is not None:  # one more score, without a value
        sink_KR1 = sinks.to(dtype).view(kv_heads, 1, -1).expand(-1, queries, -1).reshape(kv_heads, -1, 1)
        highest = torch.maximum(m, sink_KR1)
        a = torch.exp(m - highest)
        l, o = a * l + torch.exp(sink_KR1 - highest), a * o
    result = (o / l).view(items, kv_heads, queries, heads // kv_heads, size).transpose(1, 2)
    real = torch.arange(queries, device=q.device) < group.used_W[:, None]
    out[group.tokens_WQ[real]] = result.reshape(items, queries, heads, size)[real].to(out.dtype)


def _gather(cache: Tensor, blocks_WN: Tensor, dtype: torch.dtype) -> Tensor:
    """Gather one tile of a cache: blocks ``[W, n]`` -> ``[W, K, n * block_size, d]``."""
    items, count = blocks_WN.shape
    _, kv_heads, block_size, size = cache.shape
    tile = cache[blocks_WN].transpose(1, 2)
    return values_of(tile.reshape(items, kv_heads, count * block_size, size), dtype)
