"""What the training loop asks of an objective."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

from ..batches import Batch
from ..data import Position


class Objective(Protocol):
    """Makes the micro-batches of each step, and their loss.

    ``position`` is where in its data it is; setting it to what it was makes the same batches again.
    """

    position: Position

    def described(self) -> Sequence[str]:
        """What was read from each file, for the start of a run."""
        ...

    def batches(self, step: int) -> Sequence[Batch]:
        """The micro-batches of ``step`` (from 0), on the host. A micro-batch counts by its ``num_labels``."""
        ...

    def loss(self, batch: Batch) -> Tensor:
        """Mean loss over the labels of a micro-batch that is on the model's device."""
        ...

    def metrics(self) -> Mapping[str, float]:
        """Further numbers of the last step, for the log."""
        ...

    def evaluate(self) -> tuple[float, int, int] | None:
        """Validation: mean loss, number of labels, and bytes of text that these are (0: unknown); None without data."""
        ...

    def identity(self) -> dict[str, str]:
        """Digests by part (``identity.py``): where they are the same, the same position means the same batches."""
        ...
