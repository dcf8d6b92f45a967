"""``shared_memory``: memory on every GPU of a group that all its ranks can read and write."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from ..ops.comm.peer_memory import PeerMemory, SharedMemory
from ..ops.registry import Unavailable
from .group import Group
from .world import World


def shared_memory(world: World, group: Group, nbytes: int, refusal: str | None = None) -> SharedMemory | str:
    """Allocate pieces of ``nbytes`` bytes, or return the reason that there are none.

    Every rank of the world must call this, and either all groups get memory or none does.

    Args:
        refusal: reason why this rank takes no part.
    """
    made: PeerMemory | None = None
    said: bytes | str
    try:
        if refusal is not None:
            raise Unavailable(refusal)
        made = PeerMemory(nbytes)
        said = made.handle
    except (Unavailable, RuntimeError) as error:
        said = str(error)
    handles = world.exchange((_host(), said))
    reason = _why_not([handles[rank] for rank in group.ranks])
    opened: list[int] = []
    if reason is None:
        assert made is not None
        try:
            for rank in group.ranks:
                own = rank == world.rank
                opened.append(made.address if own else PeerMemory.opened(bytes(handles[rank][1])))  # type: ignore[arg-type]
        except RuntimeError as error:
            reason = str(error)
    # One answer for all groups: those that continue exchange more messages.
    reason = next((each for each in world.exchange(reason) if each is not None), None)
    if reason is None:
        assert made is not None
        return SharedMemory(opened, made)
    _free(world, opened, made)
    return reason


def free_memory(world: World, memory: SharedMemory) -> None:
    """Free the memory. Every rank of the world must call this, when the memory is no longer used."""
    torch.cuda.synchronize()
    _free(world, memory.addresses, memory.own)


def _free(world: World, opened: Sequence[int], made: PeerMemory | None) -> None:
    for address in opened:
        if made is None or address != made.address:
            PeerMemory.close(address)
    world.exchange(None)  # no rank has it open any more
    if made is not None:
        made.free()


def _host() -> str:
    """Return a name that is equal for all processes of a host and differs between hosts."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text().strip() if boot.exists() else platform.node()


def _why_not(shown: Sequence[tuple[str, bytes | str]]) -> str | None:
    if len({host for host, _ in shown}) > 1:
        return "the ranks are on several hosts"
    return next((said for _, said in shown if isinstance(said, str)), None)
