"""The Triton kernels of paged attention: buffers larger than the batch, shares that begin anywhere, the same bits."""

from __future__ import annotations

import itertools

import pytest
import torch
from effort import proving, quick_first

pytest.importorskip("triton")

from transect.ops.attention.paged import kv_cache_write
from transect.ops.attention.paged.batch import PagedBatch
from transect.ops.attention.paged.decode import DecodeTiling
from transect.ops.attention.paged.dispatch import PagedTriton
from transect.ops.attention.paged.kv_cache_write import example_batch
from transect.ops.attention.paged.paged_attention import reference
from transect.ops.attention.paged.rotary_kv_write import triton_rotary_kv_write
from transect.ops.lang.jit import INTERPRETED
from transect.ops.numerics import sample

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


@pytest.mark.parametrize(
    ("rows", "window", "programs"),
    quick_first(itertools.product([DECODE, MIXED], [None, 30], [1, 8]), [(DECODE, 30, 8), (MIXED, None, 1)]),
    ids=lambda value: {DECODE: "decode", MIXED: "mixed"}.get(value),
)
def test_buffers_may_be_larger_than_the_batch(rows: tuple, window: int | None, programs: int) -> None:
    batch = example_batch(rows, 16, 64).to(DEVICE)
    tokens = sum(new for new, _ in rows)
    q = 2 * sample(tokens, 6, 16).to(DEVICE)
    attend = PagedTriton(singles=DecodeTiling(programs=programs))
    expected = reference(q, *caches(), batch, SCALE, window)
    if proving():  # as it is: ``test_numerics.py``
        torch.testing.assert_close(attend(q, *caches(), batch, SCALE, window), expected, rtol=0, atol=2e-5)
    larger = roomy(batch, 9, 40)
    more = 9 if rows is DECODE else tokens + 4
    padded = torch.cat([q, torch.full((more - tokens, 6, 16), 7.0, device=DEVICE)])
    out = attend(padded, *caches(), larger, SCALE, window)
    torch.testing.assert_close(out[:tokens], expected, rtol=0, atol=2e-5)
    if rows is DECODE:
        assert not out[tokens:].any()
    assert not larger.arrivals(1).any()  # every counter is back at 0, ready for the next layer


@pytest.mark.parametrize(("chunk_rows", "window"), quick_first(itertools.product([3, 5], [None, 30]), [(5, 30)]))
def test_rows_of_several_queries_may_stand_first(chunk_rows: int, window: int | None) -> None:
    """Each kernel then looks at its own rows alone; rows between the two kinds may be left over."""
    rows = ((20, 33), (2, 2), (5, 90), *((0, 0),) * (chunk_rows - 3), (1, 100), (1, 7), (1, 16), (1, 64))
    plain = example_batch(rows, 16, 64).to(DEVICE)
    apart = PagedBatch(plain.block_tables, plain.query_starts, plain.seq_lens, 16, chunk_rows=chunk_rows)
    q = 2 * sample(31, 6, 16).to(DEVICE)
    expected = reference(q, *caches(), plain, SCALE, window)
    torch.testing.assert_close(PagedTriton()(q, *caches(), apart, SCALE, window), expected, rtol=0, atol=2e-5)
    chunks, singles = apart.parts
    assert (chunks.num_rows, singles.num_rows) == (chunk_rows, 4)
    assert not singles.decodes_only(4) and not chunks.decodes_only(chunk_rows)
    assert apart.to("cpu").chunk_rows == chunk_rows and plain.parts == (plain, plain)


def test_a_step_may_have_no_room_for_rows_of_one_query() -> None:
    plain = example_batch(((20, 33), (2, 2), (5, 90)), 16, 64).to(DEVICE)
    apart = PagedBatch(plain.block_tables, plain.query_starts, plain.seq_lens, 16, chunk_rows=3)
    q = 2 * sample(27, 6, 16).to(DEVICE)
    expected = reference(q, *caches(), plain, SCALE)
    torch.testing.assert_close(PagedTriton()(q, *caches(), apart, SCALE), expected, rtol=0, atol=2e-5)


TWO, ONE, MANY = ((1, 700), (1, 5)), ((1, 700),), ((1, 16),) * 3 + ((1, 160),) + ((1, 48),) * 4


@pytest.mark.parametrize(
    ("rows", "programs"),
    quick_first(itertools.product([TWO, ONE, MANY], [1, 2, 3, 7, 40]), [(TWO, 2), (ONE, 7), (MANY, 3)]),
    ids=str,
)
def test_shares_may_begin_anywhere(rows: tuple, programs: int) -> None:
    """An item in one share, in two, in more than are combined at a time; shares of many items, and of none."""
    batch = example_batch(rows, 16, 64).to(DEVICE)
    q = 2 * sample(len(rows), 6, 16).to(DEVICE)
    out = PagedTriton(singles=DecodeTiling(programs=programs))(q, *caches(), batch, SCALE)
    torch.testing.assert_close(out, reference(q, *caches(), batch, SCALE), rtol=0, atol=2e-5)


def test_more_rows_than_programs() -> None:
    """Rows that are left over come round too."""
    rows = tuple((1, 1 + 7 * (row % 5)) for row in range(21))
    batch = roomy(example_batch(rows, 16, 64).to(DEVICE), 40, 12)
    q = 2 * sample(40, 6, 16).to(DEVICE)
    out = PagedTriton(singles=DecodeTiling(programs=1))(q, *caches(), batch, SCALE)
    expected = reference(q[:21], *caches(), example_batch(rows, 16, 64).to(DEVICE), SCALE)
    torch.testing.assert_close(out[:21], expected, rtol=0, atol=2e-5)
    assert not out[21:].any()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "d"), [(32, 8, 128), (16, 8, 128), (9, 3, 64), (6, 1, 256)])
def test_real_sizes_with_nan_where_nothing_is_owned(dtype: torch.dtype, heads: int, kv_heads: int, d: int) -> None:
    generator = torch.Generator(DEVICE).manual_seed(1)
    lengths = [1, 700, 33, 2000, 64, 5, 1500, 128, 900, 17, 640, 3000]
    batch = example_batch(tuple((1, length) for length in lengths), 16, 700).to(DEVICE)
    options = {"device": DEVICE, "dtype": dtype, "generator": generator}
    q = torch.randn(len(lengths), heads, d, **options)
    k_cache, v_cache = (torch.randn(700, kv_heads, 16, d, **options) for _ in range(2))
    owned = torch.zeros(700, 16, dtype=torch.bool, device=DEVICE)
    for row, length in enumerate(lengths):
        position = torch.arange(length, device=DEVICE)
        owned[batch.block_tables[row, position // 16].long(), position % 16] = True
    hole = ~owned[:, None, :, None]
    k_cache, v_cache = k_cache.masked_fill(hole, torch.nan), v_cache.masked_fill(hole, torch.nan)
    for window in (None, 100):
        exact = reference(q.double(), k_cache.double(), v_cache.double(), batch, d**-0.5, window)
        out = PagedTriton()(q, k_cache, v_cache, batch, d**-0.5, window)
        allowed = 2e-5 if dtype == torch.float32 else 1.5 * torch.finfo(dtype).eps
        assert float((out.double() - exact).norm() / exact.norm()) < allowed
        for _ in range(5):
            assert torch.equal(PagedTriton()(q, k_cache, v_cache, batch, d**-0.5, window), out)


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


@pytest.mark.parametrize("rows", quick_first([(MIXED,), (DECODE,)], 1), ids=["mixed", "decode"])
def test_a_cache_in_fp8_gives_what_its_numbers_give(rows: tuple) -> None:
    batch = example_batch(rows, 16, 64).to(DEVICE)
    q = 2 * sample(sum(new for new, _ in rows), 6, 16).to(DEVICE)
    small = [cache.to(torch.float8_e4m3fn) for cache in caches()]
    expected = reference(q, *(cache.float() for cache in small), batch, SCALE, None)
    torch.testing.assert_close(reference(q, *small, batch, SCALE, None), expected, rtol=0, atol=2e-5)
    torch.testing.assert_close(PagedTriton()(q, *small, batch, SCALE, None), expected, rtol=0, atol=2e-5)


def test_keys_and_values_are_written_in_fp8() -> None:
    """By both kernels; the interpreter cuts off where a GPU rounds."""
    batch = example_batch(MIXED, 16, 64).to(DEVICE)
    tokens = sum(new for new, _ in MIXED)
    q, k, v = (sample(tokens, heads, 16, seed=heads).to(DEVICE) for heads in (6, 2, 2))
    cos, sin = torch.ones(tokens, 8, device=DEVICE), torch.zeros(tokens, 8, device=DEVICE)
    made = []
    for write in (kv_cache_write.reference, kv_cache_write.triton_kv_cache_write, None):
        caches_ = [torch.zeros(64, 2, 16, 16, device=DEVICE).to(torch.float8_e4m3fn) for _ in range(2)]
        if write is None:
            triton_rotary_kv_write(q, k, v, cos, sin, *caches_, batch)
        else:
            write(k, v, *caches_, batch)
        made.append(torch.stack([cache.float() for cache in caches_]))
    assert made[0].any()
    for other in made[1:]:
        assert (other != made[0]).float().mean() < 0.05
