"""Time the parts of an engine's start."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

import torch


@dataclass(slots=True)
class StartupTimes:
    """Seconds by part, in order."""

    parts: dict[str, float] = field(default_factory=dict)
    _last: float = field(default_factory=time.perf_counter)

    def done(self, part: str) -> None:
        """Record the time of the part that ends now; waits for the device first."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.parts[part] = now - self._last
        self._last = now

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.parts.items())
