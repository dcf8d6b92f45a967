"""Seconds of collectives between ranks, exposed and hidden.

Rings, n ranks, S bytes, b bytes per second and rank (Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective
Communication Operations in MPICH"): an all-reduce takes 2 (n - 1) / n S / b; all-gather, reduce-scatter and all-to-all
half of that; a broadcast or a reduction to one rank S / b.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from .machine import Machine


class Collectives(Protocol):
    """Seconds of messages between ranks; ``size`` is in bytes, in ``calls`` calls together."""

    @property
    def ranks(self) -> int:
        """Number of ranks."""

    @property
    def shared(self) -> int:
        """Number of logits replaced by two numbers of a sum, if ranks read each other's logits; 0 if they do not."""

    def all_reduce(self, size: float, calls: float = 1) -> float:
        """Return the seconds of sums."""

    def gather(self, size: float, calls: float = 1) -> float:
        """Return the seconds of all-gathers to ``size``, or of reduce-scatters from ``size``."""

    def send(self, size: float, calls: float = 1) -> float:
        """Return the seconds of messages to another rank."""


@dataclass(frozen=True, slots=True)
class Axis:
    """``Collectives`` along one axis of a layout, from the rates of a machine."""

    machine: Machine
    ranks: int
    stride: int = 1
    """Distance between neighbours, in ranks."""

    @property
    def shared(self) -> int:
        """0: logits are gathered."""
        return 0

    @property
    def bandwidth(self) -> float:
        """Bytes per second of each rank."""
        return self.machine.bandwidth(self.ranks * self.stride)

    def _seconds(self, sent: float, calls: float) -> float:
        return 0.0 if self.ranks == 1 else sent / self.bandwidth + calls * self.machine.latency

    def all_reduce(self, size: float, calls: float = 1) -> float:
        """Return the seconds to sum ``size`` bytes, in ``calls`` calls."""
        return self._seconds(2 * (self.ranks - 1) / self.ranks * size, calls)

    def gather(self, size: float, calls: float = 1) -> float:
        """Return the seconds of an all-gather to ``size`` bytes, or of a reduce-scatter from as many."""
        return self._seconds((self.ranks - 1) / self.ranks * size, calls)

    def send(self, size: float, calls: float = 1) -> float:
        """Return the seconds to send ``size`` bytes to another rank, or from one to all."""
        return self._seconds(size, calls)


@dataclass(frozen=True, slots=True)
class MeasuredLinks:
    """Measured sums between two ranks.

    Attributes:
        seconds: of an all-reduce between two ranks, by bytes; linear between two sizes.
        shared: as in ``Collectives``.
    """

    seconds: Mapping[int, float]
    shared: int = 0

    def among(self, ranks: int) -> MeasuredAxis:
        """Return the collectives of ``ranks`` ranks."""
        return MeasuredAxis(self, ranks)

    def pair(self, size: float) -> float:
        """Return the seconds of an all-reduce of ``size`` bytes between two ranks."""
        sizes = sorted(self.seconds)
        at = bisect_left(sizes, size)
        if at == 0:
            return self.seconds[sizes[0]]
        if at == len(sizes):
            return self.seconds[sizes[-1]] * size / sizes[-1]
        low, high = sizes[at - 1], sizes[at]
        part = (size - low) / (high - low)
        return (1 - part) * self.seconds[low] + part * self.seconds[high]


@dataclass(frozen=True, slots=True)
class MeasuredAxis:
    """``Collectives`` of some ranks, extrapolated from sums between two. A ring of n sends 2 (n - 1) messages in turn,
    each of 1 / n of the bytes; two ranks send 2 of a half."""

    links: MeasuredLinks
    ranks: int

    @property
    def shared(self) -> int:
        """Value of the links."""
        return self.links.shared

    def all_reduce(self, size: float, calls: float = 1) -> float:
        """Return the seconds to sum ``size`` bytes, in ``calls`` calls."""
        return calls * (self.ranks - 1) * self.links.pair(2 * size / calls / self.ranks) if self.ranks > 1 else 0.0

    def gather(self, size: float, calls: float = 1) -> float:
        """Return the seconds of an all-gather to ``size`` bytes: half of an all-reduce."""
        return self.all_reduce(size, calls) / 2

    def send(self, size: float, calls: float = 1) -> float:
        """Return the seconds to send ``size`` bytes to one rank. An all-reduce of two ranks takes as long."""
        return calls * self.links.pair(size / calls) if self.ranks > 1 else 0.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """Communication of a step: seconds that prolong the step, and seconds hidden behind other work."""

    exposed: float = 0.0
    hidden: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.exposed + other.exposed, self.hidden + other.hidden)

    def __mul__(self, times: float) -> Traffic:
        return Traffic(times * self.exposed, times * self.hidden)


def beside(seconds: float, work: float, machine: Machine, *, copied: bool = False) -> Traffic:
    """Split a collective that runs concurrently with ``work`` seconds of computing. The time beyond that is exposed;
    the hidden part slows the work, less if copy engines carry it (``copied``)."""
    hidden = min(seconds, work)
    slower = machine.shares.copied if copied else machine.shares.hidden
    return Traffic(seconds - hidden + slower * hidden, hidden)
