"""``RolloutShare``: which validation batches a rank measures, where ranks along the data axis share them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

Sums = Mapping[str, tuple[float, int]]
"""By name: the sum of a number, and over how many things."""
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
        """The batches that this rank computes, and whether each counts. All ranks compute as many, because layers may
        be gathered and experts shared: a rank for which none is left computes the last one too, and it does not
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
        """The mean of each number over what all ranks have measured, and over how many things. All call it."""
        found: dict[str, tuple[float, int]] = {}
        for sums in self._everybody(own):
            for name, (total, count) in sums.items():
                before = found.get(name, (0.0, 0))
                found[name] = before[0] + total, before[1] + count
        return {name: (total / max(count, 1), count) for name, (total, count) in found.items()}


WHOLE = RolloutShare()
"""The part of a rank that shares with none."""
