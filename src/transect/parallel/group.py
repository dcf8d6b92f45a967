"""``Group``: some ranks and their collectives. Tensors may be on a CPU (gloo) or on GPUs (NCCL).

Every rank of a group calls the same functions in the same order, with tensors of the same shape and dtype; that is all
that keeps them together. On a GPU the calls are put on the current stream, and can be captured in a CUDA graph.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from ..ops.sampling.sampling import LogitShards
    from .peer_sums import PeerSums

_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

Way = TypeVar("Way", bound=Callable[..., Any])


def _timed(way: Way) -> Way:
    """Count the time of a call in ``Group.seconds``. On a GPU the call only launches, and is not counted."""

    @functools.wraps(way)
    def call(self: Group, x: Tensor, *rest: Any) -> Any:
        if self.group is None or x.device.type != "cpu":
            return way(self, x, *rest)
        began = time.perf_counter()
        try:
            return way(self, x, *rest)
        finally:
            self.seconds += time.perf_counter() - began

    return call  # type: ignore[return-value]


class Group:
    """The ranks along one axis of a mesh. With one rank every function is free.

    Args:
        ranks: their numbers in the world, in order.
        rank: the own place among them.
        group: of torch; None where there is one rank.
    """

    def __init__(self, ranks: tuple[int, ...], rank: int, group: dist.ProcessGroup | None) -> None:
        self.ranks, self.rank, self.group = ranks, rank, group
        self.sums: PeerSums | None = None
        """Our own all-reduce kernels; None for torch's."""
        self.logits: LogitShards | None = None
        """Memory in which the ranks read each other's logits; None if they gather them."""
        self.seconds = 0.0
        """Seconds spent so far on moving CPU tensors between ranks, mostly waiting for the last rank."""

    @classmethod
    def alone(cls) -> Group:
        """Return a group of one rank."""
        return cls((0,), 0, None)

    @property
    def size(self) -> int:
        """Number of ranks."""
        return len(self.ranks)

    @_timed
    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum ``x`` over all ranks in place, with the same bits on every rank."""
        if self.sums is not None and self.sums.takes(x):
            return self.sums.sum(x)
        if self.group is not None:
            dist.all_reduce(x, group=self.group)
        return x

    def most(self, number: int) -> int:
        """Return the largest of the ranks' numbers, without waiting for a device."""
        if self.group is None:
            return number
        found = torch.tensor([number], dtype=torch.int64)
        dist.all_reduce(found, op=dist.ReduceOp.MAX, group=self.group)
        return int(found)

    @_timed
    def all_gather(self, x: Tensor) -> Tensor:
        """Gather ``[...]`` of each rank to ``[ranks, ...]``, in the order of the ranks."""
        if self.group is None:
            return x[None]
        out = x.new_empty(self.size, *x.shape)
        _gather(out.flatten(0, 1) if x.ndim else out, x.contiguous(), group=self.group)
        return out

    def start_all_reduce(self, x: Tensor) -> dist.Work | None:
        """Begin to sum ``x`` over the ranks, in its place; torch's collective. As ``start_gather``."""
        if self.group is None:
            return None
        work: dist.Work = dist.all_reduce(x, group=self.group, async_op=True)
        return work

    def start_gather(self, out: Tensor, x: Tensor) -> dist.Work | None:
        """Start to fill ``out`` ``[ranks * n]`` with ``x`` ``[n]`` of each rank, in their order; both must exist until
        the work is done. With one rank it is done at once, and the result is None."""
        if self.group is None:
            out.copy_(x)
            return None
        work: dist.Work = _gather(out, x, group=self.group, async_op=True)
        return work

    def start_scatter(self, out: Tensor, x: Tensor) -> dist.Work | None:
        """Start to fill ``out`` ``[n]`` with this rank's part of the sum of ``x`` ``[ranks * n]``; as
        ``start_gather``."""
        if self.group is None:
            out.copy_(x)
            return None
        work: dist.Work = _scatter(out, x, group=self.group, async_op=True)
        return work

    def gather_into(self, out: Tensor, x: Tensor) -> None:
        """Gather vectors into ``out``; ``x`` may be the rank's own part of it."""
        _gather(out, x, group=self.group)

    def scatter_into(self, out: Tensor, x: Tensor) -> None:
        """Reduce-scatter a vector into ``out``, which may be the rank's own part of ``x``."""
        _scatter(out, x, group=self.group)

    @_timed
    def reduce_scatter(self, x: Tensor) -> Tensor:
        """Sum ``[ranks * n, ...]`` over the ranks, and return this rank's ``[n, ...]``."""
        if self.group is None:
            return x
        out = x.new_empty(x.shape[0] // self.size, *x.shape[1:])
        _scatter(out, x.contiguous(), group=self.group)
        return out

    @_timed
    def all_to_all(self, x: Tensor) -> Tensor:
        """Exchange ``[ranks * n, ...]``: part i goes to rank i; returns the part from each rank, in their order."""
        if self.group is None:
            return x
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x.contiguous(), group=self.group)
        return out

    @_timed
    def all_to_all_rows(self, x: Tensor, give: list[int], take: list[int]) -> Tensor:
        """Exchange rows, ``[sum(give), n]`` -> ``[sum(take), n]``: the first ``give[0]`` rows go to rank 0 and so on;
        returns the rows from each rank, in their order, ``take`` of them."""
        if self.group is None:
            return x
        out = x.new_empty(sum(take), x.shape[1])
        dist.all_to_all_single(_bytes(out), _bytes(x.contiguous()), take, give, group=self.group)
        return out

    def send(self, x: Tensor, to: int) -> dist.Work | None:
        """Start sending to the rank with index ``to``; ``x`` must not change until the work is done."""
        return dist.isend(x.contiguous(), group=self.group, group_dst=to)

    @_timed
    def receive(self, x: Tensor, source: int) -> Tensor:
        """Receive ``x`` from the rank with index ``source``."""
        dist.recv(x, group=self.group, group_src=source)
        return x

    def start_shift(self, x: Tensor) -> Shift:
        """Start sending ``x`` to the next rank, and receiving from the previous one; ``x`` must not change until
        then."""
        return Shift(x, self)

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        """Replace ``x`` on all ranks by that of the rank with index ``source``."""
        if self.group is not None:
            dist.broadcast(x, group=self.group, group_src=source)
        return x


def _bytes(x: Tensor) -> Tensor:
    """View rows of numbers as rows of bytes, which gloo moves whatever their type."""
    return x.view(torch.uint8)


class Shift:
    """A tensor in transit to the next rank, and one from the previous rank."""

    def __init__(self, x: Tensor, group: Group) -> None:
        self.sent, self.came = x, torch.empty_like(x)
        ahead, behind = (group.rank + 1) % group.size, (group.rank - 1) % group.size
        self._work = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, group=group.group, group_peer=ahead),
                dist.P2POp(dist.irecv, self.came, group=group.group, group_peer=behind),
            ]
        )

    def wait(self) -> Tensor:
        """Wait for the transfer; return the received tensor."""
        for work in self._work:
            work.wait()
        return self.came
