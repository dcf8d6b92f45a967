"""Parts of a step for clients with much work beside streams of others: turns of their rows, room for their prompts.

Every row of a step makes it longer for all rows. So let each client have as many rows as the one with the fewest, in
proportion to their weights, and take the time of that step as a reference. A client may have more rows as long as a
step stays within a multiple of that time, of which it has its part. If its rows do not fit, they take turns: those that
waited longest come first. Clients with as many rows as each other slow each other down alike, and no sequence pauses.

Short prompts of any client may take all the room of a step beyond its decodes. A client owes what its prompts took
beyond its part, in time. They wait for prompts of clients that owe less; and once it owes several steps' room, they get
the part alone, as long as others have work. Then they last longer, and the streams of others feel little of them.

The part lets a client have its share of the time of each step, by weight: beside a stream of one other client half of
the step, beside four a fifth. It is never less than ``LEAST``, so that a prompt ends in time beside many streams.

A client whose answer has just ended is likely to ask again, and its request then waits for the end of the step under
way. So for ``RECENT_STEPS`` steps it counts as a row of the reference, and steps of others stay short.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from collections.abc import Sequence as Listed
from typing import NamedTuple

from ....costs.learning import StepTimes
from ....costs.steps import StepLoad
from ..request import Sequence

LEAST = 0.25
"""Least part of the room for one client."""
FREE_STEPS = 4
"""Room of whole steps that a client may take before it is limited."""
MOST_OWED = 16
"""Most rooms that a client owes. Each step repays ``LEAST`` or more, so its prompts wait for fewer than 64 steps."""
BESIDE_PROMPTS = 0.25
"""Share of their room that additional rows get if there are prompts, which need the rest."""
RECENT_STEPS = 64
"""Steps after an answer in which the next request of its client is expected."""
LOOKED_AT = 64
"""Sequences at the front of the queue that are searched for clients."""

RULES = {
    "turns": {"by": ("take_turns", "part_of_room"), "settings": {"itl_target": 0.0, "max_num_seqs": 16}},
    "rooms": {"by": ("Rooms.of_step", "Rooms.planned"), "settings": {"itl_target": 0.0}},
}


class Recent:
    """Clients whose answers have just ended."""

    def __init__(self) -> None:
        self._step = 0
        self._ends: dict[str, int] = {}
        """Last step of each client's newest answer, the newest last."""

    def __iter__(self) -> Iterator[str]:
        return iter(self._ends)

    def ended(self, client: str, step: int) -> None:
        """Record an answer's end: its last step."""
        self._ends.pop(client, None)
        self._ends[client] = step

    def planned(self, steps: int = 1) -> None:
        """Count planned steps, and forget clients whose answers ended long ago."""
        self._step += steps
        while self._ends and next(iter(self._ends.values())) + RECENT_STEPS < self._step:
            del self._ends[next(iter(self._ends))]


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
    running: Listed[Sequence],
    waiting: Collection[str],
    times: StepTimes,
    ratio: float,
    target: float,
    recent: Iterable[str] = (),
) -> Turns:
    """Choose the decoding sequences that take part in the next step.

    Args:
        running: sequences that hold KV blocks, best rank first.
        waiting: clients of requests that wait for their first step. They, and those of prompts that have begun, count
            as clients with one row: their first tokens come later for every row.
        ratio: longest step, in units of the reference.
        target: longest step in seconds, in place of ``ratio`` and without parts; 0 for none.
        recent: clients that are likely to ask soon. The step that they find under way is bounded by ``ratio`` alone.
    """
    present = {seq.request.spec.client for seq in running} | set(waiting)
    clients = present.union(recent)
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

    absent = len(clients) - len(rows)
    reference = seconds_of(least + absent)
    longest = target or ratio * reference
    many = sum(weight for client, weight in weights.items() if len(rows[client]) > level * weight)
    total_weight = sum(weights.values()) + len(present) - len(rows)
    part = 1.0 if target else part_of_room(many, total_weight, ratio)
    limit = reference + max(0.0, longest - reference) * part * (BESIDE_PROMPTS if prompts else 1.0)
    low, high = least, total + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if seconds_of(middle + absent * prompts) <= limit else (low, middle)
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


def part_of_room(weight: float, total: float, ratio: float) -> float:
    """Return the part of a step's room for clients of ``weight`` in sum, among clients of ``total``, if a step may take
    ``ratio`` times as long as its decodes alone."""
    others = total - weight
    return min(1.0, max(LEAST, weight / (others * (ratio - 1.0)))) if others > 0 else 1.0


class Rooms:
    """Accounts of the time that clients' prompts have taken, in rooms: the time of a step beyond its decodes.

    A client owes what its prompts took beyond its part of each step. Its prompts wait as long as there are prompts of a
    client that owes less by more than a room. One that owes ``FREE_STEPS`` gets its part alone. If its prompts took
    more than that, because a chunk reads a long context, they wait until it is repaid.
    """

    def __init__(self) -> None:
        self._debts: dict[str, float] = {}
        """Rooms that each client owes; those that owe nothing are left out."""
        self._parts: dict[str, float] = {}
        self.charged = False
        """True if the next step's prompts are charged to accounts: there are other clients, or one is expected."""
        self.limited: dict[str, float] = {}
        """Result of ``of_step`` for the step that was planned last."""
        self._next: dict[str, float] = {}

    def of_step(
        self, weights: Mapping[str, float], prompts: Collection[str], ratio: float, expected: bool = False
    ) -> dict[str, float]:
        """Return the part of the next step's room that each client may take; 0 for one that waits. Clients that may
        take all are left out.

        Args:
            weights: of the clients with work.
            prompts: clients with prompts.
            ratio: longest step, in units of its decodes alone.
            expected: a request of another client is likely to come soon.
        """
        total = sum(weights.values())
        self.charged = len(weights) > 1 or expected
        self._parts = {client: part_of_room(weight, total, ratio) for client, weight in weights.items()}
        least = min((self._debts.get(client, 0.0) for client in prompts), default=0.0)
        self._next = {}
        for client, debt in self._debts.items():
            if client in weights and len(weights) > 1:
                part = self._parts[client]
                waits = debt > least + 1.0 or debt > FREE_STEPS + part
                left = 0.0 if waits else part + max(0.0, FREE_STEPS - debt)
                if left < 1.0:
                    self._next[client] = left
        return self._next

    def discard(self) -> None:
        """Discard the bounds of the next step."""
        self.charged, self._parts, self._next = False, {}, {}

    def decoded(self, steps: int) -> None:
        """Account for ``steps`` planned steps without prompts."""
        for _ in range(steps if self._debts else min(steps, 1)):
            self.planned({})

    def planned(self, taken: Mapping[str, float]) -> None:
        """Account for a planned step, with the rooms that the prompts of each client take."""
        for client in list(self._debts):
            self._debts[client] -= self._parts.get(client, LEAST)
            if self._debts[client] <= 0.0:
                del self._debts[client]
        if self.charged:
            for client, rooms in taken.items():
                self._debts[client] = min(self._debts.get(client, 0.0) + rooms, MOST_OWED)
        self.limited = self._next
        self.discard()
