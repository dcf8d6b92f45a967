"""The KV pool as a map: the owner of every block, in runs of neighbours, and only where something changed."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ...engine.scheduling.snapshot import SchedulerSnapshot

FREE, CACHED, HIDDEN = -1, -2, -3
"""Owners of blocks that no request has: without contents; with contents that the prefix cache can find; not shown."""
MOST_EVICTED = 256
"""Evicted blocks that are named in one change."""


@dataclass(slots=True)
class KVMap:
    """Owners and numbers of users of all blocks at one moment."""

    owners: NDArray[np.int64]
    """Sequence number of the first choice of the owner's request, or ``FREE`` or ``CACHED``. A shared block belongs to
    the first of its users in the order of service."""
    users: NDArray[np.int32]
    """Sequences that refer to each block."""
    evicted: list[int]
    """Blocks whose cached contents were dropped since the map before, at most ``MOST_EVICTED``."""

    @classmethod
    def of(cls, seen: SchedulerSnapshot, before: KVMap | None = None) -> KVMap:
        """Draw the map of a snapshot; ``before``: an earlier map of the same pool."""
        owners = np.full(seen.stats.kv_blocks_total, FREE, np.int64)
        users = np.zeros(len(owners), np.int32)
        owners[np.frombuffer(seen.cached, np.uint32)] = CACHED
        reused = np.zeros(len(owners), np.bool_)
        for table in reversed(seen.tables):
            blocks = np.frombuffer(table.blocks, np.uint32)
            owners[blocks] = table.leader
            users[blocks] += 1
            reused[blocks[: table.reused]] = True
        evicted: list[int] = []
        if before is not None:
            lost = (before.owners == CACHED) & (owners >= 0) & ~reused
            evicted = np.flatnonzero(lost)[:MOST_EVICTED].tolist()
        return cls(owners, users, evicted)

    def shown(self, own: Collection[int] | None) -> KVMap:
        """Return the map for a client, with the requests ``own`` alone; None shows all."""
        if own is None:
            return self
        visible = np.isin(self.owners, list(own))
        return KVMap(np.where(visible, self.owners, HIDDEN), np.where(visible, self.users, 0).astype(np.int32), [])

    def runs(self, before: KVMap | None = None) -> list[int]:
        """List the changes: first block, number of blocks, owner and users, for each run of neighbours alike.

        ``before``: the map that the reader has; None lists all blocks.
        """
        if before is None:
            changed = np.arange(len(self.owners))
        else:
            changed = np.flatnonzero((self.owners != before.owners) | (self.users != before.users))
        if not len(changed):
            return []
        owners, users = self.owners[changed], self.users[changed]
        cuts = (np.diff(changed) != 1) | (np.diff(owners) != 0) | (np.diff(users) != 0)
        first = np.concatenate(([0], np.flatnonzero(cuts) + 1))
        lengths = np.diff(np.concatenate((first, [len(changed)])))
        found: list[int] = np.stack((changed[first], lengths, owners[first], users[first]), axis=1).ravel().tolist()
        return found
