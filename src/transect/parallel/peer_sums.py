"""``PeerSums``: a group's sums by our own kernels (``ops/comm/all_reduce.py``) where they are quicker than NCCL's.

Every rank makes memory that the others of its group can write to; the handles travel with the messages. Then both ways
are timed at a few sizes, in CUDA graphs as steps have them, and from the size on at which NCCL is quicker it sums. All
ranks decide the same, from everybody's times. Where the memory cannot be shared, NCCL does all, and a line says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.comm.all_reduce import MOST_RANKS, Peers
from ..ops.comm.lines import MOST_BYTES, lines_for, memory_bytes
from .group import Group
from .shared_memory import shared_memory
from .world import World

TIMED = tuple(8 << 10 + 2 * power for power in range(6))
"""Bytes of the sums that are timed: 8 KiB to 8 MiB."""
REPEATS, REPLAYS = 20, 5


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of a sum of ``nbytes``: by our kernels, and by NCCL."""

    nbytes: int
    own: float
    nccl: float


class PeerSums:
    """What ``Group`` asks for its sums; made by ``shared_sums``.

    Args:
        peers: the group's memory.
        most_bytes: of a sum that our kernels are quicker with.
        times: what was measured.
        dependent_launch: sums begin while the kernel before still runs.
        pushes: products of few rows give their results to the other ranks themselves.
        exact: every sum has the same bits whatever else is in the batch. Then norms are apart, and with more than two
            ranks (of two, NCCL adds in the same way) all sums go through our kernels, large ones in pieces.
    """

    def __init__(
        self,
        peers: Peers,
        most_bytes: int = MOST_BYTES,
        times: Sequence[Timed] = (),
        *,
        dependent_launch: bool = False,
        exact: bool = False,
        pushes: bool = False,
    ) -> None:
        self.peers, self.times, self.dependent_launch, self.exact = peers, tuple(times), dependent_launch, exact
        self.pushes = pushes
        self.most_bytes = MOST_BYTES if exact and peers.ranks > 2 else most_bytes

    def used(self, *, dependent_launch: bool, exact: bool, pushes: bool = False) -> PeerSums:
        """The same memory, for an engine of this kind."""
        how = {"dependent_launch": dependent_launch, "exact": exact, "pushes": pushes}
        return PeerSums(self.peers, self.most_bytes, self.times, **how)

    def takes(self, x: Tensor, norm: bool = False) -> bool:
        """Whether our kernels sum ``x``."""
        if not x.is_cuda or (norm and self.exact):
            return False
        if self.exact and self.peers.ranks > 2 and x.nbytes > self.most_bytes:
            whole = x.nbytes % (16 * self.peers.ranks) == 0 and x.is_contiguous()
            return whole and self.peers.refusal(x.view(-1)[: self._piece(x)], norm) is None
        return x.nbytes <= self.most_bytes and self.peers.refusal(x, norm) is None

    def _piece(self, x: Tensor) -> int:
        """Numbers of ``x`` that are summed at once: of whole 16 bytes for each rank, and so is what remains."""
        least = 16 * self.peers.ranks
        return MOST_BYTES // least * least // x.itemsize

    def sum(self, x: Tensor, pushed: bool = False) -> Tensor:
        """The sum over the ranks, in the place of ``x``. ``pushed``: the product before has given it to the others."""
        if pushed:
            return self.peers.sum(x, x, dependent_launch=self.dependent_launch, pushed=True)
        for piece in x.view(-1).split(self._piece(x)) if x.nbytes > MOST_BYTES else (x,):
            self.peers.sum(piece, piece, dependent_launch=self.dependent_launch)
        return x

    def add_norm(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, pushed: bool = False
    ) -> tuple[Tensor, Tensor]:
        """(norm, residual + sum); see ``Peers.add_norm``."""
        how = {"dependent_launch": self.dependent_launch, **({"pushed": True} if pushed else {})}
        return self.peers.add_norm(x, residual, weight, eps, **how)  # type: ignore[arg-type]

    def stop(self) -> None:
        """Have kernels that wait for a rank which is gone end; nothing can be summed any more."""
        self.peers.stop.fill_(1)

    def __str__(self) -> str:
        shown = [f"{_size(t.nbytes)} in {t.own * 1e6:.1f} us (NCCL {t.nccl * 1e6:.1f})" for t in self.times]
        least = f"up to {_size(self.most_bytes)} by our kernel" if self.most_bytes else "by NCCL, which is quicker"
        return f"{least}: {', '.join(shown)}"


def shared_sums(world: World, group: Group) -> PeerSums | str:
    """Make and time the sums of a group, or say why NCCL does them all. Every rank of the world calls this, and all get
    sums or none does."""
    lines = lines_for(group.size, MOST_BYTES)
    refusal = f"our kernels are for {MOST_RANKS} ranks at most" if group.size > MOST_RANKS else None
    memory = shared_memory(world, group, memory_bytes(lines), refusal)
    if isinstance(memory, str):
        return memory
    stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    found = _timed(world, group, PeerSums(Peers(memory.addresses, group.rank, lines, stop)))
    if isinstance(found, str):
        memory.free(world)
    return found


def _timed(world: World, group: Group, sums: PeerSums) -> PeerSums | str:
    """Try the kernels, and find the size up to which they are quicker. All ranks of the world come by here, those of
    other groups too."""
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
    """The most bytes that our kernels are for: below the first size at which NCCL was quicker."""
    most = 0
    for each in times:
        if each.own > each.nccl:
            return most
        most = each.nbytes
    return MOST_BYTES


def graph_seconds(work: Callable[[], object], device: torch.device, repeats: int, replays: int = REPLAYS) -> float:
    """Seconds of ``work``, which is done ``repeats`` times in a CUDA graph: the best of a few replays."""
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


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"
