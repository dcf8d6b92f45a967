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

Bound by bytes in decode: 4 H d FLOPs for each 2 K d cached elements: H / K FLOPs per byte in bfloat16 (3 for SmolLM2).
A prefill chunk of c queries reads them once for all c: c H / K, bound by arithmetic from a few hundred on.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .counting import visible_keys, visible_pairs
from .kv_cache_write import example_batch
from .numerics import compute_dtype, sample
from .paged_batch import PagedBatch, WorkGroup
from .registry import Cost, Implementation, Op, register

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


register(
    Op(
        name="paged_attention",
        reference=reference,
        cost=cost,
        implementations={
            "torch": Implementation("torch", lambda: tiled, ("any",)),
            "torch_uniform": Implementation("torch", lambda: tiled_uniform, ("any",), batch_invariant=True),
        },
        examples=_examples,
    )
)
