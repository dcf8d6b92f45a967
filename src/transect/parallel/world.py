"""``World``: this process among the ranks that work together, and the messages between them.

Messages are objects that rank 0 sends to all (``announce``, ``listen``), or that all show to all (``exchange``). They
go by gloo over sockets of the host, beside whatever the devices use among themselves, and never wait for a device. They
are pickled: all ranks are processes of one user and one program.

A rank that fails while others wait for it says so in its next ``exchange`` (``Failure``), so that all of them end with
the same sentence and none waits for ever.
"""

from __future__ import annotations

import os
import pickle
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

if TYPE_CHECKING:
    from ..ops.comm.peer_memory import SharedMemory
    from .peer_sums import PeerSums

T = TypeVar("T")

FOR_EVER = timedelta(days=365)
"""Timeout of messages: ranks of an idle engine wait for their next message. A broken connection shows that a rank has
ended."""
INLINE = 4096
"""Bytes of a message that are sent with its length."""


@dataclass(frozen=True, slots=True)
class Failure:
    """An error that a rank sends in an exchange in place of its value. ``user``: the message says what to change."""

    message: str
    user: bool


class SharedError(Exception):
    """An error that all ranks know of: none of them waits for the one that raised it first."""


class SharedValueError(SharedError, ValueError):
    """A rank found an error that a user can fix."""


class SharedRuntimeError(SharedError, RuntimeError):
    """A rank found another error."""


class World:
    """All ranks, seen from one of them. torch's default process group must exist.

    Args:
        device: device of this rank.
    """

    def __init__(self, device: torch.device) -> None:
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.device = device
        self.on_host = int(os.environ.get("LOCAL_WORLD_SIZE", self.size))
        """Number of ranks on this host."""
        self.sums: dict[tuple[int, ...], PeerSums | str] = {}
        """All-reduces through shared GPU memory, or the reason that there are none, by the ranks of a group."""
        self.logits: dict[tuple[int, ...], SharedMemory] = {}
        """Memory in which ranks read each other's logits, by the ranks of a group."""
        self._groups: dict[Hashable, dist.ProcessGroup] = {}
        self._sent: list[tuple[dist.Work, Tensor]] = []
        """Messages in transit, kept until they have arrived."""
        self._control = dist.new_group(backend="gloo", timeout=FOR_EVER)
        self.seconds = 0.0
        """Seconds spent on waiting for messages of one rank (``receive``)."""

    def group(self, ranks: tuple[int, ...], purpose: Hashable) -> dist.ProcessGroup:
        """Return torch's group of these ranks for a purpose, always the same one: it has threads and connections of its
        own. All ranks of the world call this."""
        key = ranks, purpose
        if key not in self._groups:
            self._groups[key] = dist.new_group(list(ranks))
        return self._groups[key]

    def announce(self, message: Any) -> None:
        """Send an object to all others, who call ``listen``; only rank 0 calls this."""
        head, body = _packed(message)
        dist.broadcast(head, 0, group=self._control)
        if body is not None:
            dist.broadcast(body, 0, group=self._control)

    def listen(self) -> Any:
        """Return the next object that rank 0 announces."""
        head = torch.empty(INLINE, dtype=torch.uint8)
        dist.broadcast(head, 0, group=self._control)
        return _unpacked(head, lambda body: dist.broadcast(body, 0, group=self._control))

    def send(self, message: Any, to: int, *, tag: int = 0) -> None:
        """Send an object to one rank, which must call ``receive``; does not wait for that."""
        head, body = _packed(message)
        self._sent = [(work, tensor) for work, tensor in self._sent if not work.is_completed()]
        for tensor in (head,) if body is None else (head, body):
            work = dist.isend(tensor, group=self._control, group_dst=to, tag=tag)
            if work is not None:
                self._sent.append((work, tensor))

    def receive(self, source: int, *, tag: int = 0) -> Any:
        """Return the object that ``source`` sends with this tag; objects with other tags are kept for their own
        calls."""
        head = torch.empty(INLINE, dtype=torch.uint8)
        began = time.perf_counter()
        dist.recv(head, group=self._control, group_src=source, tag=tag)
        self.seconds += time.perf_counter() - began
        return _unpacked(head, lambda body: dist.recv(body, group=self._control, group_src=source, tag=tag))

    def exchange(self, mine: T | Failure) -> list[T]:
        """Gather a value from each rank, in their order; every rank must call it.

        Raises:
            SharedValueError: a rank sent a ``Failure`` that a user can fix; the message is that of the first.
            SharedRuntimeError: a rank sent another ``Failure``.
        """
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, mine, group=self._control)
        for rank, each in enumerate(found):
            if isinstance(each, Failure):
                where = "" if rank == self.rank else f"rank {rank}: "
                raise (SharedValueError if each.user else SharedRuntimeError)(f"{where}{each.message}")
        return found

    def agree(self, facts: dict[str, Any]) -> None:
        """Check that all ranks have the same facts.

        Raises:
            SharedValueError: they differ; the message names the fact, the ranks and both values.
        """
        everybody = self.exchange(facts)
        for rank, theirs in enumerate(everybody):
            for name, value in everybody[0].items():
                if theirs.get(name) != value:
                    raise SharedValueError(
                        f"the ranks disagree: {name} is {value!r} on rank 0 and {theirs.get(name)!r} on rank {rank}; "
                        "start all ranks with the same program, files and settings"
                    )


class Solo(World):
    """A world of one rank, without torch's process group."""

    def __init__(self) -> None:
        self.rank, self.size, self.on_host = 0, 1, 1
        self.device = torch.device("cpu")
        self.seconds = 0.0

    def exchange(self, mine: T | Failure) -> list[T]:
        """Return the value alone, see ``World.exchange``."""
        if isinstance(mine, Failure):
            raise (SharedValueError if mine.user else SharedRuntimeError)(mine.message)
        return [mine]


def _packed(message: Any) -> tuple[Tensor, Tensor | None]:
    """Encode a message as bytes: its length with a short message itself; and a long message separately."""
    data = pickle.dumps(message)
    head = torch.zeros(INLINE, dtype=torch.uint8)
    head[:8] = torch.frombuffer(bytearray(len(data).to_bytes(8, "little")), dtype=torch.uint8)
    body = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    if len(data) > INLINE - 8:
        return head, body
    head[8 : 8 + len(data)] = body
    return head, None


def _unpacked(head: Tensor, fetch: Callable[[Tensor], object]) -> Any:
    length = int.from_bytes(head[:8].numpy().tobytes(), "little")
    body = head[8 : 8 + length]
    if length > INLINE - 8:
        body = torch.empty(length, dtype=torch.uint8)
        fetch(body)
    return pickle.loads(body.numpy().tobytes())
