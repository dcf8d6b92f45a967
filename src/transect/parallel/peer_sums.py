"""``PeerSums``: a group's sums by our own kernels (``ops/comm/all_reduce.py``) if they are faster than NCCL's.

It goes through memory that all ranks of the group can write to; ``shared_sums.py`` makes it, and finds where NCCL is
quicker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from ..costs.memory.shared import MOST_BYTES
from ..ops.comm.all_reduce import Peers


@dataclass(frozen=True, slots=True)
class Timed:
    """Seconds of a sum of ``nbytes``: by our kernels, and by NCCL."""

    nbytes: int
    own: float
    nccl: float


class PeerSums:
    """All-reduce kernels of a ``Group``; made by ``shared_sums``.

    Args:
        peers: the group's memory.
        most_bytes: largest sum for which our kernels are faster.
        times: measured times.
        dependent_launch: sums begin while the kernel before still runs.
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
    ) -> None:
        self.peers, self.times, self.dependent_launch, self.exact = peers, tuple(times), dependent_launch, exact
        self.most_bytes = MOST_BYTES if exact and peers.ranks > 2 else most_bytes

    def used(self, *, dependent_launch: bool, exact: bool) -> PeerSums:
        """Return the same memory, for an engine of this kind."""
        return PeerSums(self.peers, self.most_bytes, self.times, dependent_launch=dependent_launch, exact=exact)

    def takes(self, x: Tensor, norm: bool = False) -> bool:
        """Return True if our kernels sum ``x``."""
        if not x.is_cuda or (norm and self.exact):
            return False
        if self.exact and self.peers.ranks > 2 and x.nbytes > self.most_bytes:
            whole = x.nbytes % (16 * self.peers.ranks) == 0 and x.is_contiguous()
            return whole and self.peers.refusal(x.view(-1)[: self._piece(x)], norm) is None
        return x.nbytes <= self.most_bytes and self.peers.refusal(x, norm) is None

    def _piece(self, x: Tensor) -> int:
        """Return the numbers of ``x`` that are summed at once: whole 16 bytes for each rank, in the remainder too."""
        least = 16 * self.peers.ranks
        return MOST_BYTES // least * least // x.itemsize

    def sum(self, x: Tensor) -> Tensor:
        """Return the sum over the ranks, in place of ``x``."""
        for piece in x.view(-1).split(self._piece(x)) if x.nbytes > MOST_BYTES else (x,):
            self.peers.sum(piece, piece, dependent_launch=self.dependent_launch)
        return x

    def add_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """Return (norm, residual + sum); see ``Peers.add_norm``."""
        return self.peers.add_norm(x, residual, weight, eps, dependent_launch=self.dependent_launch)

    def stop(self) -> None:
        """End kernels that wait for an ended rank; nothing can be summed afterwards."""
        self.peers.stop.fill_(1)

    def __str__(self) -> str:
        shown = [f"{_size(t.nbytes)} in {t.own * 1e6:.1f} us (NCCL {t.nccl * 1e6:.1f})" for t in self.times]
        least = f"up to {_size(self.most_bytes)} by our kernel" if self.most_bytes else "by NCCL, which is quicker"
        return f"{least}: {', '.join(shown)}"


def _size(count: int) -> str:
    return f"{count >> 20} MiB" if count >= 1 << 20 else f"{count >> 10} KiB"
