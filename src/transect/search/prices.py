"""The cost of one more branch now, from the engine's learned step times and its free KV blocks.

A branch is one more row of each step until it ends. So it costs the seconds by which a row lengthens the steps, and, if
the search waits for it, the steps themselves.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from ..engine.scheduling.outputs import SchedulerStats
from .tree import Tree


@dataclass(frozen=True, slots=True)
class BranchPrice:
    """State of an engine that determines the cost of another branch.

    Attributes:
        step_s: predicted seconds of a step that decodes what runs now.
        row_s: predicted seconds that one more row adds to it.
        free_blocks: KV blocks that no sequence holds.
        block_size: tokens of a block.
    """

    step_s: float
    row_s: float
    free_blocks: int
    block_size: int

    @classmethod
    def of(cls, stats: SchedulerStats, block_size: int) -> BranchPrice | None:
        """Read the price from an engine's statistics; None if the engine has not learned step times."""
        if stats.next_row_seconds <= 0:
            return None
        free = stats.kv_blocks_total - stats.kv_blocks_used
        return cls(stats.next_step_seconds, stats.next_row_seconds, free, block_size)

    def quote(self, branches: int, tokens: float) -> BranchQuote:
        """Predict the cost of some more branches of ``tokens`` tokens each, that run at the same time."""
        blocks = branches * math.ceil(tokens / self.block_size)
        return BranchQuote(branches, tokens, tokens * (self.step_s + branches * self.row_s), blocks, self)


@dataclass(frozen=True, slots=True)
class BranchQuote:
    """Predicted cost of a fork.

    Attributes:
        seconds: until all of its branches have ended.
        blocks: KV blocks that they fill.
    """

    branches: int
    tokens: float
    seconds: float
    blocks: int
    price: BranchPrice

    @property
    def fits(self) -> bool:
        """True if the branches find free KV blocks."""
        return self.blocks <= self.price.free_blocks

    def to_dict(self) -> dict[str, Any]:
        """Return the quote for JSON, times in milliseconds."""
        return {
            "branches": self.branches,
            "tokens": round(self.tokens, 1),
            "ms": round(1e3 * self.seconds, 1),
            "step_ms": round(1e3 * self.price.step_s, 3),
            "row_ms": round(1e3 * self.price.row_s, 3),
            "kv_blocks": self.blocks,
            "free_kv_blocks": self.price.free_blocks,
        }


class ForkCosts:
    """Costs of the forks of one search. Methods ask by ``Tree.affordable``; drivers update ``price`` and ``spent_s``.

    Args:
        tree: of the search.
        seconds: budget of the search; None for no limit.

    Attributes:
        price: cost of a branch now; None if it is not known.
        spent_s: seconds since the search began.
        quotes: predicted costs of the forks, in order.
        too_dear: True if the method was told that no further branch can be afforded.
    """

    def __init__(self, tree: Tree, seconds: float | None) -> None:
        self._tree, self._seconds = tree, seconds
        self.price: BranchPrice | None = None
        self.spent_s = 0.0
        self.quotes: list[BranchQuote] = []
        self.too_dear = False
        tree.affordable = self.afford

    def afford(self, count: int) -> int:
        """Return the number of at most ``count`` more branches that end within the budget and find free KV blocks, each
        as long as the mean of the complete ones. All of them without a budget, a complete branch or a price."""
        complete = [len(branch.tokens) for branch in self._tree.branches if branch.complete]
        if self.price is None or self._seconds is None or not complete or count < 1:
            return count
        tokens = sum(complete) / len(complete)
        for fewer in range(count, 0, -1):
            quote = self.price.quote(fewer, tokens)
            if self.spent_s + quote.seconds <= self._seconds and quote.fits:
                self.quotes.append(quote)
                return fewer
        self.quotes.append(self.price.quote(1, tokens))
        self.too_dear = True
        return 0

    def to_list(self) -> list[dict[str, Any]]:
        """Return the quotes for JSON."""
        return [quote.to_dict() for quote in self.quotes]
