"""Sums through shared memory: the protocol in any order of events, what is refused, and on a GPU the kernels, with one
GPU as all ranks and delays in between. Two GPUs are in ``tests/parallel/test_gpus.py``."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from transect.costs.memory.shared import ONE_SHOT_BYTES, in_two_shots, lines_for
from transect.ops.comm.all_reduce import Peers, cuda_all_reduce, played_by_one, reference, refusal
from transect.ops.registry import Unavailable


class Rank:
    """``all_reduce.cu`` on one rank, a step at a time: every write to another rank's memory and every look at the own
    is a step. ``sets``: of regions, which calls use in turn."""

    def __init__(self, rank: int, memory: list[dict], sets: int = 2) -> None:
        self.rank, self.memory, self.sets, self.ranks = rank, memory, sets, len(memory)

    def run(self, calls: list[tuple[int, bool]]) -> Iterator[None]:
        for flag, (vectors, two_shot) in enumerate(calls, 1):
            yield from self.call(flag, vectors, two_shot)

    def call(self, flag: int, vectors: int, two_shot: bool) -> Iterator[None]:
        share, others = -(-vectors // self.ranks), [r for r in range(self.ranks) if r != self.rank]
        for i in range(vectors):
            if two_shot:
                if i % self.ranks != self.rank:
                    yield from self.put(
                        i % self.ranks, 0, self.rank * share + i // self.ranks, own(self.rank, flag, i), flag
                    )
            else:
                for r in others:
                    yield from self.put(r, 0, self.rank * vectors + i, own(self.rank, flag, i), flag)
        if two_shot:
            for i in range(self.rank, vectors, self.ranks):
                total = yield from self.sum(i // self.ranks, share, flag, i)
                for r in range(self.ranks):
                    yield from self.put(r, 1, self.rank * share + i // self.ranks, total, flag)
        for i in range(vectors):
            if two_shot:
                found = yield from self.take(1, i % self.ranks * share + i // self.ranks, flag)
            else:
                found = yield from self.sum(i, vectors, flag, i)
            assert found == sum(own(r, flag, i) for r in range(self.ranks)), (flag, i)

    def put(self, to: int, which: int, place: int, value: int, flag: int) -> Iterator[None]:
        yield
        assert (which, flag % self.sets, place) not in self.memory[to], "a line that has not been read"
        self.memory[to][which, flag % self.sets, place] = value

    def take(self, which: int, place: int, flag: int):
        while True:
            yield
            value = self.memory[self.rank].pop((which, flag % self.sets, place), None)
            if value is not None:
                return value

    def sum(self, place: int, stride: int, flag: int, i: int):
        total = own(self.rank, flag, i)
        for r in range(self.ranks):
            if r != self.rank:
                total += yield from self.take(0, r * stride + place, flag)
        return total


def own(rank: int, flag: int, i: int) -> int:
    return (rank + 1) * 1000003 + flag * 10007 + i * 101


def play(ranks: int, calls: list[tuple[int, bool]], seed: int, sets: int = 2) -> bool:
    """Whether all ranks come to the end; some run far ahead of others for a while."""
    rng = random.Random(seed)
    memory: list[dict] = [{} for _ in range(ranks)]
    running = [Rank(r, memory, sets).run(calls) for r in range(ranks)]
    for _ in range(200_000):
        if not running:
            return True
        chosen = rng.choice(running)
        for _ in range(rng.choice((1, 3, 200))):
            if next(chosen, chosen) is chosen:
                running.remove(chosen)
                break
    return False


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_order_of_events_gives_the_sums(ranks: int) -> None:
    for seed in range(40):
        rng = random.Random(1000 + seed)
        calls = [(rng.randint(ranks, 9), ranks > 2 and rng.random() < 0.5) for _ in range(8)]
        assert play(ranks, calls, seed)


def test_one_set_of_regions_is_not_enough() -> None:
    """What a rank that runs ahead writes for the next call would cover what a late one has not read."""

    def lost(seed: int) -> bool:
        try:
            return not play(2, [(6, False)] * 6, seed, sets=1)
        except AssertionError:
            return True

    assert any(lost(seed) for seed in range(20))


def test_what_is_refused() -> None:
    lines = lines_for(2, 4096)
    fine = torch.zeros(2, 1024, dtype=torch.bfloat16)
    assert refusal(fine, 2, lines, False) is None and refusal(fine, 2, lines, True) is None
    for x, words in (
        (fine.double(), "torch.float64 has no kernel"),
        (fine[:, 1:], "must be contiguous"),
        (fine.view(-1)[:7], "whole 16 bytes"),
        (fine.view(-1)[:8], "less than 16 for each of 2 ranks"),
        (torch.zeros(2, 2048, dtype=torch.bfloat16), "more than the ranks' memory takes at once"),
    ):
        assert words in (refusal(x, 2, lines, False) or "")
    wide = torch.zeros(1, 1 << 15, dtype=torch.bfloat16)
    assert "rows to be normalised" in (refusal(wide, 2, lines_for(2, wide.nbytes), True) or "")


def test_memory_is_for_both_ways() -> None:
    assert not in_two_shots(2, 1 << 30) and in_two_shots(3, ONE_SHOT_BYTES + 1) and not in_two_shots(8, ONE_SHOT_BYTES)
    for ranks, most in ((2, 4 << 20), (4, 4 << 20), (8, 4 << 20), (8, 64 << 10)):
        lines = lines_for(ranks, most)
        for nbytes in (16 * ranks, ONE_SHOT_BYTES, most):
            x = torch.zeros(min(nbytes, most) // 2, dtype=torch.bfloat16)
            assert refusal(x, ranks, lines, False) is None


def test_the_reference_rounds_once() -> None:
    parts = torch.tensor([[[256.0]], [[1.0]], [[1.0]]], dtype=torch.bfloat16)
    assert torch.equal(reference(parts), torch.full((3, 1, 1), 258.0, dtype=torch.bfloat16))
    normed, total = reference(parts, torch.ones(1, 1, dtype=torch.bfloat16), torch.ones(1, dtype=torch.bfloat16), 1e-5)
    assert normed.shape == total.shape == (3, 1, 1) and float(normed[2]) == 1.0


def test_without_a_gpu_the_reason_is_said() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(Unavailable, match="need an NVIDIA GPU"):
        Peers([0, 0], 0, 64, torch.zeros(1, dtype=torch.int32))


gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")]


def parts_of(ranks: int, rows: int, width: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(ranks, rows, width, device="cuda", dtype=torch.bfloat16, generator=generator)


@pytest.mark.parametrize(
    ("ranks", "rows", "width"),
    [
        pytest.param(ranks, rows, width, marks=gpu)
        for ranks in (2, 3, 4, 8)
        for rows, width in ((1, 4096), (5, 256), (256, 4096))
    ],
)
def test_sums_are_those_of_the_reference_to_the_bit(ranks: int, rows: int, width: int) -> None:
    parts = parts_of(ranks, rows, width)
    assert torch.equal(cuda_all_reduce(parts), reference(parts))
    stream, weight = parts_of(1, rows, width, 1)[0], parts_of(1, 1, width, 2)[0, 0]
    normed, total = cuda_all_reduce(parts, stream, weight, 1e-5)
    wanted, sums = reference(parts, stream, weight, 1e-5)
    assert torch.equal(total, sums)
    torch.testing.assert_close(normed, wanted, atol=0.02, rtol=0.02)
    assert all(torch.equal(normed[0], each) for each in normed)
    alone = cuda_all_reduce(parts[:, :1].contiguous(), stream[:1], weight, 1e-5)[0]
    assert torch.equal(alone[0], normed[0, :1])  # whatever else is in the batch


@pytest.mark.parametrize("ranks", [pytest.param(ranks, marks=gpu) for ranks in (2, 4)])
def test_delays_change_nothing(ranks: int) -> None:
    """Calls of all sizes one after another in a graph, while ranks and blocks dawdle."""
    sizes = [(1, 64), (40, 4096), (1, 4096), (200, 1024), (3, 64)]
    peers, memory = played_by_one(ranks, torch.device("cuda"), lines_for(ranks, 200 * 1024 * 2))
    parts = [parts_of(ranks, rows, width, seed) for seed, (rows, width) in enumerate(sizes)]
    outs = [torch.empty_like(part) for part in parts]
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()

    def work() -> None:
        for part, out in zip(parts, outs, strict=True):
            peers.sum(part, out, delay=20_000)

    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
        with torch.cuda.graph(graph, stream=stream):
            work()
        for _ in range(20):
            for out in outs:
                out.zero_()
            graph.replay()
            for part, out in zip(parts, outs, strict=True):
                assert torch.equal(out, reference(part))
    stream.synchronize()
    assert len(memory) == ranks
