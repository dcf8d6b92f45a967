"""Slowdown of a device by its own recent work.

A GPU that computes much draws more power, and lowers its clock for some tens of milliseconds. On an H200 a step that
only decodes takes 6% longer right after prompts than 20 steps later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

MEMORY_S = 0.04
"""Time constant in which the clock follows the work, fitted to an H200 (0.03 to 0.05 s are as good)."""


@dataclass(frozen=True, slots=True)
class Slowdown:
    """The effect of a device's work on its steps.

    Attributes:
        gain: share by which steps take longer after full work.
        full: tokens per second of full work.
    """

    gain: float
    full: float


class Warmth:
    """Recent work of one device: a mean over time, which fades."""

    __slots__ = ("_at", "_level", "_warming")

    def __init__(self, warming: Slowdown) -> None:
        self._warming, self._level, self._at = warming, 0.0, 0.0

    def step(self, tokens: int, began: float, seconds: float) -> float:
        """Add a step that would take ``seconds`` on an idle device. Returns the seconds that it takes."""
        taken = seconds * (1 + self._warming.gain * self.before(began))
        self.worked(tokens, began, taken)
        return taken

    def before(self, now: float) -> float:
        """Return the share of full work, as it has faded by ``now``."""
        if now > self._at:
            self._level *= math.exp((self._at - now) / MEMORY_S)
            self._at = now
        return self._level

    def worked(self, tokens: int, began: float, seconds: float) -> None:
        """Add a step that took ``seconds``."""
        level, fades = self.before(began), math.exp(-seconds / MEMORY_S)
        self._level = level * fades + min(1.0, tokens / (seconds * self._warming.full)) * (1 - fades)
        self._at = began + seconds
