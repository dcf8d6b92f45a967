"""Attention on torch alone: a row's float32 result is the same to the bit alone and beside longer rows."""

import pytest
import torch

from transect.ops.attention.paged.batch import PagedBatch
from transect.ops.attention.paged.paged_attention_torch import tiled_uniform

BLOCK, BLOCKS, HEADS, KV_HEADS, SIZE = 16, 64, 4, 2, 32


def attend(q, caches, tables, new, lengths):
    width = max(map(len, tables))
    starts = [0, *torch.tensor(new).cumsum(0).tolist()]
    batch = PagedBatch(
        torch.tensor([[*table, *[0] * (width - len(table))] for table in tables], dtype=torch.int32),
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(lengths, dtype=torch.int32),
        BLOCK,
    )
    return tiled_uniform(q, *caches, batch, SIZE**-0.5)


@pytest.mark.parametrize("seed", range(6))
def test_a_row_is_the_same_alone_and_beside_others(seed):
    """The lengths end in every part of a tile of 64 positions, so the tables are of every width."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [5, 20, 47, 60, 70, 110, 150, 175]
    lengths = [lengths[i] for i in torch.randperm(len(lengths), generator=generator).tolist()]
    new = [1 if row % 2 else 1 + row for row in range(len(lengths))]
    free = iter(torch.randperm(BLOCKS, generator=generator).tolist())
    tables = [[next(free) for _ in range(-(-length // BLOCK))] for length in lengths]
    caches = torch.randn(2, BLOCKS, KV_HEADS, BLOCK, SIZE, generator=generator).unbind()
    q = torch.randn(sum(new), HEADS, SIZE, generator=generator)
    together = attend(q, caches, tables, new, lengths).split(new)
    for row, rows_q in enumerate(q.split(new)):
        alone = attend(rows_q, caches, tables[row : row + 1], new[row : row + 1], lengths[row : row + 1])
        assert torch.equal(alone, together[row]), f"{lengths[row]} positions beside up to {max(lengths)}"
