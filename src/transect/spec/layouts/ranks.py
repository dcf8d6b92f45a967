"""``RankLayout``: the number of ranks along each axis, and the coordinates of each rank. Plain arithmetic, no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

AXES = ("data", "pipeline", "context", "tensor")
"""From the outermost to the innermost: ranks of one tensor group are neighbours, so they share a host's fast links."""


class RankPlace(NamedTuple):
    """Coordinates of a rank along the axes, from 0."""

    data: int
    pipeline: int
    tensor: int
    context: int = 0


@dataclass(frozen=True, slots=True)
class RankLayout:
    """Sizes of the axes. The ranks count along ``tensor`` first, then ``context``, ``pipeline`` and ``data``.
    ``expert``: the ranks along ``tensor`` and ``data`` share the experts of a model, which are cut along ``tensor``
    else.

    Raises:
        ValueError: a size is not a whole number of at least 1.
    """

    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    expert: bool = False
    context: int = 1

    def __post_init__(self) -> None:
        for name in AXES:
            size = getattr(self, name)
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise ValueError(f"{name}_parallel_size must be a whole number of at least 1, got {size!r}")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Sizes in the order of ``AXES``."""
        return self.data, self.pipeline, self.context, self.tensor

    @property
    def size(self) -> int:
        """Number of ranks."""
        return self.data * self.pipeline * self.context * self.tensor

    def place(self, rank: int) -> RankPlace:
        """Return the coordinates of ``rank``.

        Raises:
            ValueError: there is no such rank.
        """
        if not 0 <= rank < self.size:
            raise ValueError(f"there is no rank {rank} in a layout of {self.size} ranks ({self})")
        rest, tensor = divmod(rank, self.tensor)
        rest, context = divmod(rest, self.context)
        data, pipeline = divmod(rest, self.pipeline)
        return RankPlace(data, pipeline, tensor, context)

    def rank(self, place: RankPlace) -> int:
        """Return the rank at these coordinates."""
        at = place.data * self.pipeline + place.pipeline
        return (at * self.context + place.context) * self.tensor + place.tensor

    def __str__(self) -> str:
        context = f", context {self.context}" if self.context > 1 else ""
        experts = ", experts shared" if self.expert else ""
        return f"tensor {self.tensor}, pipeline {self.pipeline}, data {self.data}{context}{experts}"


def share(size: int, part: int, parts: int) -> slice:
    """Return part ``part`` of ``size`` items, divided into ``parts`` that differ by at most one item: the first ones
    are larger."""
    each, more = divmod(size, parts)
    start = part * each + min(part, more)
    return slice(start, start + each + (part < more))


def owners(sizes: Mapping[str, int], ranks: int) -> dict[str, int]:
    """Assign each parameter to the rank that updates it: the largest first, each to the rank with the fewest numbers
    so far. ``sizes``: numbers of each parameter."""
    held = [0] * ranks
    owner = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        owner[name] = min(range(ranks), key=lambda rank: held[rank])
        held[owner[name]] += sizes[name]
    return owner


def check_shares(batches: int, ranks: int) -> None:
    """Check that ranks can share the micro-batches of a step.

    Raises:
        ValueError: there are not as many for each; the message names the next number that works.
    """
    if batches % ranks:
        raise ValueError(
            f"a step has {batches} micro-batches, which {ranks} ranks cannot share evenly: set accumulate to "
            f"{-(-batches // ranks) * ranks}"
        )
