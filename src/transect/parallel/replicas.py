"""Data parallelism: every rank computes some micro-batches of a step, and all take the step of their sum.

``GradientReplicas`` is for models that every rank holds whole. By ``zero`` (Rajbhandari et al. 2020, arXiv:1910.02054):

* 0: gradients are summed on every rank, and every rank updates everything.
* 1: the state of the optimizer is cut by parameters, about as many numbers on each rank; a rank updates its own, and
  sends them to the others. Whole parameters, so that each optimizer does to them what it does on one rank, also one
  that needs whole matrices.
* 2: as 1, and a gradient is kept only where its parameter is updated.

Gradients are sent in buckets. During the last micro-batch of a rank a bucket is sent as soon as its gradients are
complete, during the backward pass; a table that embedding and head share goes in two parts (``table_rows.py``).
``sharded.py`` has ``zero`` 3.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..costs.memory.sizes import BUCKET_BYTES
from ..spec.layouts.ranks import owners
from .gradient_sums import collect, collected
from .group import Group
from .table_rows import TableRows

if TYPE_CHECKING:
    from .peer_copies import PeerCopies

COPIED_BUCKET_BYTES = 64 * 2**20
"""Bytes of gradients that copy engines send together, which cost some host time each."""


class GradientReplicas:
    """Sum gradients over the ranks of a group, and assign the updates of parameters to ranks.

    Args:
        group: the ranks, each with the same parameters.
        parameters: all that are trained, by name.
        zero: 0, 1 or 2.
        reduce_dtype: data type in which gradients are summed.
        sizes: element counts by which parameters are assigned, if other groups have other parts of the same parameters
            and must assign them alike; None for the parameters' own counts.
        copies: copy engines that sum, with ``zero`` 0 and 1; None for torch's collectives.
        alone: parameters that no other rank has: their gradients are summed over micro-batches alone.
        table: parameter shared by embedding and head; None if there is none.
    """

    def __init__(
        self,
        group: Group,
        parameters: Mapping[str, nn.Parameter],
        zero: int = 0,
        reduce_dtype: torch.dtype = torch.float32,
        sizes: Mapping[str, int] | None = None,
        copies: PeerCopies | None = None,
        alone: Collection[str] = (),
        table: TableRows | None = None,
    ) -> None:
        self.copies, self.alone, self.table = copies, frozenset(alone), table
        self.group, self.zero, self.reduce_dtype = group, zero, reduce_dtype
        self.parameters = dict(parameters)
        own = {name: parameter.numel() for name, parameter in self.parameters.items()}
        sizes = own if sizes is None else {name: sizes[name] for name in own}
        self.owner = owners(sizes, group.size) if zero else dict.fromkeys(self.parameters, group.rank)
        self._sums: dict[str, Tensor] = {}
        size = BUCKET_BYTES if copies is None else COPIED_BUCKET_BYTES
        shared = {name: parameter for name, parameter in self.parameters.items() if name not in self.alone}
        self._buckets = _buckets(shared, self.owner, zero == 2, size)
        if table is not None:  # the head's part of it is the first gradient to be there
            self._buckets.sort(key=lambda bucket: bucket != [table.name])
        self._summed = len(self._buckets)
        """Number of buckets that ranks sum; the others, which come last, hold parameters that no other rank has."""
        self._buckets += [[name] for name in self.parameters if name in self.alone]
        self._bucket_of = {name: number for number, bucket in enumerate(self._buckets) for name in bucket}
        self._missing: list[int] | None = None
        """Gradients that each bucket waits for during the last micro-batch; None before."""
        self._sent: list[_Sent] = []
        self._given: set[str] = set()
        """Names of parameters with a gradient on this rank."""
        self.square: Tensor | None = None
        """Sum of squares of the reduced gradients as a float32 scalar, if the all-reduce computed it; else None."""
        arrived = weakref.WeakMethod(self._arrived)  # what a parameter's hook holds is never collected with it
        for name, parameter in self.parameters.items():
            parameter.register_post_accumulate_grad_hook(partial(_told, arrived, name))

    @property
    def owned(self) -> dict[str, nn.Parameter]:
        """Parameters that this rank updates."""
        return {name: p for name, p in self.parameters.items() if self.owner[name] == self.group.rank}

    @property
    def shared_bytes(self) -> int:
        """Bytes of the device that other ranks access, in addition to torch's allocations."""
        return 0 if self.copies is None else self.copies.nbytes

    @contextmanager
    def last(self) -> Iterator[None]:
        """Enclose the passes of the rank's last micro-batch, forward and backward: complete buckets are sent at
        once."""
        self._missing = [len(bucket) for bucket in self._buckets]
        try:
            with nullcontext() if self.table is None else self.table.apart():
                yield
        finally:
            self._missing = None

    def collect(self) -> None:
        """Collect the gradients of a micro-batch that is not the last. Those in 16 bits are accumulated in float32."""
        collect(self.parameters, self._sums)

    def local(self) -> dict[str, Tensor]:
        """Return this rank's own gradients of a step, if none was sent."""
        self.collect()
        return collected(self.parameters, self._sums)

    def gradient_of(self, name: str) -> Tensor | None:
        """Return this rank's gradient so far, without a copy."""
        return self._sums.get(name, self.parameters[name].grad)

    @torch.no_grad()
    def reduce(self) -> dict[str, Tensor]:
        """Return the gradients of the whole step, of the parameters that this rank updates.

        All ranks call it together.
        """
        self.square = None
        self._send(len(self._buckets))
        # Not on the GPU: the host would wait there for all that it has launched.
        counts = [0] * self.group.size
        counts[self.group.rank] = 0 if self.table is None else self.table.count
        seen = torch.tensor([*(name in self._given for name in self.parameters), *counts], dtype=torch.int64)
        anywhere = self.group.all_reduce(seen).tolist()
        given = {name for name, ranks in zip(self.parameters, anywhere, strict=False) if ranks}
        rows = self._rows(anywhere[len(self.parameters) :])
        found: dict[str, Tensor] = {}
        for sent in self._sent:
            flat = self._received(sent)
            if flat is None:
                continue
            at = 0
            for name in sent.names:
                parameter = self.parameters[name]
                values = flat[at : at + parameter.numel()].view_as(parameter)
                at += parameter.numel()
                if name in given and self.owner[name] == self.group.rank:
                    found[name] = values
                    if self.table is not None and name == self.table.name:
                        self.table.add(values, rows)
        known = [sent.squares for sent in self._sent if sent.squares is not None]
        if known:
            rest = {n: found[n] for sent in self._sent if sent.squares is None for n in sent.names if n in found}
            own = torch.cat(known).sum()
            self.square = self.group.all_reduce(own[None])[0] + square_of(rest, own.device)
        self.clear()
        return {name: found[name] for name in self.parameters if name in found}

    def _rows(self, counts: Sequence[int]) -> Any:
        """Gather the embedding's gradient rows of a table shared with the head; every rank must call it."""
        if self.table is None:
            return None
        return self.table.exchange(self.group, counts, self.parameters[self.table.name].detach(), self.reduce_dtype)

    def clear(self) -> None:
        """Drop all gradients."""
        self._sums, self._sent = {}, []
        self._given.clear()
        if self.table is not None:
            self.table.clear()
        for parameter in self.parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def share(self) -> None:
        """Send the parameters that this rank has updated to the others, after a step."""
        if not self.zero:
            return
        for bucket in _buckets(self.parameters, self.owner, True):
            parameters = [self.parameters[name] for name in bucket]
            flat = torch.cat([parameter.detach().reshape(-1) for parameter in parameters])
            self.group.broadcast(flat, self.owner[bucket[0]])
            if self.owner[bucket[0]] != self.group.rank:
                for parameter, values in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                    parameter.copy_(values.view_as(parameter))

    def writes(self, name: str) -> bool:
        """Return True if this rank writes the state of a parameter; replicated states are divided between ranks."""
        if self.zero:
            return self.owner[name] == self.group.rank
        return list(self.parameters).index(name) % self.group.size == self.group.rank

    def stored_name(self, name: str) -> str:
        """Return the name of a state (``parameter/kind``) in a file: it is whole."""
        return name

    def whole_state(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the optimizer's state of all ranks (``name/kind``) on the CPU of the first one; on others nothing. All
        call it."""
        if not self.zero:
            return on_cpu(tensors) if self.group.rank == 0 else {}
        return gather_tensors(self.group, tensors)

    def own_state(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return the part of a whole state that belongs to this rank."""
        own = self.owned
        return {name: tensors[name] for name in tensors if name.rpartition("/")[0] in own}

    # Buckets on their way

    def _arrived(self, name: str) -> None:
        """Record a gradient of the last micro-batch."""
        if self._missing is None:
            return
        self._missing[self._bucket_of[name]] -= 1
        ready = len(self._sent)
        while ready < len(self._buckets) and not self._missing[ready]:  # in order: that is all ranks' order
            ready += 1
        self._send(ready)

    @torch.no_grad()
    def _send(self, end: int) -> None:
        """Start the sums of all buckets before ``end``."""
        for bucket in self._buckets[len(self._sent) : end]:
            flat = self._filled(bucket)
            work: Any = None
            squares = None
            if bucket[0] in self.alone:
                pass
            elif self.zero == 2:
                target = self.group.ranks[self.owner[bucket[0]]]
                work = dist.reduce(flat, target, group=self.group.group, async_op=True)
                for sent in self._sent[-2:-1]:
                    self._received(sent)
            elif self.copies is not None and len(self._sent) + 1 < self._summed:
                # The last bucket has no work beside it that could want the multiprocessors, and NCCL is quicker alone.
                shared = self.table is not None and bucket == [self.table.name]
                if self.copies.fused and not self.zero and not self.alone and not shared:
                    squares = self.copies.squares_of(flat)
                work = self.copies.start_all_reduce(flat, squares)
            else:
                work = self.group.start_all_reduce(flat)
            self._sent.append(_Sent(bucket, flat, work, squares))

    def _filled(self, bucket: Sequence[str]) -> Tensor:
        """Concatenate a bucket's gradients; the bucket owns the result. A single gradient is not copied."""
        found: list[Tensor | None] = []
        for name in bucket:
            parameter = self.parameters[name]
            gradient, sums = parameter.grad, self._sums.pop(name, None)
            if sums is not None:
                gradient = sums if gradient is None else sums.add_(gradient)
            parameter.grad = None
            found.append(gradient)
            if gradient is not None:
                self._given.add(name)
        alone = found[0]
        if len(bucket) == 1 and alone is not None and alone.dtype == self.reduce_dtype and alone.is_contiguous():
            return alone.view(-1)
        sizes = [self.parameters[name].numel() for name in bucket]
        device = self.parameters[bucket[0]].device
        flat = torch.empty(sum(sizes), dtype=self.reduce_dtype, device=device)
        for part, gradient in zip(flat.split(sizes), found, strict=True):
            part.zero_() if gradient is None else part.copy_(gradient.reshape(-1))
        return flat

    def _received(self, sent: _Sent) -> Tensor | None:
        """Wait for a bucket's sum and return it; None, with the memory freed, if another rank updates it."""
        if sent.work is not None:
            sent.work.wait()
        if self.zero == 2 and self.owner[sent.names[0]] != self.group.rank:
            sent.flat = None
        return sent.flat


def _told(arrived: weakref.WeakMethod[Any], name: str, _: Tensor) -> None:
    """Report a gradient to its ``Replicas``, if that still exists."""
    tell = arrived()
    if tell is not None:
        tell(name)


class _Sent:
    """A bucket whose sum is in progress."""

    def __init__(self, names: Sequence[str], flat: Tensor, work: Any, squares: Tensor | None = None) -> None:
        self.names, self.work, self.squares = names, work, squares
        self.flat: Tensor | None = flat


def _buckets(
    parameters: Mapping[str, nn.Parameter], owner: Mapping[str, int], by_owner: bool, bucket_bytes: int = BUCKET_BYTES
) -> list[list[str]]:
    """List the names in each bucket, in the order of a backward pass: from the last parameter to the first. With
    ``by_owner`` each bucket has one owner. A parameter that fills a bucket has its own."""
    buckets: list[list[str]] = []
    open_: dict[int, tuple[list[str], int]] = {}
    for name in reversed(list(parameters)):
        own = parameters[name].numel() * 4
        if own >= bucket_bytes:
            buckets.append([name])
            continue
        who = owner[name] if by_owner else 0
        names, size = open_.pop(who, ([], 0))
        names.append(name)
        if size + own >= bucket_bytes:
            buckets.append(names)
        else:
            open_[who] = names, size + own
    rest = [names for names, _ in open_.values()]
    if buckets and buckets[-1] == [next(iter(parameters))]:  # it is the last to be there
        return [*buckets[:-1], *rest, buckets[-1]]
    return buckets + rest


def square_of(gradients: Mapping[str, Tensor], device: torch.device) -> Tensor:
    """Return the sum of the squares of all gradients, a float32 scalar; 0 if there are none."""
    if not gradients:
        return torch.zeros((), device=device)
    norms = torch._foreach_norm(list(gradients.values()), 2, dtype=torch.float32)
    return torch.stack(list(norms)).square().sum()


def on_cpu(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Copy tensors to the CPU."""
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in tensors.items()}


def gather_tensors(group: Group, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the tensors of all ranks by name, on the CPU of the first rank; on others nothing.

    Names are of one rank each.
    """
    if group.size == 1:
        return on_cpu(tensors)
    mine = {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    everybody: list[Any] = [None] * group.size
    dist.all_gather_object(everybody, mine, group=group.group)
    found = on_cpu(tensors) if group.rank == 0 else {}
    device = next(iter(tensors.values())).device if tensors else torch.device("cpu")
    for rank in range(1, group.size):
        for name, (shape, dtype) in everybody[rank].items():
            if group.rank == rank:
                work = group.send(tensors[name].detach(), 0)
                assert work is not None
                work.wait()
            elif group.rank == 0:
                found[name] = group.receive(torch.empty(shape, dtype=dtype, device=device), rank).cpu()
    return found
