"""``RolloutShare``: a rank's part of the validation batches, if ranks along the data axis share them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

Sums = Mapping[str, tuple[float, int]]
"""(sum, count) of each number, by name."""
Measured = TypeVar("Measured")


class RolloutShare:
    """One rank's share of a rollout; without arguments, all of it.

    Args:
        rank, ranks: this one's place among those that share, and how many there are.
        everybody: gathers a value from all ranks, in their order; every rank must call it.
        at: called with the number of the measured batch, from 1.
    """

    def __init__(
        self,
        rank: int = 0,
        ranks: int = 1,
        everybody: Callable[[Sums], Sequence[Sums]] = lambda mine: [mine],
        at: Callable[[int], object] = lambda number: None,
    ) -> None:
        self._rank, self._ranks, self._everybody, self._at = rank, ranks, everybody, at

    def of(self, batches: Iterable[Measured]) -> Iterator[tuple[Measured, bool]]:
        """Yield the batches that this rank computes, and True if the batch counts. All ranks compute the same number,
        because layers may be gathered and experts shared: a rank without a batch repeats the last one, which does not
        count."""
        row: list[Measured] = []
        number = 0
        for batch in batches:
            row.append(batch)
            if len(row) == self._ranks:
                number += 1
                self._at(number)
                yield row[self._rank], True
                row = []
        if row:
            self._at(number + 1)
            counts = self._rank < len(row)
            yield row[self._rank if counts else -1], counts

    def means(self, own: Sums) -> dict[str, tuple[float, int]]:
        """Return the mean of each number over all ranks, and the count. All ranks call it."""
        found: dict[str, tuple[float, int]] = {}
        for sums in self._everybody(own):
            for name, (total, count) in sums.items():
                before = found.get(name, (0.0, 0))
                found[name] = before[0] + total, before[1] + count
        return {name: (total / max(count, 1), count) for name, (total, count) in found.items()}


WHOLE = RolloutShare()
"""Share of a rank that computes everything."""
