"""The Triton kernel of paged attention: buffers larger than the batch, splits by length, the same bits in any batch."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from transect.ops.jit import INTERPRETED
from transect.ops.kv_cache_write import example_batch
from transect.ops.numerics import sample
from transect.ops.paged_attention import PagedTriton, Tiles, reference
from transect.ops.paged_batch import PagedBatch

pytestmark = [
    pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="needs the interpreter or a GPU"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]
DEVICE = "cpu" if INTERPRETED else "cuda"
torch.set_num_threads(1)
SCALE = 0.25
DECODE = ((1, 100), (1, 3), (1, 64), (1, 257), (1, 16))
MIXED = ((1, 100), (20, 33), (1, 7), (2, 2), (5, 90))


def caches(n_blocks: int = 64) -> tuple[torch.Tensor, torch.Tensor]:
    return sample(n_blocks, 2, 16, 16, seed=1).to(DEVICE), sample(n_blocks, 2, 16, 16, seed=2).to(DEVICE)


def roomy(batch: PagedBatch, rows: int, columns: int) -> PagedBatch:
    """The batch in buffers of ``rows`` rows and ``columns`` blocks; what is left over must not be read."""
    used, width = batch.block_tables.shape
    tables = torch.full((rows, columns), 2**30, dtype=torch.int32, device=DEVICE)
    tables[:used, :width] = batch.block_tables
    lengths = torch.zeros(rows, dtype=torch.int32, device=DEVICE)
    lengths[:used] = batch.seq_lens
    decode = bool((batch.query_starts.diff() == 1).all())
    starts = torch.arange(rows + 1, dtype=torch.int32, device=DEVICE)
    if not decode:
        starts[:] = batch.query_starts[-1]
        starts[: used + 1] = batch.query_starts
    longest = int(batch.seq_lens.max()) + 5
    return PagedBatch(tables, starts, lengths, 16, max_seq_len=longest, max_query_len=1 if decode else None)


@pytest.mark.parametrize("rows", [DECODE, MIXED], ids=["decode", "mixed"])
@pytest.mark.parametrize("window", [None, 30])
@pytest.mark.parametrize("split", [-1, 0, 32])
def test_buffers_may_be_larger_than_the_batch(rows: tuple, window: int | None, split: int) -> None:
    batch = example_batch(rows, 16, 64).to(DEVICE)
    tokens = sum(new for new, _ in rows)
    q = 2 * sample(tokens, 6, 16).to(DEVICE)
    attend = PagedTriton(Tiles(split=split))
    expected = reference(q, *caches(), batch, SCALE, window)
    torch.testing.assert_close(attend(q, *caches(), batch, SCALE, window), expected, rtol=0, atol=2e-5)
    larger = roomy(batch, 9, 40)
    more = 9 if rows is DECODE else tokens + 4
    padded = torch.cat([q, torch.full((more - tokens, 6, 16), 7.0, device=DEVICE)])
    out = attend(padded, *caches(), larger, SCALE, window)
    torch.testing.assert_close(out[:tokens], expected, rtol=0, atol=2e-5)
    if rows is DECODE:
        assert not out[tokens:].any()
    assert not larger.arrivals(1).any()  # every counter is back at 0, ready for the next layer


def test_a_row_has_the_same_bits_in_any_batch_with_splits_of_one_length() -> None:
    attend = PagedTriton(Tiles(split=32))
    batch = example_batch(DECODE, 16, 64).to(DEVICE)
    q = sample(len(DECODE), 6, 16).to(DEVICE)
    together = attend(q, *caches(), batch, SCALE)
    assert torch.equal(attend(q, *caches(), roomy(batch, 5, 40), SCALE), together)
    for row in range(len(DECODE)):
        alone = PagedBatch(
            batch.block_tables[row : row + 1],
            torch.tensor([0, 1], dtype=torch.int32, device=DEVICE),
            batch.seq_lens[row : row + 1],
            16,
        )
        assert torch.equal(attend(q[row : row + 1], *caches(), alone, SCALE), together[row : row + 1])


def test_more_splits_than_are_combined_at_a_time() -> None:
    batch = example_batch(((1, 700), (1, 5)), 16, 64).to(DEVICE)
    q = sample(2, 6, 16).to(DEVICE)
    for tiles in (Tiles(split=16, programs=40), Tiles(programs=40, chunk=2), Tiles(programs=40)):
        out = PagedTriton(tiles)(q, *caches(), batch, SCALE)
        torch.testing.assert_close(out, reference(q, *caches(), batch, SCALE), rtol=0, atol=2e-5)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("rows", [DECODE, MIXED], ids=["decode", "mixed"])
def test_a_captured_step_follows_its_buffers(rows: tuple) -> None:
    larger = roomy(example_batch(rows, 16, 64).to(DEVICE), 9, 40)
    tokens = 9 if rows is DECODE else sum(new for new, _ in rows) + 4
    q = torch.zeros(tokens, 6, 16, device=DEVICE)
    k_cache, v_cache = caches()
    attend = PagedTriton()
    attend(q, k_cache, v_cache, larger, SCALE)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers = [attend(q, k_cache, v_cache, larger, SCALE) for _ in range(3)]
    for seed in range(5):
        order = torch.randperm(5, generator=torch.Generator().manual_seed(seed)).tolist()
        shuffled = tuple(rows[i] for i in order)
        batch = example_batch(shuffled, 16, 64).to(DEVICE)
        fresh = roomy(batch, 9, 40)
        for buffer, value in (
            (larger.block_tables, fresh.block_tables),
            (larger.query_starts, fresh.query_starts),
            (larger.seq_lens, fresh.seq_lens),
        ):
            buffer.copy_(value)
        q.copy_(sample(tokens, 6, 16, seed=seed))
        used = sum(new for new, _ in rows)
        graph.replay()
        expected = reference(q[:used], k_cache, v_cache, batch, SCALE)
        for layer in layers:
            torch.testing.assert_close(layer[:used], expected, rtol=0, atol=2e-5)
            assert torch.equal(layer[:used], layers[0][:used])
