"""Write a step's keys and values into the paged KV cache.

Token t of row b stands at position p of its sequence; its slot is offset ``p % block_size`` of block
``block_table[b][p // block_size]``. A copy, no arithmetic, no gradient; the caches change in place.

Shapes: k and v ``[T, K, d]``; caches of one layer ``[blocks, K, block_size, d]``: the keys of a block lie together by
head, which is how attention reads them.
Source: the paged cache of Kwon et al. 2023, arXiv:2309.06180.

Bound by bytes: 0 FLOPs; each element is read once and written once.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .numerics import sample
from .paged_batch import PagedBatch
from .registry import Cost, Implementation, Op, register


def reference(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch) -> None:
    """Copy k, v ``[T, K, d]`` into the slots of the batch's tokens."""
    blocks, offsets = batch.slots_T
    k_cache[blocks, :, offsets] = k.to(k_cache.dtype)
    v_cache[blocks, :, offsets] = v.to(v_cache.dtype)


def cost(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch) -> Cost:
    """Each new key and value read and written once; block tables are not counted."""
    return Cost(0, k.nbytes + v.nbytes, k.numel() * k_cache.element_size() + v.numel() * v_cache.element_size())


def example_batch(rows: Sequence[tuple[int, int]], block_size: int, n_blocks: int) -> PagedBatch:
    """A batch of (new tokens, tokens in all), its blocks scattered over the pool; unowned table entries are -1."""
    widest = max(-(-length // block_size) for _, length in rows)
    tables = torch.full((len(rows), widest), -1, dtype=torch.int32)
    pool = torch.randperm(n_blocks, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    taken = 0
    for row, (_, length) in enumerate(rows):
        count = -(-length // block_size)
        tables[row, :count] = pool[taken : taken + count]
        taken += count
    starts = torch.tensor([0, *(new for new, _ in rows)]).cumsum(0, dtype=torch.int32)
    return PagedBatch(tables, starts, torch.tensor([length for _, length in rows], dtype=torch.int32), block_size)


def _examples() -> Sequence[dict[str, Any]]:
    examples = []
    for rows, heads, size, block_size in ((((1, 1),), 1, 4, 16), (((1, 9), (13, 20), (5, 5)), 3, 6, 4)):
        tokens = sum(new for new, _ in rows)
        examples.append(
            {
                "k": sample(tokens, heads, size),
                "v": sample(tokens, heads, size, seed=1),
                "k_cache": sample(16, heads, block_size, size, seed=2),
                "v_cache": sample(16, heads, block_size, size, seed=3),
                "batch": example_batch(rows, block_size, 16),
            }
        )
    return examples


register(
    Op(
        name="kv_cache_write",
        reference=reference,
        cost=cost,
        implementations={"torch": Implementation("torch", lambda: reference, ("any",), batch_invariant=True)},
        examples=_examples,
        mutates=("k_cache", "v_cache"),
    )
)
