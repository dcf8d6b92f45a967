"""Prefill chunks gathered by the bulk copy engine: the same sums as the portable kernel's, NaN in slots not owned."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from transect.ops.attention.paged import prefill_hopper as module
from transect.ops.attention.paged.batch import PagedBatch
from transect.ops.attention.paged.decode_hopper import PagedDecode
from transect.ops.attention.paged.dispatch import PagedTriton
from transect.ops.attention.paged.kv_cache_write import example_batch
from transect.ops.attention.paged.paged_attention import reference
from transect.ops.attention.paged.rotary_kv_write import triton_rotary_kv_write

hopper = pytest.mark.skipif(module.device_refusal() is not None, reason=str(module.device_refusal()))
MIXED = ((40, 40), (1, 7), (33, 130), (2, 2), (1, 900))
ROWS = [
    MIXED,
    ((128, 128),),
    ((200, 1000), (1, 500), (5, 5), (129, 384), (31, 257)),
    ((2, 129), (3, 2050), (90, 1500)),
]


def poisoned(
    rows: tuple[tuple[int, int], ...], heads: int, kv_heads: int, d: int, block: int, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedBatch, float]:
    """Rows of (tokens of this step, tokens in all); what they do not own is NaN or no block. The blocks of the first
    row are neighbours, those of the second are scattered, those of the third are in two runs, and so on."""
    generator = torch.Generator().manual_seed(5)
    needed = [-(-length // block) for _, length in rows]
    blocks = sum(needed) + 3
    tables = torch.full((len(rows), max(needed) + 2), 2**30, dtype=torch.int32)
    k_cache = torch.full((blocks, kv_heads, block, d), torch.nan)
    v_cache = k_cache.clone()
    for row, (_, length) in enumerate(rows):
        own = torch.arange(needed[row]) + 3 + sum(needed[:row])
        if row % 3 == 1:
            own = own[torch.randperm(len(own), generator=generator)]
        tables[row, : len(own)] = own.roll(len(own) // 2) if row % 3 == 2 else own
        for column in range(needed[row]):
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
        (28, 4, 128, 16, torch.bfloat16),
        (24, 8, 128, 16, torch.bfloat16),
        (14, 2, 64, 16, torch.bfloat16),
        (5, 1, 64, 32, torch.float16),
        (32, 8, 96, 16, torch.bfloat16),
        (21, 3, 96, 16, torch.bfloat16),
        (16, 8, 256, 16, torch.bfloat16),
        (4, 4, 256, 64, torch.float16),
        (6, 2, 256, 16, torch.bfloat16),
    ],
)
def test_as_the_portable_kernel(rows: tuple, heads: int, kv_heads: int, d: int, block: int, dtype: torch.dtype) -> None:
    arguments = poisoned(rows, heads, kv_heads, d, block, dtype)
    assert not module.refusal(*arguments)
    out = PagedTriton(bulk=True)(*arguments)
    portable = PagedTriton()(*arguments)
    exact = reference(*(a.double() if isinstance(a, torch.Tensor) else a for a in arguments))
    allowed = 1.3 * float((portable.double() - exact).norm())
    assert float((out.double() - exact).norm()) <= allowed
    for _ in range(3):
        assert torch.equal(PagedTriton(bulk=True)(*arguments), out)


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize("chunk_rows", [2, 16])
def test_each_kernel_has_its_own_rows(chunk_rows: int) -> None:
    """Prompts first, decodes behind them, in a step that is one graph, launch after launch."""
    rows = ((100, 700), (31, 31), *((0, 0),) * (chunk_rows - 2), *((1, 40 + 23 * n) for n in range(90)))
    q, k_cache, v_cache, plain, scale = poisoned(rows, 32, 8, 128, 16, torch.bfloat16)
    apart = PagedBatch(plain.block_tables, plain.query_starts, plain.seq_lens, 16, chunk_rows=chunk_rows)
    attend = PagedTriton(bulk=True, decode=PagedDecode())
    expected = PagedTriton()(q, k_cache, v_cache, plain, scale)
    graph = torch.cuda.CUDAGraph()
    attend(q, k_cache, v_cache, apart, scale, dependent_launch=True)
    with torch.cuda.graph(graph):
        found = [attend(q, k_cache, v_cache, apart, scale, dependent_launch=True) for _ in range(4)]
    for _ in range(3):
        for out in found:
            out.fill_(torch.nan)
        graph.replay()
        for out in found:
            torch.testing.assert_close(out, expected, rtol=0, atol=2e-2)
            assert torch.equal(out, found[0])


@pytest.mark.gpu
@hopper
@pytest.mark.parametrize(
    ("prompts", "decodes"),
    [
        (((120, 120), (30, 900), *((0, 0),) * 14), 100),
        (((3, 3), (24, 24)) * 9 + ((3, 3), (4, 4)) + ((0, 0),) * 12, 0),
    ],
    ids=["beside", "alone"],
)
def test_prompts_see_what_the_kernel_before_wrote(prompts: tuple, decodes: int) -> None:
    """Beside decodes their kernel waits for nothing itself: it begins when the decode kernel has seen the end of the
    one before. In a step that has no room for decodes there is no such kernel."""
    rows = (*prompts, *((1, 300 + 7 * n) for n in range(decodes)))
    _, k_cache, v_cache, plain, scale = poisoned(rows, 32, 8, 128, 16, torch.bfloat16)
    batch = PagedBatch(plain.block_tables, plain.query_starts, plain.seq_lens, 16, chunk_rows=len(prompts))
    attend = PagedTriton(bulk=True, decode=PagedDecode())
    layers = [(k_cache.clone(), v_cache.clone()) for _ in range(4)]
    generator = torch.Generator("cuda").manual_seed(2)
    options = {"device": "cuda", "dtype": torch.bfloat16, "generator": generator}
    joined = torch.zeros(250, 48, 128, device="cuda", dtype=torch.bfloat16)
    q, k, v = joined.split([32, 8, 8], dim=1)
    cos, sin = torch.randn(2, 250, 64, device="cuda", generator=generator).cos(), torch.zeros(250, 64, device="cuda")

    def step(dependent_launch: bool = True) -> list[torch.Tensor]:
        found = []
        for keys, values in layers:
            turned = triton_rotary_kv_write(
                q, k, v, cos[0], sin, keys, values, batch, dependent_launch=dependent_launch
            )
            found.append(attend(turned, keys, values, batch, scale, dependent_launch=dependent_launch))
        return found

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    for _ in range(20):
        joined.copy_(torch.randn(joined.shape, **options))
        for keys, values in layers:  # other caches in every layer, and nothing of this step in them
            keys.copy_(torch.where(k_cache.isnan(), k_cache, torch.randn(keys.shape, **options)))
            values.copy_(torch.where(v_cache.isnan(), v_cache, torch.randn(values.shape, **options)))
        graph.replay()
        for (keys, values), out in zip(layers, found, strict=True):
            turned = triton_rotary_kv_write(q, k, v, cos[0], sin, keys, values, batch)
            expected = PagedTriton()(turned, keys, values, plain, scale)
            torch.testing.assert_close(out, expected, rtol=0, atol=2e-2)


@pytest.mark.gpu
@hopper
def test_what_it_does_not_take_goes_the_portable_way() -> None:
    for heads, kv_heads, d, block, dtype, window in (
        (4, 2, 256, 128, torch.bfloat16, None),
        (4, 2, 80, 16, torch.bfloat16, None),
        (4, 2, 64, 24, torch.bfloat16, None),
        (4, 2, 64, 16, torch.float32, None),
        (4, 2, 64, 16, torch.bfloat16, 50),
    ):
        q, k_cache, v_cache, batch, scale = poisoned(MIXED, heads, kv_heads, d, block, dtype)
        assert module.refusal(q, k_cache, v_cache, batch, scale, window)
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
    if module.device_refusal() is None:
        pytest.skip("there is a Hopper GPU")
    q = torch.zeros(4, 4, 64, dtype=torch.bfloat16)
    cache = torch.zeros(2, 2, 16, 64, dtype=torch.bfloat16)
    assert "Hopper" in module.refusal(q, cache, cache, example_batch(((4, 9),), 16, 2), 0.125)
