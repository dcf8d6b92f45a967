"""``PeerPieces``: the pieces of sharded weights in memory that other GPUs of the host read, by copy engines.

To gather a layer a rank copies every rank's piece of it (``ops/comm/copy_engine.py``); no multiprocessor and no other
rank has a part in that. Pieces change once in a step, in the optimizer. So it is enough that

* after its step a rank posts how many steps it has taken, and waits on the stream of its copies for the others';
* no rank steps before the others have read what they need: its step takes the sum of all ranks' gradients, and they
  have these when they have computed with the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ..costs.memory.shared import ALIGN, COPY_RANKS
from ..ops.comm.copy_engine import Copies
from .group import Group
from .peer_copies import Copied, engine_copies
from .shared_memory import shared_memory
from .world import World

SIGNALS = 256
"""Bytes before the pieces, in which others post their steps."""


class PeerPieces:
    """One rank's memory for pieces, with access to those of the others.

    Args:
        memory: address of each rank's memory, ``SIGNALS`` bytes of 0 and then ``nbytes``.
        rank: the own place among them.
        copies: operations to put on streams. stream: stream for copies; None on a host.
    """

    def __init__(self, memory: Sequence[int], rank: int, nbytes: int, copies: Copies, stream: Any = None) -> None:
        self.memory, self.rank, self.copies, self.nbytes = list(memory), rank, copies, nbytes
        self._own, self._stream = copies.view(self.memory[rank], SIGNALS + nbytes), stream
        self._taken, self._steps = SIGNALS, 0

    def keep(self, piece: Tensor) -> tuple[Tensor, int]:
        """Move a piece to this memory; returns it with its offset. All ranks keep pieces of the same sizes in the same
        order."""
        begin = self._taken
        self._taken = begin + room(piece.nbytes)
        place = self._own[begin : begin + piece.nbytes].view(piece.dtype)
        return place.copy_(piece), begin

    def start_gather(self, whole: Tensor, at: int) -> Copied:
        """Start filling ``whole`` with every rank's piece at offset ``at``, in the order of the ranks."""
        if self._stream is not None:  # the current stream has given the memory
            self._stream.wait_stream(torch.cuda.current_stream())
        nbytes, ranks = whole.nbytes // len(self.memory), len(self.memory)
        for step in range(ranks):
            rank = (self.rank + step) % ranks
            self.copies.copy(whole.data_ptr() + rank * nbytes, self.memory[rank] + at, nbytes, self._stream)
        return Copied(() if self._stream is None else (self._stream.record_event(),))

    def stepped(self) -> None:
        """Announce that this rank's pieces have changed, on the current stream: later gathers wait for the others'
        changes."""
        self._steps += 1
        current = None if self._stream is None else torch.cuda.current_stream()
        others = [rank for rank in range(len(self.memory)) if rank != self.rank]
        for other in others:
            self.copies.post(self.memory[other] + 4 * self.rank, self._steps, current)
        for other in others:
            self.copies.wait(self.memory[self.rank] + 4 * other, self._steps, self._stream)

    def settle(self) -> None:
        """Wait until all started copies are done."""
        if self._stream is not None:
            self._stream.synchronize()


def room(nbytes: int) -> int:
    """Return the bytes that a piece takes."""
    return -(-nbytes // ALIGN) * ALIGN


def shared_pieces(world: World, group: Group, nbytes: int) -> PeerPieces | str:
    """Make memory for pieces of ``nbytes`` bytes, or return the reason that there is none.

    Every rank of the world must call this, and either all ranks get memory or none does.
    """
    refusal = f"copies are for {COPY_RANKS} ranks at most" if group.size > COPY_RANKS else None
    memory = shared_memory(world, group, SIGNALS + nbytes, refusal)
    if isinstance(memory, str):
        return memory
    copies = engine_copies(world, memory, SIGNALS)
    if isinstance(copies, str):
        return copies
    stream = torch.cuda.Stream(priority=-1)
    return PeerPieces(memory.addresses, group.rank, nbytes, copies, stream)
