"""The best checkpoint of a run by its validation loss, and early stopping."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(slots=True)
class Best:
    """Record of a run's evaluations.

    ``loss`` and ``step`` belong to the best evaluation (step 0: none yet); ``since`` counts the evaluations after it.
    """

    loss: float = float("inf")
    step: int = 0
    since: int = 0

    def see(self, loss: float, step: int, min_gain: float) -> bool:
        """Record an evaluation. Returns True if it is the best so far, by more than ``min_gain``."""
        if step == self.step:  # measured again after the run was taken up at it
            return False
        if loss < self.loss - min_gain:
            self.loss, self.step, self.since = loss, step, 0
            return True
        self.since += 1
        return False

    def state(self) -> dict[str, Any]:
        """Return plain values for a checkpoint."""
        return {} if not self.step else asdict(self)

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Best:
        """Rebuild the record from ``state``."""
        return cls(**state)
