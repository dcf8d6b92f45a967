"""Prefill chunks gathered by the bulk copy engine: the same sums as the portable kernel's, NaN in slots not owned."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from transect.ops import paged_attention_hopper as module
from transect.ops.kv_cache_write import example_batch
from transect.ops.paged_attention import PagedTriton, reference
from transect.ops.paged_batch import PagedBatch

hopper = pytest.mark.skipif(module.unavailable() is not None, reason=str(module.unavailable()))
MIXED = ((40, 40), (1, 7), (33, 130), (2, 2), (1, 900))
ROWS = [MIXED, ((128, 128),), ((200, 1000), (1, 500), (5, 5), (129, 384), (31, 257)), ((2, 129), (3, 2050))]


def poisoned(
    rows: tuple[tuple[int, int], ...], heads: int, kv_heads: int, d: int, block: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedBatch, float]:
    """Rows of (tokens of this step, tokens in all) in scattered blocks; what they do not own is NaN or no block."""
    generator = torch.Generator().manual_seed(5)
    needed = [-(-length // block) for _, length in rows]
    pool = torch.randperm(sum(needed) + 3, generator=generator).tolist()
    tables = torch.full((len(rows), max(needed) + 2), 2**30, dtype=torch.int32)
    k_cache = torch.full((len(pool), kv_heads, block, d), torch.nan)
    v_cache = k_cache.clone()
    for row, (_, length) in enumerate(rows):
        for column in range(needed[row]):
            tables[row, column] = pool.pop()
            owned = min(block, length - column * block)
            for cache in (k_cache, v_cache):
                cache[tables[row, column], :, :owned] = torch.randn(kv_heads, owned, d, generator=generator)
    starts = torch.tensor([0, *(new for new, _ in rows)]).cumsum(0, dtype=torch.int32)
    lengths = torch.tensor([length for _, length in rows], dtype=torch.int32)
    q = 2 * torch.randn(int(starts[-1]), heads, d, generator=generator)
    batch = PagedBatch(tables, starts, lengths, block).to("cuda")
    return q.to("cuda", dtype), k_cache.to("cuda", dtype), v_cache.to("cuda", dtype), batch, d**-0.5


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "d", "block", "dtype"),
    [
        (32, 8, 128, 16, torch.bfloat16),
        (32, 8, 64, 16, torch.bfloat16),
        (16, 8, 128, 16, torch.float16),
        (4, 4, 128, 32, torch.bfloat16),
        (8, 1, 64, 128, torch.bfloat16),
        (6, 6, 128, 8, torch.bfloat16),
    ],
)
def test_as_the_portable_kernel(rows: tuple, heads: int, kv_heads: int, d: int, block: int, dtype: torch.dtype) -> None:
    arguments = poisoned(rows, heads, kv_heads, d, block, dtype)
    assert not module.refuses(*arguments)
    out = PagedTriton(bulk=True)(*arguments)
    portable = PagedTriton()(*arguments)
    exact = reference(*(a.double() if isinstance(a, torch.Tensor) else a for a in arguments))
    allowed = 1.3 * float((portable.double() - exact).norm())
    assert float((out.double() - exact).norm()) <= allowed
    for _ in range(3):
        assert torch.equal(PagedTriton(bulk=True)(*arguments), out)


@pytest.mark.gpu
@hopper
def test_what_it_does_not_take_goes_the_portable_way() -> None:
    for heads, kv_heads, d, block, dtype, window in (
        (6, 2, 64, 16, torch.bfloat16, None),
        (4, 2, 96, 16, torch.bfloat16, None),
        (4, 2, 64, 24, torch.bfloat16, None),
        (4, 2, 64, 16, torch.float32, None),
        (4, 2, 64, 16, torch.bfloat16, 50),
    ):
        q, k_cache, v_cache, batch, scale = poisoned(MIXED, heads, kv_heads, d, block, dtype)
        assert module.refuses(q, k_cache, v_cache, batch, scale, window)
        out = PagedTriton(bulk=True)(q, k_cache, v_cache, batch, scale, window)
        wanted = reference(q.double(), k_cache.double(), v_cache.double(), batch, scale, window)
        torch.testing.assert_close(out.double(), wanted, rtol=0, atol=2e-2)


@pytest.mark.gpu
@hopper
def test_a_captured_step_follows_its_buffers() -> None:
    """Rows and tokens that are left over are not written, and lengths are read at every replay."""
    q, k_cache, v_cache, batch, scale = poisoned(ROWS[2], 32, 8, 128, 16, torch.bfloat16)
    starts, lengths = batch.query_starts.clone(), batch.seq_lens.clone()
    PagedTriton(bulk=True)(q, k_cache, v_cache, batch, scale)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = PagedTriton(bulk=True)(q, k_cache, v_cache, batch, scale)
    for cut in (0, 3, 64):
        batch.seq_lens.copy_(lengths)
        batch.seq_lens[0] -= cut  # the first row's chunk ends earlier, its tokens are those before
        batch.query_starts.copy_(starts)
        graph.replay()
        exact = reference(q.double(), k_cache.double(), v_cache.double(), batch, scale)
        assert float((out.double() - exact).norm() / exact.norm()) < 5e-3


def test_without_a_gpu_it_says_so() -> None:
    if module.unavailable() is None:
        pytest.skip("there is a Hopper GPU")
    q = torch.zeros(4, 4, 64, dtype=torch.bfloat16)
    cache = torch.zeros(2, 2, 16, 64, dtype=torch.bfloat16)
    assert "Hopper" in module.refuses(q, cache, cache, example_batch(((4, 9),), 16, 2), 0.125)
