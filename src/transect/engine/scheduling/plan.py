"""``Plan``, a step in the making: its rows, and the tokens that prompts may still take."""

from __future__ import annotations

from ...costs.steps import StepLoad, joined
from .batch import ScheduledRow
from .policies.budget import Budget
from .request import Sequence


class Plan:
    """A step in the making."""

    __slots__ = ("chunk", "copies", "forks", "rooms", "rows", "sequences", "shares", "step", "taken")

    def __init__(self, step: int, budget: Budget) -> None:
        self.step = step
        self.chunk = budget.chunk
        self.shares = [list(share) for share in budget.shares]
        """Remaining tokens of each share, see ``Share``."""
        self.rooms = dict(budget.rooms)
        """Remaining prompt tokens of each limited client."""
        self.taken: dict[str, StepLoad] = {}
        """Work of the prompts of each client."""
        self.rows: list[ScheduledRow] = []
        self.sequences: list[Sequence] = []
        """The sequence of each row."""
        self.copies: list[tuple[int, int]] = []
        self.forks: list[Sequence] = []
        """Choices that begin with this step and are not yet among the running."""

    def sizes(self) -> tuple[int, int]:
        """Count the rows of several tokens, which are prompts, and the tokens of all rows."""
        counts = [row.num_tokens for row in self.rows]
        return sum(count > 1 for count in counts), sum(counts)

    def allows(self, count: int, client: str) -> int:
        """Return the tokens that a client's prompt with ``count`` tokens to compute may take of the step."""
        left = next((tokens for over, tokens in self.shares if count > over), count)
        return min(count, left, self.chunk, self.rooms.get(client, count))

    def take(self, seq: Sequence, most: int) -> int:
        """Give a prompt the tokens that it may take, one to ``most``. Returns how many."""
        count, client = seq.length - seq.scheduled, seq.request.spec.client
        taken = max(1, min(self.allows(count, client), most))
        scored = int(max(0, taken - seq.request.unscored(seq.scheduled)))
        load = StepLoad.of([(seq.scheduled, taken)], scored)
        self.taken[client] = joined(self.taken[client], load) if client in self.taken else load
        if client in self.rooms:
            self.rooms[client] = max(0, self.rooms[client] - taken)
        for share in self.shares:
            if count > share[0]:
                share[1] = max(0, share[1] - taken)
                break
        return taken
