"""Sums by copies, with threads as the ranks and host memory as that of GPUs."""

import ctypes
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from host_copies import HostCopies
from thread_group import on_threads

from transect.costs.memory.shared import copies_bytes
from transect.models.decoder import Decoder
from transect.parallel import peer_copies, peer_pieces, replicas
from transect.parallel.group import Group
from transect.parallel.peer_copies import PeerCopies, shared_copies
from transect.parallel.peer_pieces import SIGNALS, PeerPieces, room, shared_pieces
from transect.parallel.sharded import Sharded
from transect.spec.shapes import PRESETS

CHUNK = 4096


def together(ranks, work):
    """``work(copies, rank)`` of every rank, each in a thread."""
    memory = [ctypes.create_string_buffer(copies_bytes(ranks, CHUNK)) for _ in range(ranks)]
    addresses = [ctypes.addressof(each) for each in memory]
    with ThreadPoolExecutor(ranks) as pool:
        made = [PeerCopies(addresses, rank, HostCopies(), chunk_bytes=CHUNK) for rank in range(ranks)]
        found = list(pool.map(work, made, range(ranks)))
    return found


@pytest.mark.parametrize("ranks", [2, 3, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_rank_has_the_sum_to_the_bit(ranks, dtype):
    sizes = [1, 100, 5000, 40_001]  # less than a part, and more than all slots take
    parts = [[torch.randn(n, generator=torch.Generator().manual_seed(9 * n + r)).to(dtype) for n in sizes]
             for r in range(ranks)]  # fmt: skip

    def work(copies, rank):
        mine = [x.clone() for x in parts[rank]]
        for x in mine:
            copies.start_all_reduce(x).wait()
        return mine

    for number, sums in enumerate(zip(*together(ranks, work), strict=True)):
        expected = sum((parts[rank][number].float() for rank in range(1, ranks)), parts[0][number].float())
        assert torch.equal(sums[0], expected.to(dtype))
        assert all(torch.equal(sums[0], other) for other in sums[1:])


@pytest.mark.parametrize("ranks", [2, 3])
def test_squares_of_all_ranks_are_those_of_the_sum(ranks):
    sizes = [1, 100, 9000]
    parts = [[torch.randn(n, generator=torch.Generator().manual_seed(9 * n + r)) for n in sizes] for r in range(ranks)]

    def work(copies, rank):
        found = []
        for x in (part.clone() for part in parts[rank]):
            squares = copies.squares_of(x)
            copies.start_all_reduce(x, squares).wait()
            found.append(torch.stack((squares.sum(), x.square().sum())))
        return torch.stack(found)

    found = torch.stack(together(ranks, work))
    torch.testing.assert_close(found[:, :, 0].sum(0), found[0, :, 1])


@pytest.mark.parametrize("ranks", [2, 3])
def test_each_rank_has_its_part_of_the_sum(ranks):
    n = 5000
    parts = [torch.randn(ranks * n, generator=torch.Generator().manual_seed(r)) for r in range(ranks)]

    def work(copies, rank):
        out = torch.empty(n)
        for _ in range(3):
            copies.start_scatter(out, parts[rank].clone()).wait()
        whole = parts[rank].clone()
        copies.start_all_reduce(whole).wait()  # both take turns in the same memory
        assert torch.equal(whole[rank * n : (rank + 1) * n], out)
        return out

    expected = sum(parts[1:], parts[0].clone())
    assert torch.equal(torch.cat(together(ranks, work)), expected)


@pytest.mark.parametrize("fused", [False, True])
def test_the_norm_comes_with_the_sums_where_they_are_fused(monkeypatch, fused):
    """Three buckets, of which the last is summed by torch, and a parameter without a gradient on one rank."""
    monkeypatch.setattr(replicas, "COPIED_BUCKET_BYTES", 4 * 6000)

    def done(_):
        """Nothing to wait for."""

    monkeypatch.setattr(replicas.dist, "all_reduce", lambda x, group, async_op: done(group.all_reduce(x)))
    memory = [ctypes.create_string_buffer(copies_bytes(2, CHUNK)) for _ in range(2)]
    addresses = [ctypes.addressof(each) for each in memory]
    sizes = {"a": 7, "b": 9000, "c": 40, "d": 20_001}
    drawn = [
        {n: torch.randn(size, generator=torch.Generator().manual_seed(9 * size + r)) for n, size in sizes.items()}
        for r in range(2)
    ]

    def work(group):
        group.group = group
        parameters = {name: torch.nn.Parameter(torch.zeros(size)) for name, size in sizes.items()}
        copies = PeerCopies(addresses, group.rank, HostCopies(), chunk_bytes=CHUNK, fused=fused)
        spread = replicas.GradientReplicas(group, parameters, reduce_dtype=torch.float32, copies=copies)
        with spread.last():
            mine = (n for n in sizes if n != "c" or group.rank)
            sum((parameters[n] * drawn[group.rank][n]).sum() for n in mine).backward()
        return spread.reduce(), spread.square

    (one, square), (two, other) = on_threads(2, work)
    for name in sizes:
        expected = drawn[1][name] + (0 if name == "c" else drawn[0][name])
        assert torch.equal(one[name], expected) and torch.equal(two[name], expected)
    if not fused:
        assert square is None
        return
    assert torch.equal(square, other)
    torch.testing.assert_close(square, sum(gradient.square().sum() for gradient in one.values()))


def test_pieces_are_read_when_all_have_stepped():
    ranks, sizes = 3, (10, 700)
    nbytes = sum(room(4 * size) for size in sizes)
    memory = [ctypes.create_string_buffer(SIGNALS + nbytes) for _ in range(ranks)]
    addresses = [ctypes.addressof(each) for each in memory]

    def work(rank):
        pieces = PeerPieces(addresses, rank, nbytes, HostCopies())
        mine = [pieces.keep(torch.full((size,), float(rank))) for size in sizes]
        found = []
        for _ in range(3):
            pieces.stepped()
            wholes = [torch.empty(ranks * size) for size in sizes]
            for whole, (_, at) in zip(wholes, mine, strict=True):
                pieces.start_gather(whole, at).wait()
            found.append(wholes)
            barrier.wait(200)  # as the sums of gradients are one
            for piece, _ in mine:
                piece.add_(10)
        return found

    barrier = threading.Barrier(ranks)
    with ThreadPoolExecutor(ranks) as pool:
        for found in pool.map(work, range(ranks)):
            for step, wholes in enumerate(found):
                for whole, size in zip(wholes, sizes, strict=True):
                    expected = torch.arange(ranks).repeat_interleave(size) + 10.0 * step
                    assert torch.equal(whole, expected)


def test_nobody_goes_on_from_a_checkpoint_before_all_have_read(monkeypatch):
    """The memory of a rank that ends goes with it."""
    told, group, held = [], Group.alone(), []

    def shared(sizes):
        nbytes = sum(map(peer_pieces.room, sizes))
        held.append(ctypes.create_string_buffer(SIGNALS + nbytes))
        return PeerPieces([ctypes.addressof(held[0])], 0, nbytes, HostCopies())

    shape = {"n_layers": 2, "dim": 32, "n_heads": 2, "n_kv_heads": 2, "head_dim": 16, "ffn_dim": 64}
    model = Decoder(replace(PRESETS["llama-3.2-1b"], vocab_size=32, **shape), "cpu", torch.float32)
    model.init_weights(0.3, torch.Generator().manual_seed(0))  # memory that nobody wrote may hold NaN
    weights = {name: tensor.clone() for name, tensor in model.named_parameters()}
    sharded = Sharded(group, model, shared=shared)
    for name in ("start_gather", "settle"):
        way = getattr(sharded.peers, name)
        monkeypatch.setattr(sharded.peers, name, lambda *given, n=name, way=way: (told.append(n), way(*given))[1])
    monkeypatch.setattr(group, "most", lambda _: told.append("meet"))
    assert all(torch.equal(tensor, weights[name]) for name, tensor in sharded.state().items())
    assert told == ["start_gather"] * 3 + ["settle", "meet"]


@pytest.mark.parametrize(("module", "make"), [(peer_copies, shared_copies), (peer_pieces, shared_pieces)])
def test_a_driver_that_cannot_wait_leaves_all_to_the_collectives(monkeypatch, module, make):
    """Also the pieces of sharded weights: they were asked for after the sums had been refused."""
    freed = []

    class Memory:
        own = SimpleNamespace(address=0)

    def no_driver():
        raise AttributeError("libcuda.so.1: undefined symbol: cuStreamWaitValue32_v2")

    world = SimpleNamespace(exchange=lambda mine: [mine, None])
    monkeypatch.setattr(module, "shared_memory", lambda *_: Memory())
    monkeypatch.setattr(peer_copies, "free_memory", lambda world, memory: freed.append(world))
    monkeypatch.setattr(peer_copies, "EngineCopies", no_driver)
    monkeypatch.setattr(peer_pieces, "EngineCopies", no_driver, raising=False)
    assert "undefined symbol" in make(world, Group((0, 1), 0, None), CHUNK)
    assert freed == [world]
