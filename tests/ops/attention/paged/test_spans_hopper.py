"""``paged_spans_hopper.cu`` on this processor: values, and the same bits however spans are dealt out to warps. On a
GPU ``test_decode_spans.py`` compares its bits with those of prompts."""

import re
from types import SimpleNamespace

import cuda_host
import pytest
import torch
from effort import proving

from transect.ops.attention.paged import decode_spans
from transect.ops.attention.paged.batch import PagedBatch
from transect.ops.attention.paged.decode_spans import SpansHopperTiling as Tiling
from transect.ops.attention.paged.paged_attention import reference
from transect.ops.lang import cuda_build

LENGTHS = [300, 0, 17, 800, 256, 33, 1]


def kernel(monkeypatch, multiprocessors):
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: SimpleNamespace(cuda_stream=0))
    monkeypatch.setattr(decode_spans, "multiprocessors", lambda device: multiprocessors)
    made = object.__new__(decode_spans.PagedSpans)
    made._launch = cuda_host.Launcher(
        "paged_spans_hopper", "transect_paged_spans", decode_spans.PagedSpans.SIGNATURE, None,
        "-D__CUDA_ARCH__=900", "-D__CUDA_ARCH_FEAT_SM90_ALL",
    )  # fmt: skip
    return made


def batch_of(lengths, blocks, queries=1):
    """Rows of one query, behind one row of ``queries``."""
    columns = -(-max(lengths) // 16)
    tables = torch.randint(0, blocks, (len(lengths), columns), dtype=torch.int32)
    starts = torch.tensor([0, *range(queries, queries + len(lengths))], dtype=torch.int32)
    return PagedBatch(tables, starts, torch.tensor(lengths, dtype=torch.int32), 16, max_query_len=queries)


@pytest.mark.parametrize(("group", "d"), [(4, 64), (12, 64), (3, 128)])
def test_bits_do_not_depend_on_who_sums_which_spans(monkeypatch, group, d):
    torch.manual_seed(0)
    caches = [torch.randn(70, 2, 16, d).bfloat16() for _ in range(2)]
    q = torch.randn(len(LENGTHS), 2 * group, d).bfloat16()
    batch = batch_of(LENGTHS, 70)
    present = [row for row, length in enumerate(LENGTHS) if length]
    some = PagedBatch(
        batch.block_tables[present], torch.arange(len(present) + 1, dtype=torch.int32), batch.seq_lens[present], 16
    )
    exact = reference(q[present].double(), *(cache.double() for cache in caches), some, d**-0.5)
    whole = None
    ways = [(units, room, Tiling(0, warps)) for units, warps, room in ((1, 1, 0), (5, 1, 0), (2, 3, 0))]
    ways += [(units, 1 << 24, Tiling(0, warps)) for units, warps in ((1, 1), (1, 4), (3, 1), (2, 3), (25, 4))]
    ways += [(1, 1 << 24, Tiling(ranks, 4 // ranks)) for ranks in (2, 4)]
    ways += [(1, 1 << 24, Tiling(8, 1))]
    ways += [(1, 1 << 24, Tiling(ranks, together=True)) for ranks in (2, 4, 8)]
    for number, (units, room, tiling) in enumerate(ways):
        run = kernel(monkeypatch, units)
        monkeypatch.setattr(decode_spans.PagedSpans, "ROOM", room)
        for seed in (1, 2) if proving() else (number,):
            run._launch.draw(seed)
            out = torch.full_like(q, float("nan"))
            assert run(q, *caches, batch, d**-0.5, out=out, tiling=tiling) is out
            whole = out if whole is None else whole
            assert torch.equal(out, whole), (units, room, tiling)
            assert not batch.arrivals(1).any()
    assert (whole[present].double() - exact).norm() < 0.01 * exact.norm()
    assert not whole[LENGTHS.index(0)].any()


def test_rows_of_several_queries_are_left_alone(monkeypatch):
    caches = [torch.randn(40, 2, 16, 64).bfloat16() for _ in range(2)]
    lengths = [90, 300, 40]
    batch = batch_of(lengths, 40, queries=5)
    q = torch.randn(7, 8, 64).bfloat16()
    exact = reference(q.double(), *(cache.double() for cache in caches), batch, 0.125)
    for tiling in (Tiling(0, 2), Tiling(2, 1), Tiling(2, together=True)):
        out = torch.zeros_like(q)
        kernel(monkeypatch, 4)(q, *caches, batch, 0.125, out=out, beside=True, tiling=tiling)
        assert not out[:5].any()
        assert (out[5:].double() - exact[5:]).norm() < 0.01 * exact[5:].norm()


@pytest.mark.parametrize("tiling", [Tiling(0, 1), Tiling(2, 2), Tiling(4, 1), Tiling(2, together=True)])
def test_keys_of_other_rows_are_read_when_the_kernel_before_has_written_them(monkeypatch, tiling):
    """A draft's row sees keys of this step beyond its own: here from 61 on, in the tile before its last too."""
    torch.manual_seed(0)
    old = [torch.randn(5, 3, 16, 64).bfloat16() for _ in range(2)]
    new = [cache.clone() for cache in old]
    for cache in new:
        cache[3, :, 13:], cache[4] = torch.randn(3, 3, 64).bfloat16(), torch.randn(3, 16, 64).bfloat16()
    q = torch.randn(1, 9, 64).bfloat16()
    run = kernel(monkeypatch, 4)

    def attended(**how):
        table, starts, length = (torch.tensor(each, dtype=torch.int32) for each in ([[0, 1, 2, 3, 4]], [0, 1], [67]))
        batch = PagedBatch(table, starts, length, 16, fresh=how.pop("fresh", False))
        return run(q, *new, batch, 0.125, tiling=tiling, **how)

    right = attended()
    run._launch.late(new, old)
    assert torch.equal(attended(), right)
    assert torch.equal(attended(dependent_launch=True, fresh=True), right)
    assert not torch.equal(attended(dependent_launch=True), right)  # for rows that share nothing


def test_few_items_go_to_clusters_of_two_blocks_and_more():
    sizes = [(8, 4), (16, 4), (24, 4), (64, 4), (128, 4), (136, 4), (128, 8), (8, 1), (8, 8), (8, 16), (64, 2)]
    found = [decode_spans.choose(*size) for size in sizes]
    assert [each.ranks for each in found] == [4, 4, 4, 2, 2, 0, 0, 2, 8, 8, 2]
    assert [each.together for each in found] == [True] * 3 + [False] * 4 + [True] * 2 + [False, True]
    assert [each.warps for each in found if each.ranks and not each.together] == [2, 2, 2]


def test_the_launcher_is_called_with_what_the_source_says():
    source = cuda_build.source("paged_spans_hopper.cu").read_text()
    (parameters,) = re.findall(r'^extern "C" int transect_paged_spans\(([^)]*)\)', source, re.M)
    letters = {"int": "i", "long long": "l", "float": "f"}
    kinds = [re.sub(r"\s*\w+$", "", one.strip()) for one in parameters.split(",")]
    expected = decode_spans.PagedSpans.SIGNATURE
    assert "".join("p" if kind.endswith("*") else letters[kind] for kind in kinds) == expected
