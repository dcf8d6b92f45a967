"""Room of a step beyond its decodes, divided between clients.

A step may take a multiple of the time of its decodes (``budget``). Short prompts of any client may take all of that. A
client whose prompts have taken several steps' room beyond its part is limited to the part, as long as others decode:
then its prompts last longer, and the streams of others feel little of them.

The part lets a client have its share of the time of each step, by weight: beside a stream of one other client half of
the step, beside four a fifth. It is never less than ``LEAST``, so that a prompt ends in time beside many streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Listed
from itertools import islice

from ..request import Sequence

LEAST = 0.25
"""Least part of the room for one client."""
FREE_STEPS = 8
"""Room of whole steps that a client may take before it is limited."""
LOOKED_AT = 64
"""Sequences at the front of the queue that are searched for clients."""


def part_of_room(weight: float, total: float, ratio: float) -> float:
    """Return the part of a step's room for clients of ``weight`` in sum, among clients of ``total``, if a step may take
    ``ratio`` times as long as its decodes alone."""
    others = total - weight
    return min(1.0, max(LEAST, weight / (others * (ratio - 1.0)))) if others > 0 else 1.0


class Rooms:
    """Accounts of the room that clients' prompts have taken."""

    def __init__(self) -> None:
        self._debts: dict[str, float] = {}
        """Room that each client has taken beyond ``LEAST`` of each step, in steps; those without are left out."""
        self._room = 0
        self.limited: dict[str, int] = {}
        """Clients that are limited in the step that was planned last, with the tokens that each might take."""
        self._next: dict[str, int] = {}

    def of_step(
        self, running: Listed[Sequence], waiting: Iterable[Sequence], room: int, ratio: float
    ) -> dict[str, int]:
        """Return the most prompt tokens of each client that is limited in the next step.

        Args:
            waiting: in the order of their turns.
            room: tokens of the step beyond its decodes.
            ratio: longest step, in units of its decodes alone.
        """
        weights: dict[str, float] = {}
        streams: set[str] = set()
        for seq in running:
            spec = seq.request.spec
            weights[spec.client] = spec.weight
            if seq.scheduled + 1 == seq.length < seq.max_length:
                streams.add(spec.client)
        for seq in islice(waiting, LOOKED_AT):
            weights[seq.request.spec.client] = seq.request.spec.weight
        self._room = room if len(weights) > 1 else 0
        total = sum(weights.values())
        self._next = {
            client: max(1, int(room * part_of_room(weights[client], total, ratio)))
            for client, debt in self._debts.items()
            if debt > FREE_STEPS and client in weights and streams - {client}
        }
        return self._next

    def discard(self) -> None:
        """Discard the bounds of the next step."""
        self._room, self._next = 0, {}

    def decoded(self, steps: int) -> None:
        """Account for ``steps`` planned steps without prompts."""
        for _ in range(steps if self._debts else min(steps, 1)):
            self.planned({})

    def planned(self, taken: Mapping[str, int]) -> None:
        """Account for a planned step, with the prompt tokens of each client."""
        for client in list(self._debts):
            self._debts[client] -= LEAST
            if self._debts[client] <= 0.0:
                del self._debts[client]
        if self._room > 0:
            for client, tokens in taken.items():
                debt = self._debts.get(client, 0.0) + tokens / self._room
                self._debts[client] = min(debt, FREE_STEPS + 1.0)
        self.limited = self._next
        self.discard()
