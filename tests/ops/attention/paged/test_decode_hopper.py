"""Decode rows in CUDA C++ on Hopper: the reference's values for any lengths, NaN in slots not owned, the same bits in
every run."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch

from transect.ops.attention.paged import decode_hopper as module
from transect.ops.attention.paged import dispatch
from transect.ops.attention.paged.batch import PagedBatch
from transect.ops.attention.paged.decode_hopper import DecodeHopperTiling, PagedDecode, choose
from transect.ops.attention.paged.dispatch import PagedTriton
from transect.ops.attention.paged.paged_attention import reference
from transect.ops.lang import cuda_build
from transect.ops.registry import Unavailable

LENGTHS = [
    [640],
    [1],
    [5, 0, 17, 700, 0, 16, 33, 1500],
    [100, 2000, 31, 0, 1],
    [147 + 37 * n % 1000 for n in range(40)],
    [512] * 32,
]
HEADS = [(32, 8, 128), (16, 8, 128), (16, 2, 128), (24, 2, 128), (8, 8, 64), (9, 3, 64), (32, 2, 64)]


def tilings(d: int, fp8: bool = False) -> list[DecodeHopperTiling]:
    """One of each kind, for heads of this size."""
    stages = module.STAGES[d] * (2 if fp8 else 1)
    made = [
        DecodeHopperTiling(9, stages),
        DecodeHopperTiling(2, stages, blocks=2),
        DecodeHopperTiling(6, stages, ranks=1),
        DecodeHopperTiling(4, stages, 2),
    ]
    made += [DecodeHopperTiling(5, stages, 4), DecodeHopperTiling(3, stages, 8)]
    return made + [DecodeHopperTiling(module.WARPS, stages, ranks) for ranks in (0, 1, 2, 4, 8)]


def poisoned(
    lengths: list[int], heads: int, kv_heads: int, d: int, device: str = "cuda"
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, PagedBatch]:
    """Rows of these lengths in scattered blocks; what they do not own is NaN, or no block."""
    generator = torch.Generator(device).manual_seed(len(lengths) + heads)
    counts = [-(-length // 16) for length in lengths]
    pool = torch.randperm(sum(counts) + 3, generator=torch.Generator().manual_seed(len(lengths)))
    tables = torch.full((len(lengths), max(counts) + 2), 2**30, dtype=torch.int32)
    owned = torch.zeros(len(pool), 16, dtype=torch.bool)
    for row, (length, mine) in enumerate(zip(lengths, pool[: sum(counts)].split(counts), strict=True)):
        tables[row, : counts[row]] = mine
        owned[mine] = True
        owned[mine[-1:], 16 - -length % 16 :] = False

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device, generator=generator).to(torch.bfloat16)

    k_cache, v_cache = (drawn(len(pool), kv_heads, 16, d) for _ in range(2))
    for cache in (k_cache, v_cache):
        cache.masked_fill_(~owned[:, None, :, None].to(device), torch.nan)
    starts = torch.arange(len(lengths) + 1, dtype=torch.int32)
    batch = PagedBatch(tables, starts, torch.tensor(lengths, dtype=torch.int32), 16, max_query_len=1)
    return 2 * drawn(len(lengths), heads, d), k_cache, v_cache, batch.to(device)


def exact(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    batch: PagedBatch,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """In float64; zeros for rows of length 0."""
    live = (batch.seq_lens > 0).nonzero()[:, 0]
    starts = torch.arange(len(live) + 1, dtype=torch.int32, device=q.device)
    rows = PagedBatch(batch.block_tables[live], starts, batch.seq_lens[live], 16)
    out = torch.zeros_like(q, dtype=torch.float64)
    caches, scale = (k_cache.double(), v_cache.double()), q.shape[2] ** -0.5
    out[live] = reference(
        q[live].double(), *caches, rows, scale, window, **({} if sinks is None else {"sinks": sinks.double()})
    )
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
    for tiling in [None, *tilings(d)]:
        out = decode(*arguments, d**-0.5, window, tiling=tiling)
        assert error(out, wanted) < 5e-3, tiling
        assert not out[arguments[3].seq_lens == 0].any(), tiling
        for dependent_launch in (False, True):
            assert torch.equal(
                decode(*arguments, d**-0.5, window, tiling=tiling, dependent_launch=dependent_launch), out
            ), tiling


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} rows up to {max(lengths)}")
@pytest.mark.parametrize(("heads", "kv_heads", "d"), HEADS)
@pytest.mark.parametrize("window", [None, 50])
def test_a_cache_in_fp8(
    decode: PagedDecode, lengths: list[int], heads: int, kv_heads: int, d: int, window: int | None
) -> None:
    """Numbers below e4m3's normal range too: every 16th dimension of the keys is 64 times smaller."""
    q, k_cache, v_cache, batch = poisoned(lengths, heads, kv_heads, d)
    k_cache[..., ::16] /= 64
    k_cache, v_cache = (cache.to(torch.float8_e4m3fn) for cache in (k_cache, v_cache))
    wanted = exact(q, k_cache, v_cache, batch, window)
    for tiling in [None, *tilings(d, fp8=True)]:
        out = decode(q, k_cache, v_cache, batch, d**-0.5, window, tiling=tiling)
        assert error(out, wanted) < 5e-3, tiling
        assert not out[batch.seq_lens == 0].any(), tiling
        again = decode(q, k_cache, v_cache, batch, d**-0.5, window, tiling=tiling, dependent_launch=True)
        assert torch.equal(again, out), tiling


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", LENGTHS, ids=lambda lengths: f"{len(lengths)} rows up to {max(lengths)}")
@pytest.mark.parametrize(("heads", "kv_heads"), [(64, 8), (9, 3)])
@pytest.mark.parametrize(("window", "fp8"), [(None, False), (50, False), (None, True)])
def test_heads_with_sinks(
    decode: PagedDecode, lengths: list[int], heads: int, kv_heads: int, window: int | None, fp8: bool
) -> None:
    """Sinks of all sizes: such that take nothing, and such that take nearly all."""
    q, k_cache, v_cache, batch = poisoned(lengths, heads, kv_heads, 64)
    if fp8:
        k_cache, v_cache = (cache.to(torch.float8_e4m3fn) for cache in (k_cache, v_cache))
    sinks = torch.linspace(-20, 12, heads, device="cuda").to(torch.bfloat16)
    wanted = exact(q, k_cache, v_cache, batch, window, sinks)
    for tiling in [None, *tilings(64, fp8)]:
        out = decode(q, k_cache, v_cache, batch, 0.125, window, sinks=sinks, tiling=tiling)
        assert error(out, wanted) < 5e-3, tiling
        assert not out[batch.seq_lens == 0].any(), tiling
        again = decode(q, k_cache, v_cache, batch, 0.125, window, sinks=sinks, tiling=tiling, dependent_launch=True)
        assert torch.equal(again, out), tiling


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [(249, 7), (3, 61), (1, 3), (0, 5)], ids=lambda rows: f"{rows[0]} rows of {sum(rows)}")
@pytest.mark.parametrize("middle", [False, True])
def test_rows_without_a_position_change_nothing(decode: PagedDecode, rows: tuple[int, int], middle: bool) -> None:
    """They give zeros, no table is followed for them, and the others' bits are as without them."""
    live, padding = rows
    lengths = [1 + 37 * n % 200 for n in range(live)]
    at = live // 2 if middle else live
    q, k_cache, v_cache, batch = poisoned(lengths[:at] + [0] * padding + lengths[at:], 32, 8, 128)
    kept = (batch.seq_lens > 0).nonzero()[:, 0]
    starts = torch.arange(live + 1, device="cuda", dtype=torch.int32)
    alone = PagedBatch(batch.block_tables[kept], starts, batch.seq_lens[kept], 16, max_query_len=1)
    for tiling in [None, *tilings(128)]:
        for dependent_launch in (False, True):
            out = torch.full_like(q, 7.0)
            decode(q, k_cache, v_cache, batch, 128**-0.5, out=out, tiling=tiling, dependent_launch=dependent_launch)
            assert not out[batch.seq_lens == 0].any(), tiling
            if tiling is not None:
                assert torch.equal(out[kept], decode(q[kept], k_cache, v_cache, alone, 128**-0.5, tiling=tiling)), (
                    tiling
                )
            elif live:
                assert error(out, exact(q, k_cache, v_cache, batch)) < 5e-3


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
    for tiling in tilings(128):
        out = torch.full_like(q, 7.0)
        assert decode(q, k_cache, v_cache, mixed, 128**-0.5, out=out, tiling=tiling) is out
        assert error(out[tokens], wanted) < 5e-3, tiling
        assert bool((out[1:6] == 7).all()), tiling
    with pytest.raises(ValueError, match="one query"):
        decode(q, k_cache, v_cache, mixed, 128**-0.5)


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
    refusal = module.refusal
    assert refusal(q, k_cache, v_cache, batch, 0.125) is refusal(q, k_cache, v_cache, batch, 0.125, 9) is None
    assert "bfloat16" in refusal(q.half(), k_cache, v_cache, batch, 0.125)
    in_fp8 = [cache.to(torch.float8_e4m3fn) for cache in (k_cache, v_cache)]
    assert refusal(q, *in_fp8, batch, 0.125) is None
    assert "fp8" in refusal(q, k_cache, in_fp8[1], batch, 0.125)
    assert "one query" in refusal(q[:1], k_cache, v_cache, batch, 0.125)
    assert "to a key head" in refusal(q.repeat(1, 9, 1), k_cache, v_cache, batch, 0.125)
    assert "heads of" in refusal(q[..., :32], k_cache[..., :32], v_cache[..., :32], batch, 0.125)
    assert "one layout" in refusal(q, k_cache.transpose(0, 1).contiguous().transpose(0, 1), v_cache, batch, 0.125)
    assert "16 bytes" in refusal(q.transpose(1, 2).contiguous().transpose(1, 2), k_cache, v_cache, batch, 0.125)


def test_the_source_compiles_the_stages_that_are_known_here() -> None:
    source = cuda_build.source("paged_decode_hopper.cu").read_text()
    listed = re.findall(r"^  TRANSECT_PAGED\((\d+), (\d), (\d+), (true|false)\)$", source, re.M)
    kinds = ((1, "false"), (2, "true"))
    known = [(d, n, times * s, kind) for times, kind in kinds for d, s in module.STAGES.items() for n in (1, 2)]
    assert [(int(d), int(n), int(s), kind) for d, n, s, kind in listed] == known


def test_the_launcher_is_called_with_what_the_source_says() -> None:
    source = cuda_build.source("paged_decode_hopper.cu").read_text()
    (parameters,) = re.findall(r'^extern "C" int transect_paged_decode\(([^)]*)\)', source, re.M)
    letters = {"int": "i", "long long": "l", "float": "f"}
    kinds = [re.sub(r"\s*\w+$", "", one.strip()) for one in parameters.split(",")]
    assert "".join("p" if kind.endswith("*") else letters[kind] for kind in kinds) == module.SIGNATURE


@pytest.mark.parametrize("d", module.HEAD_DIMS)
@pytest.mark.parametrize("group", [1, 4, 5, 8, 9, 16])
def test_chosen_tilings_fit(d: int, group: int) -> None:
    for items in (1, 8, 15, 16, 30, 31, 32, 64, 67, 100, 132, 133, 512, 2048):
        for longest in (64, 1024, 1025, 4096, 4097, 131072):
            tiling = choose(items, longest, d)
            assert tiling.stages == module.STAGES[d]
            assert choose(items, longest, d, fp8=True).stages == 2 * tiling.stages
            assert tiling.ranks == 0 or items <= module.AT_ONCE[tiling.ranks]
            assert tiling.ranks == 0 or longest <= module.LONG
            # Buffers, parts of sums and notes of the warps, lengths of the rows: as the launcher counts them.
            shared = tiling.warps * (tiling.stages * 64 * d + group * d * 4 + 768) + 4 * (2 * module.MOST_ROWS + 1)
            assert shared <= 225 * 1024
            assert tiling.blocks * 132 * group * (d + 4) <= module.PARTS


def test_few_items_go_to_clusters() -> None:
    sizes = [(8, 640), (16, 640), (32, 640), (64, 640), (128, 640), (256, 640)]
    assert [choose(*size, 128).ranks for size in sizes] == [4, 4, 2, 2, 1, 0]
    assert [choose(items, 4000, 128).ranks for items in (8, 16, 32, 64, 128)] == [8, 4, 2, 2, 0]
    assert choose(8, 5000, 128) == choose(512, 640, 128) == DecodeHopperTiling(8, 2)


class Streaming:
    """A kernel that takes what ``PagedDecode`` does, and only notes the call."""

    mixed_refusal = staticmethod(module.PagedDecode.mixed_refusal)

    def __init__(self, note: Callable[..., None]) -> None:
        self._note = note

    def __call__(self, *_: object, **named: object) -> None:
        self._note(**named)


@pytest.mark.parametrize(("heads", "d", "kernel"), [(16, 64, "streams"), (18, 64, "triton"), (16, 128, "triton")])
def test_heads_with_sinks_are_streamed_where_the_kernel_takes_them(
    monkeypatch: pytest.MonkeyPatch, heads: int, d: int, kernel: str
) -> None:
    monkeypatch.setattr(dispatch, "require", lambda *_: None)
    ran: list[tuple[str, object]] = []
    monkeypatch.setattr(dispatch.paged_decode, "decode", lambda *_, sinks, **__: ran.append(("triton", sinks)))
    monkeypatch.setattr(dispatch.paged_decode, "tuned", lambda *_: None)
    q, k_cache, v_cache, batch = poisoned([20, 3], heads, 2, d, "cpu")
    sinks = torch.zeros(heads, dtype=torch.bfloat16)
    attend = PagedTriton(decode=Streaming(lambda sinks, **_: ran.append(("streams", sinks))))  # type: ignore[arg-type]
    attend(q, k_cache, v_cache, batch, d**-0.5, sinks=sinks)
    assert [name for name, given in ran if given is not None] == [kernel]
    refused = module.refusal(q, k_cache, v_cache, batch, d**-0.5, sinks=sinks)
    assert (refused is None) == (heads == 16 and d == 64)
    assert "sinks in bfloat16, of heads of 64" in str(module.sinks_refusal(q, k_cache, sinks.float()))


@pytest.mark.parametrize(("prompts", "beside"), [(16, True), (32, False)])
def test_prompts_attend_beside_decodes_only_where_there_are_such(
    monkeypatch: pytest.MonkeyPatch, prompts: int, beside: bool
) -> None:
    """Where all 32 rows are for prompts, their attention is not beside a decode kernel: it waits for the one before."""
    monkeypatch.setattr(dispatch, "require", lambda *_: None)
    ran: list[tuple[str, object]] = []

    def decode(beside: bool = False, **_: object) -> None:
        ran.append(("decode", beside))

    def prefill(*_: object, beside: bool = False, **__: object) -> None:
        ran.append(("prefill", beside))

    monkeypatch.setattr(dispatch.paged_prefill, "prefill", prefill)
    q, k_cache, v_cache, batch = poisoned([20] * 32, 4, 2, 64, "cpu")
    batch = PagedBatch(batch.block_tables, batch.query_starts, batch.seq_lens, 16, chunk_rows=prompts)
    PagedTriton(decode=Streaming(decode))(torch.cat([q] * 2), k_cache, v_cache, batch, 0.125)  # type: ignore[arg-type]
    assert ran == ([("decode", True), ("prefill", True)] if beside else [("prefill", False), ("decode", False)])
