"""Logits that stay on the rank that computed them: memory in which the ranks of a group read each other's, so that none
has to gather them before it draws (``ops/sampling/sampling.py``)."""

from __future__ import annotations

import torch

from ..ops.comm.peer_memory import memory_at
from ..ops.lang.philox import GROUP
from ..ops.sampling.sampling import LogitShards
from ..spec.layouts.shards import vocabulary_share
from .group import Group
from .shared_memory import free_memory, shared_memory
from .world import World


def spread_logits(world: World, group: Group, vocab: int, rows: int, dtype: torch.dtype) -> LogitShards | str:
    """Allocate memory for this rank's part of ``rows`` rows of logits, or return the reason that they are gathered.

    Every rank of the world must call this with the same arguments. A later engine on the same ranks reuses the memory
    if it is large enough; no two engines may use it at the same time.
    """
    share = vocabulary_share(vocab, group.size)
    if share % GROUP:
        return f"parts of {share} of {vocab} tokens are not whole groups of {GROUP}"
    nbytes = rows * share * dtype.itemsize
    held = world.logits.get(group.ranks)
    if held is not None and held.own.nbytes < nbytes:
        del world.logits[group.ranks]
        free_memory(world, held)
        held = None
    if held is None:
        made = shared_memory(world, group, nbytes)
        if isinstance(made, str):
            return made
        held = world.logits[group.ranks] = made
    away = offsets(held.addresses, group.rank, share, dtype.itemsize)
    kept = memory_at(held.own.address, nbytes).view(dtype).view(rows, share)
    return LogitShards(kept, torch.tensor(away, device=world.device), group.rank, vocab, group.all_reduce)


def offsets(addresses: list[int], rank: int, share: int, itemsize: int) -> list[int]:
    """Return ``LogitShards.away`` for parts that begin at these addresses."""
    return [(address - addresses[rank]) // itemsize - other * share for other, address in enumerate(addresses)]
