"""Define two clocks: the real one, and a virtual one that only its owner advances."""

from __future__ import annotations

import time


class WallClock:
    """Seconds of the machine's monotonic clock, which on Linux is the same for all processes of a machine."""

    def now(self) -> float:
        return time.monotonic()


class VirtualClock:
    """A clock for tests and simulations. ``time`` (seconds) starts at 0 and moves only by ``advance``."""

    def __init__(self) -> None:
        self.time = 0.0

    def now(self) -> float:
        return self.time

    def advance(self, seconds: float) -> None:
        """Move forward by ``seconds`` (at least 0)."""
        if seconds < 0:
            raise ValueError(f"a clock never goes back, got {seconds} seconds")
        self.time += seconds
