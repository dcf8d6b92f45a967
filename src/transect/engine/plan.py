"""A step while the scheduler plans it."""

from __future__ import annotations

from .batch import ScheduledRow
from .request import Sequence


class Plan:
    """A step in the making."""

    __slots__ = ("chunk", "copies", "forks", "rows", "sequences", "step")

    def __init__(self, step: int, chunk: int) -> None:
        self.step = step
        self.chunk = chunk
        """Tokens that one prompt may take of it."""
        self.rows: list[ScheduledRow] = []
        self.sequences: list[Sequence] = []
        """The sequence of each row."""
        self.copies: list[tuple[int, int]] = []
        self.forks: list[Sequence] = []
        """Choices that begin with this step and are not yet among the running."""

    def sizes(self) -> tuple[int, int]:
        """Rows of several tokens, which are prompts, and tokens of all rows."""
        counts = [row.num_tokens for row in self.rows]
        return sum(count > 1 for count in counts), sum(counts)
