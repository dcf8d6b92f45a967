"""Decode rows in CUDA C++ on Hopper: the reference's values for any lengths, NaN in slots not owned, one launch less
with ``Turn``, the same bits in every run."""

from __future__ import annotations

import re

import pytest
import torch

from transect.ops import cuda, rotary_kv_write
from transect.ops import paged_decode_hopper as module
from transect.ops.paged_attention import reference
from transect.ops.paged_batch import PagedBatch
from transect.ops.paged_decode_hopper import PagedDecode, Plan, Turn, choose
from transect.ops.registry import Unavailable

LENGTHS = [
    [640],
    [1],
    [5, 0, 17, 700, 0, 16, 33, 1500],
    [100, 2000, 31, 0, 1],
    [147 + 37 * n % 1000 for n in range(40)],
]
HEADS = [(32, 8, 128), (16, 8, 128), (8, 8, 64), (9, 3, 64), (24, 2, 128)]
PLANS = [Plan(6), Plan(2, blocks=2), Plan(6, ranks=1), Plan(5, ranks=4), Plan(3, ranks=8)]


def poisoned(
    lengths: list[int], heads: int, kv_heads: int, d: int, device: str = "cuda"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedBatch]:
    """Rows of these lengths in scattered blocks; what they do not own is NaN, or no block."""
    generator = torch.Generator().manual_seed(len(lengths) + heads)
    counts = [-(-length // 16) for length in lengths]
    pool = torch.randperm(sum(counts) + 3, generator=generator).tolist()
    tables = torch.full((len(lengths), max(counts) + 2), 2**30, dtype=torch.int32)
    k_cache = torch.full((len(pool), kv_heads, 16, d), torch.nan)
    v_cache = k_cache.clone()
    for row, length in enumerate(lengths):
        for column in range(counts[row]):
            tables[row, column] = block = pool.pop()
            owned = min(16, length - column * 16)
            for cache in (k_cache, v_cache):
                cache[block, :, :owned] = torch.randn(kv_heads, owned, d, generator=generator)
    q = 2 * torch.randn(len(lengths), heads, d, generator=generator)
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32)
    batch = PagedBatch(tables, starts, torch.tensor(lengths, dtype=torch.int32), 16, max_query_len=1)
    q, k_cache, v_cache = (x.to(device, torch.bfloat16) for x in (q, k_cache, v_cache))
    return q, k_cache, v_cache, batch.to(device)


def exact(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, batch: PagedBatch, window: int | None = None
) -> torch.Tensor:
    """In float64; zeros for rows of length 0."""
    live = (batch.seq_lens > 0).nonzero()[:, 0]
    starts = torch.arange(len(live) + 1, dtype=torch.int32, device=q.device)
    rows = PagedBatch(batch.block_tables[live], starts, batch.seq_lens[live], 16)
    out = torch.zeros_like(q, dtype=torch.float64)
    out[live] = reference(q[live].double(), k_cache.double(), v_cache.double(), rows, q.shape[2] ** -0.5, window)
    return out


def error(out: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((out.double() - wanted).norm() / wanted.norm())


@pytest.fixture(scope="module")
def decode() -> PagedDecode:
    try:
        return PagedDecode()
    except Unavailable as error:
        pytest.skip(str(error))


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} rows up to {max(lengths)}")
@pytest.mark.parametrize(("heads", "kv_heads", "d"), HEADS)
@pytest.mark.parametrize("window", [None, 50])
def test_as_the_reference(
    decode: PagedDecode, lengths: list[int], heads: int, kv_heads: int, d: int, window: int | None
) -> None:
    arguments = poisoned(lengths, heads, kv_heads, d)
    wanted = exact(*arguments, window)
    for plan in [None, Plan(module.most_warps(d, heads // kv_heads)), *PLANS]:
        out = decode(*arguments, d**-0.5, window, plan=plan)
        assert error(out, wanted) < 5e-3, plan
        assert not out[arguments[3].seq_lens == 0].any(), plan
        for pdl in (False, True):
            assert torch.equal(decode(*arguments, d**-0.5, window, plan=plan, pdl=pdl), out), plan


@pytest.mark.gpu
def test_rows_of_several_queries_are_left_alone(decode: PagedDecode) -> None:
    lengths = [40, 130, 7, 0, 65]
    q, k_cache, v_cache, batch = poisoned(lengths, 32, 8, 128)
    news = torch.tensor([1, 5, 1, 0, 1])
    starts = torch.cat((torch.zeros(1, dtype=torch.int64), news.cumsum(0))).to("cuda", torch.int32)
    tokens = torch.tensor([0, 6, 7], device="cuda")
    rows = torch.tensor([0, 2, 4], device="cuda")
    q = torch.randn(8, 32, 128, device="cuda").to(torch.bfloat16)
    mixed = PagedBatch(batch.block_tables, starts, batch.seq_lens, 16)
    single = PagedBatch(
        batch.block_tables[rows], torch.arange(4, device="cuda", dtype=torch.int32), batch.seq_lens[rows], 16
    )
    wanted = exact(q[tokens], k_cache, v_cache, single)
    for plan in PLANS:
        out = torch.full_like(q, 7.0)
        assert decode(q, k_cache, v_cache, mixed, 128**-0.5, out=out, plan=plan) is out
        assert error(out[tokens], wanted) < 5e-3, plan
        assert bool((out[1:6] == 7).all()), plan
    with pytest.raises(ValueError, match="one query"):
        decode(q, k_cache, v_cache, mixed, 128**-0.5)


@pytest.mark.gpu
@pytest.mark.parametrize(("heads", "kv_heads", "d"), HEADS)
@pytest.mark.parametrize("norm", [False, True])
def test_turns_queries_and_keys_and_writes_the_cache(
    decode: PagedDecode, heads: int, kv_heads: int, d: int, norm: bool
) -> None:
    for lengths in LENGTHS[2:]:
        _, k_cache, v_cache, batch = poisoned(lengths, heads, kv_heads, d)
        generator = torch.Generator("cuda").manual_seed(1)
        joined = torch.randn(
            len(lengths), (heads + 2 * kv_heads) * d, device="cuda", dtype=torch.bfloat16, generator=generator
        )
        parts = joined.split((heads * d, kv_heads * d, kv_heads * d), -1)
        q, k, v = (part.unflatten(-1, (-1, d)) for part in parts)
        angle = 3 * torch.randn(len(lengths), d // 2, device="cuda", generator=generator)
        weights = 1 + torch.randn(2, d, device="cuda", generator=generator).to(torch.bfloat16) / 4
        named = {"q_weight": weights[0], "k_weight": weights[1]} if norm else {}
        live = batch.seq_lens > 0
        rows = PagedBatch(
            batch.block_tables[live],
            torch.arange(int(live.sum()) + 1, device="cuda", dtype=torch.int32),
            batch.seq_lens[live],
            16,
        )
        keys, values = k_cache.double(), v_cache.double()
        turned = rotary_kv_write.reference(
            *(x[live].double() for x in (q, k, v, angle.cos(), angle.sin())), keys, values, rows,
            **{name: weight.double() for name, weight in named.items()},
        )  # fmt: skip
        wanted = exact(turned, keys, values, rows)
        for plan in PLANS:
            new_k, new_v = k_cache.clone(), v_cache.clone()
            turn = Turn(k, v, angle.cos(), angle.sin(), **named)
            out = decode(q, new_k, new_v, batch, d**-0.5, turn=turn, pdl=True, plan=plan)
            assert error(out[live], wanted) < 8e-3, plan
            assert not out[~live].any(), plan
            torch.testing.assert_close(new_k.double(), keys, rtol=1e-2, atol=1e-2, equal_nan=True)
            torch.testing.assert_close(new_v.double(), values, rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
def test_a_captured_step_follows_its_buffers(decode: PagedDecode) -> None:
    lengths = [147 + 61 * n % 900 for n in range(30)]
    q, k_cache, v_cache, batch = poisoned(lengths, 32, 8, 128)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = decode(q, k_cache, v_cache, batch, 128**-0.5)
    for cut in (0, 1, 130, 147):
        batch.seq_lens.copy_(torch.tensor([length - cut for length in lengths]))
        graph.replay()
        assert error(out, exact(q, k_cache, v_cache, batch)) < 5e-3
        assert torch.equal(decode(q, k_cache, v_cache, batch, 128**-0.5), out)


def test_what_it_does_not_take_is_said() -> None:
    q, k_cache, v_cache, batch = poisoned([20, 3], 4, 2, 64, "cpu")
    refuses = module.refuses
    assert refuses(q, k_cache, v_cache, batch, 0.125) == "" == refuses(q, k_cache, v_cache, batch, 0.125, 9)
    assert "bfloat16" in refuses(q.half(), k_cache, v_cache, batch, 0.125)
    assert "one query" in refuses(q[:1], k_cache, v_cache, batch, 0.125)
    assert "to a key head" in refuses(q.repeat(1, 9, 1), k_cache, v_cache, batch, 0.125)
    assert "heads of" in refuses(q[..., :32], k_cache[..., :32], v_cache[..., :32], batch, 0.125)
    assert "one layout" in refuses(q, k_cache.transpose(0, 1).contiguous().transpose(0, 1), v_cache, batch, 0.125)
    assert "16 bytes" in refuses(q.transpose(1, 2).contiguous().transpose(1, 2), k_cache, v_cache, batch, 0.125)


@pytest.mark.parametrize("d", module.HEAD_DIMS)
@pytest.mark.parametrize("group", [1, 4, 5, 8, 9, 16])
def test_chosen_plans_fit(d: int, group: int) -> None:
    compiled = re.findall(r"^  TRANSECT_PAGED\((\d+), (\d), (\d+), (\w+)\)", module_source(), re.M)
    for turn in ("true", "false"):
        assert (str(d), "1" if group <= 8 else "2", str(module.STAGES), turn) in compiled
    for items in (1, 8, 16, 32, 64, 100, 132, 512, 2048):
        for longest in (64, 1024, 4096, 131072):
            plan = choose(items, longest, d, group)
            assert plan.ranks == 0 or items * plan.ranks <= 132
            shared = plan.warps * (module.STAGES * d * 64 + group * d * 4 + 768) + 4 * (2 * module.MOST_ROWS + 1)
            assert shared <= 225 * 1024
            assert plan.blocks * 132 * group * (d + 4) <= module.PARTS


def module_source() -> str:
    return (cuda.SOURCES / "paged_decode_hopper.cu").read_text()
