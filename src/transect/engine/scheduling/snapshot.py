"""Take a snapshot of a scheduler between two steps: who holds which KV blocks, and who waits.

The decision log has everything else that a viewer needs, and is written anyway; block tables are not in it. A snapshot
is taken only when someone asks for one. It costs a few microseconds for each sequence, and a nanosecond or so for each
block.
"""

from __future__ import annotations

from array import array

import msgspec

from .decisions import Added, added_record
from .outputs import SchedulerStats
from .request import RequestState
from .scheduler import Scheduler

MOST_WAITING = 256
"""Waiting sequences that a snapshot lists; ``SchedulerStats`` counts all."""


class Table(msgspec.Struct, array_like=True):
    """KV blocks of a running sequence."""

    seq_id: int
    leader: int
    """Sequence number of its request's first choice."""
    reused: int
    """Leading blocks that the prefix cache had when the request was admitted."""
    blocks: bytes
    """Block numbers in order, as 32-bit integers."""


class SchedulerSnapshot(msgspec.Struct):
    """State of a scheduler at ``at``, in seconds of its clock."""

    at: float
    stats: SchedulerStats
    tables: list[Table]
    waiting: list[tuple[int, bool]]
    """(sequence number, True if it was preempted) in the order of their turns, at most ``MOST_WAITING``."""
    cached: bytes
    """Free blocks whose contents the prefix cache can find, the one that is reused first at the beginning; 32-bit."""
    requests: list[Added]
    """Unfinished requests, if they were asked for; ``known`` has the tokens so far of each choice."""
    elsewhere: int = 0
    """Requests whose grammars are compiled or whose adapters are read, before they join the queue."""


def snapshot(scheduler: Scheduler, requests: bool = False) -> SchedulerSnapshot:
    """Take a snapshot. ``requests``: with a description of every unfinished request."""
    size = scheduler.config.block_size
    waiting = [
        (seq.seq_id, seq.request.first_scheduled is not None)
        for seq, _ in zip(scheduler.waiting, range(MOST_WAITING), strict=False)
    ]
    return SchedulerSnapshot(
        scheduler.clock.now(),
        scheduler.stats(),
        [
            Table(
                seq.seq_id,
                seq.request.leader.seq_id,
                seq.request.num_cached_tokens // size,
                array("I", seq.block_ids).tobytes(),
            )
            for seq in scheduler.running
        ],
        waiting,
        array("I", scheduler.cache.unused()).tobytes(),
        [_described(state) for state in scheduler.requests.values()] if requests else [],
    )


def _described(state: RequestState) -> Added:
    tokens = [-1 if seq.finish_reason is not None else len(seq.output_token_ids) for seq in state.choices]
    return msgspec.structs.replace(added_record(state, state.arrival), known=tokens)
