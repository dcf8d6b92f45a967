"""Prefill chunks whose keys and values are copied out of their pages first, on Hopper GPUs.

A kernel that takes keys out of pages asks the copy engine for a piece of each page, where keys side by side are one
request: with 4,096 queries at 12,288 positions it takes a quarter longer (``docs/lab-notes/attention.md``). So the keys
and values of rows with several queries are copied side by side, and the kernel of ``packed/hopper.py`` attends to the
copy. For C queries of H heads and L positions of K key heads a layer's attention takes 4 C L H d FLOPs, and the copy
moves 8 L K d bytes: with 1,024 queries that takes some hundredths of the time.

Shapes: caches ``[blocks, K, block_size, d]``, copies ``[N, K, d]``: every row begins at a multiple of ``KEY_TILE``, and
the places behind its last token are 0. ``PagedBatch.key_starts`` says where.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from ...lang.jit import TRITON_TARGETS, kernel_of_numbers, tl
from ...registry import Kernel
from ..packed import hopper
from ..packed.tiling import padded
from .batch import PagedBatch

LEAST_TOKENS = 1024
"""Tokens of a step from which copying pays."""
MOST_BYTES = 1 << 28
"""Bytes that copies may take; longer rows stay in their pages."""


@kernel_of_numbers("rows", "table_b")
def _gather(  # type: ignore[no-untyped-def]
    k_cache, v_cache, k_out, v_out, tables, keys, lengths, rows, table_b, cache_b, cache_k, D: tl.constexpr,
    DP: tl.constexpr, K: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Axis 0: tiles of places; axis 1: key heads."""
    first = tl.program_id(0) * TILE
    head = tl.program_id(1)
    low = 0
    high = rows
    while high - low > 1:  # the last row that begins at or before the tile; rows without places begin where others do
        middle = (low + high) // 2
        if tl.load(keys + middle) <= first:
            low = middle
        else:
            high = middle
    position = first - tl.load(keys + low) + tl.arange(0, TILE)
    owned = (position < tl.load(lengths + low)) & (first < tl.load(keys + low + 1))
    row = tl.full((), 0, tl.int64) + low
    block = tl.load(tables + row * table_b + position // BLOCK, owned, 0).to(tl.int64)
    d = tl.arange(0, DP)
    at = (block * cache_b + head * cache_k + position % BLOCK * D)[:, None] + d[None, :]
    inside = owned[:, None] & (d < D)[None, :]
    place = (first + tl.arange(0, TILE)).to(tl.int64)
    to = (place * K + head)[:, None] * D + d[None, :]
    tl.store(k_out + to, tl.load(k_cache + at, inside, 0.0), (d < D)[None, :])
    tl.store(v_out + to, tl.load(v_cache + at, inside, 0.0), (d < D)[None, :])


def gather(k_cache: Tensor, v_cache: Tensor, batch: PagedBatch) -> tuple[Tensor, Tensor]:
    """Keys and values of the rows with several queries, ``[batch.key_room, K, d]``; both caches have one layout, a
    head's part of a block in one piece."""
    assert batch.key_room is not None
    _, kv_heads, block, d = k_cache.shape
    k, v = (cache.new_empty((batch.key_room, kv_heads, d)) for cache in (k_cache, v_cache))
    tile = 64  # KEY_TILE is a multiple
    _gather[(batch.key_room // tile, kv_heads)](
        k_cache, v_cache, k, v, batch.block_tables, batch.key_starts, batch.seq_lens, batch.num_rows,
        batch.block_tables.stride(0), k_cache.stride(0), k_cache.stride(1), D=d, DP=padded(d), K=kv_heads,
        BLOCK=block, TILE=tile, num_warps=4,
    )  # fmt: skip
    return k, v


def room_bytes(places: int, kv_heads: int, d: int) -> int:
    """Bytes of both copies, of 16 bits a number."""
    return 4 * places * kv_heads * d


def pays(q: Tensor, k_cache: Tensor, batch: PagedBatch) -> bool:
    """Whether the keys are to be copied, for a batch that ``prefill_hopper.refusal`` does not refuse."""
    room, d = batch.key_room, q.shape[2]
    if not room or len(q) < LEAST_TOKENS or d not in hopper.HEAD_DIMS:
        return False
    return room_bytes(room, k_cache.shape[1], d) <= MOST_BYTES and hopper.takes(q, q, q)


def prefill(q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, scale: float, out: Tensor) -> None:
    """Causal attention of the rows with several queries, written to their places in ``out`` ``[T, H, d]``."""
    k, v = gather(k_cache, v_cache, batch)
    hopper.chunks(q, k, v, batch.key_starts, batch.query_starts, batch.seq_lens, scale, out)


def kernels() -> Sequence[Kernel]:
    """The kernel to compile ahead of time."""
    caches = dict.fromkeys(("k_cache", "v_cache", "k_out", "v_out"), "*bf16")
    pointers = caches | dict.fromkeys(("tables", "keys", "lengths"), "*i32")
    ints = dict.fromkeys(("rows", "table_b", "cache_b", "cache_k"), "i32")
    sizes = {"D": 128, "DP": 128, "K": 8, "BLOCK": 16, "TILE": 64}
    return [Kernel("gather", _gather, pointers | ints, sizes, ("cache_b", "cache_k"), targets=TRITON_TARGETS)]
