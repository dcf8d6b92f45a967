"""Sequences that decode take turns, where those of one client would make each step long for all others.

Every row of a step makes it longer for all rows. So let each client have as many rows as the one with the fewest, in
proportion to their weights, and take the time of that step as a reference. A client may have more rows as long as a
step stays within a multiple of that time, of which it has its part (``rooms``). If its rows do not fit, they take
turns: those that waited longest come first. Clients with as many rows as each other slow each other down alike, and no
sequence pauses.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from collections.abc import Sequence as Listed
from typing import NamedTuple

from ....costs.learning import StepTimes
from ....costs.steps import StepLoad
from ..request import Sequence
from .rooms import part_of_room


class Turns(NamedTuple):
    """The rows of a step."""

    paused: frozenset[int]
    """Numbers of the sequences that wait for another step."""
    seconds: float
    """Longest time of the step; infinite if clients have equally many rows."""


NO_PAUSES = Turns(frozenset(), math.inf)


def _turn(seq: Sequence) -> tuple[int, int]:
    """Rank by the longest pause. Of those that ran in the same step, others come first every time."""
    return seq.last_step, hash((seq.seq_id, seq.last_step))


def take_turns(
    running: Listed[Sequence], waiting: Collection[str], times: StepTimes, ratio: float, target: float
) -> Turns:
    """Choose the decoding sequences that take part in the next step.

    Args:
        running: sequences that hold KV blocks, best rank first.
        waiting: clients of requests that wait for their first step. They, and those of prompts that have begun, count
            as clients with one row: their first tokens come later for every row.
        ratio: longest step, in units of the reference.
        target: longest step in seconds, in place of ``ratio`` and without parts; 0 for none.
    """
    clients = {seq.request.spec.client for seq in running} | set(waiting)
    if len(clients) < 2:
        return NO_PAUSES
    decoding: list[Sequence] = []
    rows: dict[str, list[Sequence]] = {}
    for seq in running:
        if seq.scheduled + 1 == seq.length < seq.max_length and seq.request.prompt_done:
            decoding.append(seq)
            rows.setdefault(seq.request.spec.client, []).append(seq)
    if not rows:
        return NO_PAUSES
    prompts = len(decoding) < len(running) or len(waiting) > 0
    weights = {client: each[0].request.spec.weight for client, each in rows.items()}
    level = min(len(each) / weights[client] for client, each in rows.items())
    if len(rows) < len(clients):
        level = min(level, 1.0)
    least = sum(min(len(each), math.ceil(level * weights[client])) for client, each in rows.items())
    total, keys = len(decoding), sum(seq.length for seq in decoding)
    if least == total:
        return NO_PAUSES

    def seconds_of(count: int) -> float:
        return times.predict(StepLoad(count, keys * count // total))

    reference = seconds_of(least)
    longest = target or ratio * reference
    many = sum(weight for client, weight in weights.items() if len(rows[client]) > level * weight)
    total_weight = sum(weights.values()) + len(clients) - len(rows)
    part = 1.0 if target else part_of_room(many, total_weight, ratio)
    limit = reference + max(0.0, longest - reference) * part * (0.5 if prompts else 1.0)
    low, high = least, total + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if seconds_of(middle) <= limit else (low, middle)
    if low == total:
        return Turns(frozenset(), longest)
    paused: list[int] = []
    by_need = sorted(rows, key=lambda client: len(rows[client]) / weights[client])
    for place, client in enumerate(by_need):  # max-min fair: what one does not need is for those with more rows
        mine = rows[client]
        share = round(low * weights[client] / sum(weights[each] for each in by_need[place:]))
        count = min(len(mine), max(1, share))
        low -= count
        if count < len(mine):
            paused += [seq.seq_id for seq in sorted(mine, key=_turn)[count:]]
    return Turns(frozenset(paused), longest)
