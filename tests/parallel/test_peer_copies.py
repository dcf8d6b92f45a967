"""Sums by copies, with threads as the ranks and host memory as that of GPUs."""

import ctypes
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from transect.ops.comm.copy_engine import HostCopies
from transect.parallel.peer_copies import PeerCopies, memory_bytes

CHUNK = 4096


def together(ranks, work):
    """``work(copies, rank)`` of every rank, each in a thread."""
    memory = [ctypes.create_string_buffer(memory_bytes(ranks, CHUNK)) for _ in range(ranks)]
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
