"""Which sums go through our kernels, and a stack that leaves its sums to the norms behind them. On real ranks:
``test_gpus.py``."""

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from transect.models.context import PagedContext
from transect.models.decoder import Decoder
from transect.models.fused_stack import FusedStack
from transect.ops.norm import add_rms_norm
from transect.ops.opset import resolve_ops
from transect.parallel import shared_memory, shared_sums
from transect.parallel.group import Group
from transect.parallel.peer_sums import MOST_BYTES, PeerSums, Timed
from transect.parallel.tensor import sharded_kinds
from transect.spec.layouts.shards import Shard
from transect.spec.model import ModelConfig

KIB = 1024
TINY = ModelConfig(
    architecture="llama", vocab_size=64, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=96,
    max_position=64,
)  # fmt: skip


def test_the_first_size_that_nccl_is_quicker_with_ends_it():
    times = [Timed(8 * KIB, 4e-6, 7e-6), Timed(64 * KIB, 6e-6, 8e-6), Timed(512 * KIB, 12e-6, 10e-6)]
    assert shared_sums.quicker_up_to(times) == 64 * KIB
    assert shared_sums.quicker_up_to(times[:2]) == MOST_BYTES
    assert shared_sums.quicker_up_to(times[2:]) == 0
    said = str(PeerSums(FakePeers(), 64 * KIB, times))
    assert said == (
        "up to 64 KiB by our kernel: 8 KiB in 4.0 us (NCCL 7.0), 64 KiB in 6.0 us (NCCL 8.0), "
        "512 KiB in 12.0 us (NCCL 10.0)"
    )


class FakePeers:
    """Two ranks that have the same, or four; counts what is asked of it."""

    def __init__(self, ranks=2):
        self.ranks, self.calls = ranks, []

    def refusal(self, x, norm=False):
        return None

    def sum(self, x, out=None, **how):
        self.calls.append(("sum", x.nbytes))
        return x.mul_(self.ranks)

    def add_norm(self, x, residual, weight, eps, **how):
        self.calls.append(("add_norm", x.nbytes))
        return add_rms_norm.reference(self.ranks * x, residual, weight, eps)


class OnHost(PeerSums):
    """Takes tensors of the host as if a GPU had them."""

    def takes(self, x, norm=False):
        return super().takes(_OnGPU(x), norm)


class _OnGPU:
    is_cuda = True

    def __init__(self, x):
        self._x = x

    def __getattr__(self, name):
        return getattr(self._x, name)


def test_exact_sums_of_many_ranks_never_go_another_way():
    large = torch.ones(3 * MOST_BYTES // 4 + 16)
    four = OnHost(FakePeers(4), 8 * KIB, exact=True)
    assert four.takes(large) and not four.takes(large, norm=True)
    assert bool((four.sum(large) == 4).all()) and len(four.peers.calls) == 4
    two = OnHost(FakePeers(2), 8 * KIB, exact=True)
    assert not two.takes(large) and two.takes(large[: 2 * KIB])
    assert not OnHost(FakePeers(4), 8 * KIB).takes(large)


@pytest.mark.parametrize("ranks", [3, 5, 7])
def test_no_piece_of_a_large_sum_is_too_small(ranks):
    least = 16 * ranks
    large = torch.ones((MOST_BYTES // least + 1) * least // 4)
    sums = OnHost(FakePeers(ranks), 8 * KIB, exact=True)
    assert sums.takes(large) and bool((sums.sum(large) == ranks).all())
    assert [nbytes for _, nbytes in sums.peers.calls] == [large.nbytes - least, least]


def test_all_groups_have_such_sums_or_none(monkeypatch):
    """Rank 1 cannot open the memory of rank 0: the other group must not go on alone, and all memory is given back."""
    me, barrier, shown = threading.local(), threading.Barrier(4, timeout=200), [None] * 4
    opened, freed = set(), []

    class Memory:
        def __init__(self, nbytes):
            self.address, self.handle = me.rank, bytes([me.rank])

        @staticmethod
        def opened(handle):
            if me.rank == 1:
                raise RuntimeError("refused here")
            opened.add((me.rank, handle[0]))
            return handle[0]

        @staticmethod
        def close(address):
            opened.remove((me.rank, address))

        def free(self):
            assert not opened
            freed.append(me.rank)

    def exchange(mine):
        shown[me.rank] = mine
        barrier.wait()
        found = list(shown)
        barrier.wait()
        return found

    def run(rank):
        me.rank = rank
        group = Group((0, 1) if rank < 2 else (2, 3), rank % 2, None)
        return shared_sums.shared_sums(SimpleNamespace(rank=rank, exchange=exchange), group)

    monkeypatch.setattr(shared_memory, "PeerMemory", Memory)
    with ThreadPoolExecutor(4) as pool:
        assert list(pool.map(run, range(4))) == ["refused here"] * 4
    assert sorted(freed) == [0, 1, 2, 3] and not opened


def stack_of(sums):
    """This rank's part of a model of two ranks, the other of which is the same, and a step for it."""
    group = Group((0, 1), 0, None)
    group.sums = sums
    ops = resolve_ops("cpu")
    torch.manual_seed(0)
    shard = Shard(TINY, 0, 2)
    model = Decoder(shard.local, "cpu", torch.float32, ops=ops, kinds=sharded_kinds(None, shard, group))
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.1)
    caches = model.new_kv_cache(4, 16, torch.float32)
    table, starts, lengths = (torch.tensor(each, dtype=torch.int32) for each in ([[0], [1]], [0, 3, 5], [3, 2]))
    context = PagedContext(*caches, table, starts, lengths, ops, max_query_len=3)
    return FusedStack(model.requires_grad_(False), max_positions=64), context


@pytest.mark.parametrize("most", [0, 1 << 20], ids=["apart", "in the norm"])
def test_sums_in_norms_change_nothing(most):
    tokens, positions = torch.tensor([5, 6, 7, 8, 9]), torch.tensor([0, 1, 2, 0, 1])
    found = []
    for norms in (False, True):
        peers = FakePeers()
        sums = OnHost(peers, 1 << 20)
        if norms:
            sums.takes = lambda x, norm=False: not norm or x.nbytes <= most
        else:
            sums.exact = True
        stack, context = stack_of(sums)
        found.append(stack.hidden(tokens, positions, context))
        kinds = [kind for kind, _ in peers.calls]
        assert kinds.count("add_norm") == (4 if norms and most else 0) and len(kinds) == 4
    torch.testing.assert_close(found[0], found[1])
