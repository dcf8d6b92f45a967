"""Paged attention and the writing of its cache, with NaN in every slot that a request does not own."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from transect.ops.attention.paged.batch import PagedBatch
from transect.ops.attention.paged.kv_cache_write import reference as kv_cache_write
from transect.ops.attention.paged.paged_attention import reference
from transect.ops.attention.paged.paged_attention_torch import tiled, tiled_uniform
from transect.ops.numerics import sample

WAYS = [reference, tiled, tiled_uniform]
MIXED = ((1, 100), (40, 40), (1, 1), (33, 130), (1, 64), (1, 65), (2, 2), (7, 71))
"""(tokens of this step, tokens in all): decode rows between first, later and short prefill chunks."""


class Case:
    """Sequences with known keys and values, and a poisoned pool that holds exactly them, in scattered blocks."""

    def __init__(
        self,
        rows: tuple[tuple[int, int], ...],
        *,
        heads: int = 6,
        kv_heads: int = 2,
        size: int = 8,
        block_size: int = 16,
        window: int | None = None,
        dtype: torch.dtype = torch.float64,
        stale: int = -1,
    ) -> None:
        self.rows, self.window, self.scale = rows, window, size**-0.5
        needed = [-(-length // block_size) for _, length in rows]
        n_blocks = sum(needed) + 5
        pool = torch.randperm(n_blocks, generator=torch.Generator().manual_seed(3)).tolist()
        tables = torch.full((len(rows), max(needed) + 2), stale, dtype=torch.int32)
        self.k_cache = torch.full((n_blocks, kv_heads, block_size, size), torch.nan, dtype=dtype)
        self.v_cache = self.k_cache.clone()
        self.sequences = []
        for row, (new, length) in enumerate(rows):
            q = 2 * sample(new, heads, size, seed=10 * row).to(dtype)
            k, v = (sample(length, kv_heads, size, seed=10 * row + i).to(dtype) for i in (1, 2))
            self.sequences.append((q, k, v))
            for column in range(needed[row]):
                block = pool.pop()
                tables[row, column] = block
                first = column * block_size
                # What attention must not look at, because the window has passed it, stays poisoned too.
                alive = 0 if window is None else max(0, length - new - window + 1)
                for position in range(max(first, alive), min(first + block_size, length - new)):
                    self.k_cache[block, :, position - first] = k[position]
                    self.v_cache[block, :, position - first] = v[position]
        starts = torch.tensor([0, *(new for new, _ in rows)]).cumsum(0, dtype=torch.int32)
        lengths = torch.tensor([length for _, length in rows], dtype=torch.int32)
        self.batch = PagedBatch(tables, starts, lengths, block_size)

    def run(self, function) -> torch.Tensor:
        """Write this step's keys and values, then attend."""
        k_cache, v_cache = self.k_cache.clone(), self.v_cache.clone()
        k = torch.cat([k[-q.shape[0] :] for q, k, _ in self.sequences])
        v = torch.cat([v[-q.shape[0] :] for q, _, v in self.sequences])
        kv_cache_write(k, v, k_cache, v_cache, self.batch)
        q = torch.cat([q for q, _, _ in self.sequences])
        return function(q, k_cache, v_cache, self.batch, self.scale, self.window)

    def dense(self) -> torch.Tensor:
        """Torch's attention, a sequence at a time, on keys and values that were never paged."""
        parts = []
        for q, k, v in self.sequences:
            new, length = q.shape[0], k.shape[0]
            distance = torch.arange(length - new, length)[:, None] - torch.arange(length)
            mask = (distance >= 0) & (distance < (self.window or length))
            group = q.shape[1] // k.shape[1]
            k_h, v_h = (x.transpose(0, 1).repeat_interleave(group, dim=0) for x in (k, v))
            out = F.scaled_dot_product_attention(q.transpose(0, 1), k_h, v_h, mask, scale=self.scale)
            parts.append(out.transpose(0, 1))
        return torch.cat(parts)


@pytest.mark.parametrize("function", WAYS)
@pytest.mark.parametrize("window", [None, 1, 20, 64, 500])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
def test_mixed_batch(function, window: int | None, heads: int, kv_heads: int) -> None:
    case = Case(MIXED, heads=heads, kv_heads=kv_heads, window=window)
    torch.testing.assert_close(case.run(function), case.dense(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("function", WAYS)
@pytest.mark.parametrize("block_size", [1, 4, 24, 64, 128])
def test_block_sizes(function, block_size: int) -> None:
    case = Case(MIXED, block_size=block_size, window=50)
    torch.testing.assert_close(case.run(function), case.dense(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("function", WAYS)
def test_unused_table_entries_may_be_anything(function) -> None:
    case = Case(MIXED, stale=2**31 - 1)
    torch.testing.assert_close(case.run(function), case.dense(), rtol=0, atol=1e-12)


@pytest.mark.parametrize("function", WAYS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_reduced_precision(function, dtype: torch.dtype) -> None:
    case = Case(MIXED, dtype=dtype)
    exact = Case(MIXED, dtype=dtype)
    exact.sequences = [tuple(x.double() for x in sequence) for sequence in exact.sequences]
    out = case.run(function)
    assert out.dtype == dtype
    assert (out.double() - exact.dense()).abs().max() <= 8 * torch.finfo(dtype).eps


@pytest.mark.parametrize("function", WAYS)
def test_nan_of_one_request_stays_with_it(function) -> None:
    """A request whose own keys or values are NaN spoils itself alone."""
    case = Case(MIXED)
    case.sequences[3][1][5] = torch.nan
    case.sequences[3][2][5] = torch.nan
    block = int(case.batch.block_tables[3, 0])
    case.k_cache[block, :, 5] = case.v_cache[block, :, 5] = torch.nan
    out = case.run(function).split([new for new, _ in MIXED])
    clean = Case(MIXED).dense().split([new for new, _ in MIXED])
    for row, (got, want) in enumerate(zip(out, clean, strict=True)):
        if row == 3:
            assert got.isnan().all()
        else:
            torch.testing.assert_close(got, want, rtol=0, atol=1e-12)


@pytest.mark.parametrize("window", [None, 20])
def test_a_row_is_the_same_alone_and_in_a_batch(window: int | None) -> None:
    """To the bit, in float32: the fixed tiles and the one shape of work items of ``tiled_uniform``."""
    for heads, kv_heads, size in ((6, 2, 8), (9, 3, 64), (1, 1, 16)):
        sizes = {"heads": heads, "kv_heads": kv_heads, "size": size, "window": window, "dtype": torch.float32}
        together = Case(MIXED, **sizes)
        rows = together.run(tiled_uniform).split([new for new, _ in MIXED])
        for row, both in enumerate(rows):
            alone = Case((MIXED[row],), **sizes)
            alone.sequences = [together.sequences[row]]
            k, v = (x[: MIXED[row][1] - MIXED[row][0]] for x in together.sequences[row][1:])
            for position in range(k.shape[0]):
                slot = (int(alone.batch.block_tables[0, position // 16]), slice(None), position % 16)
                alone.k_cache[slot], alone.v_cache[slot] = k[position], v[position]
            assert torch.equal(alone.run(tiled_uniform), both), (row, heads)


def test_write_touches_only_the_slots_of_its_tokens() -> None:
    case = Case(MIXED)
    k_cache, v_cache = torch.zeros_like(case.k_cache), torch.zeros_like(case.v_cache)
    tokens = sum(new for new, _ in MIXED)
    k, v = sample(tokens, 2, 8, seed=1).double(), sample(tokens, 2, 8, seed=2).double()
    kv_cache_write(k, v, k_cache, v_cache, case.batch)
    token = 0
    for row, (new, length) in enumerate(MIXED):
        for position in range(length - new, length):
            block = int(case.batch.block_tables[row, position // 16])
            assert torch.equal(k_cache[block, :, position % 16], k[token])
            assert torch.equal(v_cache[block, :, position % 16], v[token])
            token += 1
    assert int((k_cache != 0).any(-1).any(1).sum()) == tokens


def test_batch_positions_and_checks() -> None:
    batch = Case(((2, 5), (1, 1), (3, 3))).batch
    assert batch.positions_T.tolist() == [3, 4, 0, 0, 1, 2]
    assert batch.rows_T.tolist() == [0, 0, 1, 2, 2, 2]
    assert batch.lengths() == [(2, 5), (1, 1), (3, 3)]
    int32 = {"dtype": torch.int32}
    with pytest.raises(ValueError, match="3 query starts"):
        PagedBatch(torch.zeros(2, 4, **int32), torch.zeros(2, **int32), torch.ones(2, **int32), 16)
    with pytest.raises(ValueError, match=r"lengths must be int32, not torch\.int64"):
        PagedBatch(torch.zeros(2, 4, **int32), torch.zeros(3, **int32), torch.ones(2, dtype=torch.int64), 16)
