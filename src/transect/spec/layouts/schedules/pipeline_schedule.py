"""``PipelineSchedule``: the record of a schedule. Plain arithmetic, no torch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSchedule:
    """A pipeline schedule: the order of the forward and backward passes of each rank.

    Every rank makes some forward passes ahead, then one backward and one forward pass in turn, then the backward passes
    that are left. How many passes are made ahead decides waiting and memory.

    Attributes:
        name: name in ``parallel.schedule`` and ``transect plan schedule``.
        ahead: (rank, stages, micro-batches, chunks) -> forward passes of the rank before its first backward pass, less
            one; at least ``stages - rank - 1``, and more than there are means all.
        chunked: each rank has several runs of layers (``chunks``), between which micro-batches go in groups of as many
            as there are stages.
    """

    name: str
    ahead: Callable[[int, int, int, int], int]
    chunked: bool = False
