"""``shared_sums``: a group's ``PeerSums``, created and timed against NCCL's.

Every rank makes memory that the others of its group can write to; the handles travel with the messages. Then both ways
are timed at a few sizes, in CUDA graphs as steps have them, and from the size on at which NCCL is quicker it sums. All
ranks decide the same, from the times of all ranks. If the memory cannot be shared, NCCL does all, and the log says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist

from ..costs.memory.shared import MOST_BYTES, lines_for, sums_bytes
from ..ops.comm.all_reduce import MOST_RANKS, Peers
from .group import Group
from .peer_sums import PeerSums, Timed
from .shared_memory import free_memory, shared_memory
from .world import World

TIMED = tuple(8 << 10 + 2 * power for power in range(6))
"""Bytes of the sums that are timed: 8 KiB to 8 MiB."""
REPEATS, REPLAYS = 20, 5


def shared_sums(world: World, group: Group) -> PeerSums | str:
    """Create and time the sums of a group, or return the reason that NCCL does them all. Every rank of the world calls
    this, and either all get sums or none does."""
    lines = lines_for(group.size, MOST_BYTES)
    refusal = f"our kernels are for {MOST_RANKS} ranks at most" if group.size > MOST_RANKS else None
    memory = shared_memory(world, group, sums_bytes(lines), refusal)
    if isinstance(memory, str):
        return memory
    stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    found = _timed(world, group, PeerSums(Peers(memory.addresses, group.rank, lines, stop)))
    if isinstance(found, str):
        free_memory(world, memory)
    return found


def _timed(world: World, group: Group, sums: PeerSums) -> PeerSums | str:
    """Try the kernels, and find the size up to which they are faster. All ranks of the world call this, including those
    of other groups."""
    times = []
    for nbytes in TIMED:
        x = torch.full((nbytes // 2,), float(group.rank + 1), dtype=torch.bfloat16, device=world.device)
        wrong = bool((sums.peers.sum(x) != group.size * (group.size + 1) / 2).any())
        x.zero_()
        ways = partial(sums.sum, x), partial(dist.all_reduce, x, group=group.group)
        seconds = [graph_seconds(way, world.device, REPEATS) for way in ways]
        shown = world.exchange((wrong, *seconds))
        if any(each[0] for each in shown):
            return "sums through memory that the GPUs share came out wrong"
        times.append(Timed(nbytes, max(each[1] for each in shown), max(each[2] for each in shown)))
    return PeerSums(sums.peers, quicker_up_to(times), times)


def quicker_up_to(times: Sequence[Timed]) -> int:
    """Return the most bytes that our kernels are used for: below the first size at which NCCL was faster."""
    most = 0
    for each in times:
        if each.own > each.nccl:
            return most
        most = each.nbytes
    return MOST_BYTES


def graph_seconds(work: Callable[[], object], device: torch.device, repeats: int, replays: int = REPLAYS) -> float:
    """Return the seconds of ``work``, run ``repeats`` times in a CUDA graph: the best of a few replays."""
    work()
    torch.cuda.synchronize(device)
    stream, graph = torch.cuda.Stream(device), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(device))
    best = float("inf")
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            for _ in range(repeats):
                work()
        finally:
            graph.capture_end()
        graph.replay()
        for _ in range(replays):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record(stream)
            graph.replay()
            end.record(stream)
            end.synchronize()
            best = min(best, start.elapsed_time(end) / 1e3)
    return best / repeats
