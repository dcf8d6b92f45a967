"""Divide the numbers of many parameters into groups that are moved and processed together.

All numbers are concatenated in the order of the parameters. A group is some small parameters, or a part of a
large one: enough for a disk and a link, and few enough for several to be in memory::

    group 0   [ embed, numbers 0 .. 2^24 ]
    group 1   [ embed, numbers 2^24 ..   ]
    group 2   [ layers.0.attention_norm | layers.0.attention.q | ... ]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

GROUP = 2**24
"""Most numbers of a group."""


@dataclass(frozen=True, slots=True)
class StatePiece:
    """Numbers ``begin`` to ``end`` of a parameter, at offset ``at`` of their group."""

    name: str
    begin: int
    end: int
    at: int

    @property
    def place(self) -> slice:
        """Slice of the group."""
        return slice(self.at, self.at + self.end - self.begin)


@dataclass(frozen=True, slots=True)
class PieceGroup:
    """Pieces that are moved together: ``count`` numbers, starting with number ``start`` of all."""

    pieces: tuple[StatePiece, ...]
    start: int
    count: int


def cut(sizes: Mapping[str, int], most: int = GROUP) -> list[PieceGroup]:
    """Divide parameters into groups of at most ``most`` numbers; ``sizes`` has the numbers of each parameter."""
    groups: list[PieceGroup] = []
    pieces: list[StatePiece] = []
    start = count = 0
    for name, size in sizes.items():
        if count and count + size > most:
            groups.append(PieceGroup(tuple(pieces), start, count))
            start, pieces, count = start + count, [], 0
        for begin in range(0, size, most):
            end = min(begin + most, size)
            pieces.append(StatePiece(name, begin, end, count))
            count += end - begin
            if count == most:
                groups.append(PieceGroup(tuple(pieces), start, count))
                start, pieces, count = start + count, [], 0
    if pieces:
        groups.append(PieceGroup(tuple(pieces), start, count))
    return groups
