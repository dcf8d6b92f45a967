"""Seconds of collectives between ranks, and the part of them that no other work hides.

Rings, n ranks, S bytes, b bytes per second and rank (Thakur, Rabenseifner, Gropp 2005, "Optimization of Collective
Communication Operations in MPICH"): an all-reduce takes 2 (n - 1) / n S / b; all-gather, reduce-scatter and all-to-all
half of that; a broadcast or a reduction to one rank S / b.
"""

from __future__ import annotations

from dataclasses import dataclass

from .machine import Machine


@dataclass(frozen=True, slots=True)
class Axis:
    """Ranks along one axis of a layout, which exchange messages."""

    machine: Machine
    ranks: int
    stride: int = 1
    """Distance between neighbours, in ranks."""

    @property
    def bandwidth(self) -> float:
        """Bytes per second of each of them."""
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
class Traffic:
    """Communication of a step: seconds that prolong the step, and seconds hidden beside other work."""

    exposed: float = 0.0
    hidden: float = 0.0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.exposed + other.exposed, self.hidden + other.hidden)

    def __mul__(self, times: float) -> Traffic:
        return Traffic(times * self.exposed, times * self.hidden)


def beside(seconds: float, work: float, machine: Machine, *, copied: bool = False) -> Traffic:
    """Split a collective that runs beside ``work`` seconds of computing. The time beyond that is exposed; the hidden
    part slows the work, less if copy engines carry it (``copied``)."""
    hidden = min(seconds, work)
    slower = machine.shares.copied if copied else machine.shares.hidden
    return Traffic(seconds - hidden + slower * hidden, hidden)
