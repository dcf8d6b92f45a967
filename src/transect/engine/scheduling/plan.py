"""A step during planning."""

from __future__ import annotations

from .batch import ScheduledRow
from .policies.budget import Budget
from .request import Sequence


class Plan:
    """A step during planning."""

    __slots__ = ("chunk", "copies", "forks", "rows", "sequences", "shares", "step")

    def __init__(self, step: int, budget: Budget) -> None:
        self.step = step
        self.chunk = budget.chunk
        self.shares = [list(share) for share in budget.shares]
        """Remaining tokens of each share, see ``Share``."""
        self.rows: list[ScheduledRow] = []
        self.sequences: list[Sequence] = []
        """The sequence of each row."""
        self.copies: list[tuple[int, int]] = []
        self.forks: list[Sequence] = []
        """Choices that begin with this step and are not yet among the running."""

    def sizes(self) -> tuple[int, int]:
        """Return the number of rows with several tokens, which are prompts, and the tokens of all rows."""
        counts = [row.num_tokens for row in self.rows]
        return sum(count > 1 for count in counts), sum(counts)

    def allows(self, count: int) -> int:
        """Return the tokens that a prompt with ``count`` tokens to compute may take of the step."""
        left = next((tokens for over, tokens in self.shares if count > over), count)
        return min(count, left, self.chunk)

    def take(self, count: int, most: int) -> int:
        """Take tokens of the step for a prompt with ``count`` tokens to compute, one token to ``most``. Returns their
        number."""
        taken = max(1, min(self.allows(count), most))
        for share in self.shares:
            if count > share[0]:
                share[1] = max(0, share[1] - taken)
                break
        return taken
