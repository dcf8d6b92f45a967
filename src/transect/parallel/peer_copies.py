"""``PeerCopies``: sums of gradients by copy engines, beside products that keep all multiprocessors.

NCCL sums by a kernel that holds some multiprocessors while bytes travel. A product that has a program on each of them
waits for these, so a sum beside a backward pass makes its products slower. Here bytes go by copy engines, streams wait
for each other by numbers in memory (``ops/comm/copy_engine.py``), and the only kernel adds up what is there.

A vector is cut into chunks, a chunk into one part for each of the R ranks. Of every chunk rank r

    pushes part p into the inbox of rank p, for each other p                       (stream ``push``)
    adds its own part and its inbox, in the order of the ranks, in float32, into its outbox
    pulls part p out of the outbox of rank p                                       (stream ``pull``)

So 2 (R - 1) / R of the bytes leave each rank, as in NCCL's ring, and all ranks get the same bits. Inboxes and outboxes
are slots of memory that the ranks share; a slot is used again when all have posted that they are done with it. Every
wait is for something that the other rank puts on its streams before it waits itself, so no two wait for each other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ..costs.memory.shared import ALIGN, CHUNK_BYTES, COPY_RANKS, SIGNALS, SLOTS, copies_bytes, part_bytes
from ..ops.comm.add_twice import BLOCK, add_twice
from ..ops.comm.copy_engine import Copies, EngineCopies
from ..ops.comm.peer_memory import SharedMemory
from .group import Group
from .shared_memory import free_memory, shared_memory
from .world import World

ARRIVED, SUMMED, FREE = range(3)


@dataclass(slots=True)
class Copied:
    """A sum in progress, with the interface of ``torch.distributed``."""

    ends: tuple[Any, ...]

    def wait(self) -> None:
        """Make the current stream wait until the sum is complete."""
        for end in self.ends:
            torch.cuda.current_stream().wait_event(end)


class PeerCopies:
    """Sums of one rank by copy engines.

    Args:
        memory: address of each rank's memory, ``memory_bytes`` long, whose first ``SIGNALS`` bytes are 0 on all.
        rank: the own place among them.
        copies: operations to put on streams.
        streams: to push and to pull on; None on a host.
        fused: a sum of two ranks, its copy for the other and its squares are one launch.
    """

    def __init__(
        self,
        memory: Sequence[int],
        rank: int,
        copies: Copies,
        streams: tuple[Any, Any] = (None, None),
        chunk_bytes: int = CHUNK_BYTES,
        fused: bool = False,
    ) -> None:
        self.fused = fused
        self.memory, self.rank, self.ranks = list(memory), rank, len(memory)
        self.copies, (self._push, self._pull) = copies, streams
        self.part_bytes, self.nbytes = part_bytes(self.ranks, chunk_bytes), copies_bytes(self.ranks, chunk_bytes)
        self._own = copies.view(self.memory[rank], self.nbytes)
        self._chunks = 0
        self._others = [(rank + step) % self.ranks for step in range(1, self.ranks)]

    def start_all_reduce(self, x: Tensor, squares: Tensor | None = None) -> Copied:
        """Start replacing ``x`` by the sum of all ranks' vectors; it must exist until the work is done. ``squares``:
        from ``squares_of``; it receives squares of this rank's share of the sum, to be added up."""
        self._begin()
        at = 0
        for chunk in x.split(self.part_bytes // x.itemsize * self.ranks):
            step = ALIGN // x.itemsize
            each = -(-chunk.numel() // (self.ranks * step)) * step
            parts = [chunk[rank * each : (rank + 1) * each] for rank in range(self.ranks)]
            room = -(-parts[self.rank].numel() // BLOCK)
            self._sum(parts, parts[self.rank], pull=True, squares=None if squares is None else squares[at : at + room])
            at += room
        return self._end()

    def squares_of(self, x: Tensor) -> Tensor:
        """Return zeros, float32, one for each square that ``start_all_reduce`` of ``x`` may write."""
        chunks = -(-x.numel() // (self.part_bytes // x.itemsize * self.ranks))
        most = -(-min(x.nbytes, self.part_bytes) // (x.itemsize * BLOCK))
        return torch.zeros(chunks * most, device=x.device)

    def start_scatter(self, out: Tensor, x: Tensor) -> Copied:
        """Start writing this rank's part of the sum of all ranks' vectors ``x`` ``[ranks * n]`` into ``out`` ``[n]``;
        both must exist until the work is done."""
        self._begin()
        each, most = out.numel(), self.part_bytes // x.itemsize
        for begin in range(0, each, most):
            end = min(begin + most, each)
            parts = [x[rank * each + begin : rank * each + end] for rank in range(self.ranks)]
            self._sum(parts, out[begin:end], pull=False)
        return self._end()

    def _begin(self) -> None:
        if self._push is not None:
            for stream in (self._push, self._pull):
                stream.wait_stream(torch.cuda.current_stream())

    def _end(self) -> Copied:
        return Copied(() if self._push is None else (self._push.record_event(), self._pull.record_event()))

    def _signal(self, on: int, kind: int, slot: int, by: int) -> int:
        """Return the address at which rank ``by`` posts to rank ``on``."""
        return self.memory[on] + 4 * ((kind * SLOTS + slot) * COPY_RANKS + by)

    def _inbox(self, rank: int, slot: int, source: int) -> int:
        """Return the offset, in the memory of ``rank``, of the part from ``source``; a rank's own part is its
        outbox."""
        return SIGNALS + (slot * self.ranks + source) * self.part_bytes

    def _sum(self, parts: Sequence[Tensor], out: Tensor, *, pull: bool, squares: Tensor | None = None) -> None:
        """Sum a chunk: this rank's part into ``out``; with ``pull`` the others into their places."""
        copies, rank, pushing, pulling = self.copies, self.rank, self._push, self._pull
        turn, slot = divmod(self._chunks, SLOTS)
        turn, self._chunks = turn + 1, self._chunks + 1
        for other in self._others:
            copies.wait(self._signal(rank, FREE, slot, other), turn - 1, pushing)
            there = self.memory[other] + self._inbox(other, slot, rank)
            if parts[other].numel():
                copies.copy(there, parts[other].data_ptr(), parts[other].nbytes, pushing)
            copies.post(self._signal(other, ARRIVED, slot, rank), turn, pushing)
        for other in self._others:  # no rank reads the outbox any more, and the inbox is full
            copies.wait(self._signal(rank, FREE, slot, other), turn - 1, pulling)
            copies.wait(self._signal(rank, ARRIVED, slot, other), turn, pulling)
        if out.numel():
            with copies.on(pulling):
                self._add(parts[rank], out, slot, pull, squares)
        if not pull:
            for other in self._others:
                copies.post(self._signal(other, FREE, slot, rank), turn, pulling)
            return
        for other in self._others:
            copies.post(self._signal(other, SUMMED, slot, rank), turn, pulling)
        for other in self._others:
            copies.wait(self._signal(rank, SUMMED, slot, other), turn, pulling)
            there = self.memory[other] + self._inbox(other, slot, other)
            if parts[other].numel():
                copies.copy(parts[other].data_ptr(), there, parts[other].nbytes, pulling)
            copies.post(self._signal(other, FREE, slot, rank), turn, pulling)

    def _add(self, mine: Tensor, out: Tensor, slot: int, outbox: bool, squares: Tensor | None) -> None:
        """Add this rank's part and the inbox into ``out`` and the outbox."""
        boxes = []
        for source in range(self.ranks):
            begin = self._inbox(self.rank, slot, source)
            boxes.append(self._own[begin : begin + mine.nbytes].view(mine.dtype))
        if self.ranks == 2 and outbox and self.fused:
            add_twice(mine, boxes[1 - self.rank], out, boxes[self.rank], squares)
            return
        if self.ranks == 2:
            torch.add(boxes[1 - self.rank] if self.rank else mine, mine if self.rank else boxes[1], out=out)
        else:
            self._add_wide(mine, boxes, out)
        if outbox:
            boxes[self.rank].copy_(out)
        if squares is not None:
            squares[:1] = out.float().square().sum()

    def _add_wide(self, mine: Tensor, boxes: Sequence[Tensor], out: Tensor) -> None:
        """Add this rank's part and those in the boxes, in the order of the ranks and in float32."""
        total = torch.zeros(mine.shape, dtype=torch.float32, device=mine.device)
        for source, box in enumerate(boxes):
            total += mine if source == self.rank else box
        out.copy_(total)


def shared_copies(
    world: World, group: Group, chunk_bytes: int = CHUNK_BYTES, *, fused: bool = False
) -> PeerCopies | str:
    """Create the copies of a group, or return the reason that there are none. Every rank of the world calls this, and
    either all get copies or none does."""
    nbytes = copies_bytes(group.size, chunk_bytes)
    refusal = f"copies are for {COPY_RANKS} ranks at most" if group.size > COPY_RANKS else None
    memory = shared_memory(world, group, nbytes, refusal)
    if isinstance(memory, str):
        return memory
    copies = engine_copies(world, memory, SIGNALS)
    if isinstance(copies, str):
        return copies
    streams = torch.cuda.Stream(priority=-1), torch.cuda.Stream(priority=-1)
    return PeerCopies(memory.addresses, group.rank, copies, streams, chunk_bytes, fused)


def engine_copies(world: World, memory: SharedMemory, signals: int) -> EngineCopies | str:
    """Return the object that puts copies on streams, after a test of posting and waiting for a number.

    The first ``signals`` bytes of each rank's memory are 0 afterwards. If a rank cannot, free the memory and return the
    reason. Every rank of the world must call this.
    """
    try:
        copies = EngineCopies()
        address, stream = memory.own.address, torch.cuda.current_stream()
        copies.post(address, 1, stream)
        copies.wait(address, 1, stream)
        copies.view(address, signals).zero_()
        torch.cuda.synchronize()
        reason = None
    except (AttributeError, OSError, RuntimeError) as error:
        reason = f"streams cannot wait for each other here: {error}"
    reason = next((each for each in world.exchange(reason) if each is not None), None)
    if reason is None:
        return copies
    free_memory(world, memory)
    return reason
