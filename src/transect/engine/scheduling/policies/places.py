"""Places of ``max_num_seqs``, and KV blocks: a client that has less than its share gets some from a client that has
more.

They are taken for as long as an answer takes, which may be minutes. Without this rule one client that fills them all
would keep everybody else waiting for that long, whatever the order of the queue is. Only as much is taken as the
newcomer's share allows, and only from above a share, so places and blocks do not go to and fro.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from ..request import Sequence

LOOKED_AT = 64
"""Sequences at the front of the queue that are searched for a newcomer: clients below their shares have small tags."""

RULES = {"places": {"by": ("exchange",), "settings": {"max_num_seqs": 4}}}


def exchange(
    running: Iterable[Sequence], waiting: Iterable[Sequence], amount_of: Callable[[Sequence], int], most: int
) -> tuple[Sequence, Sequence] | None:
    """Choose the sequence that gets a place, or blocks, next, and the one that loses its own.

    Args:
        running: sequences that have places and blocks, best rank first.
        waiting: the front of the queue, best rank first.
        amount_of: places, or blocks, that a sequence takes.
        most: all that there are.

    Returns:
        The first waiting sequence of a client that has none, else of one below its share; and the newest sequence of
        the client that is furthest above its share. None if there are no such two.
    """
    front = list(waiting)
    weights = {seq.request.spec.client: seq.request.spec.weight for seq in front}
    held: dict[str, int] = {}
    newest: dict[str, Sequence] = {}
    several: dict[str, None] = {}
    for seq in running:
        client = seq.request.spec.client
        held[client] = held.get(client, 0) + amount_of(seq)
        weights[client] = seq.request.spec.weight
        if seq.length < seq.max_length:  # else it is about to end
            if client in newest:
                several[client] = None  # in the order of rank: all ranks, and a replay, choose the same of equals
            newest[client] = seq
    total = sum(weights.values())
    above = {client: held.get(client, 0) - most * weight / total for client, weight in weights.items()}
    loser = max(several, key=above.__getitem__, default=None)
    if loser is None or above[loser] <= 0:
        return None
    others = [seq for seq in front if seq.request.spec.client != loser]
    below = (seq for seq in others if above[seq.request.spec.client] + amount_of(seq) <= 0)
    without = (seq for seq in others if not held.get(seq.request.spec.client))
    newcomer = next(without, None) or next(below, None)
    return None if newcomer is None else (newcomer, newest[loser])
