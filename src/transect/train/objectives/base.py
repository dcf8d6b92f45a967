"""Define the interface between the training loop and an objective."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from ..data.batches import Batch
from ..data.loader import Position
from .share import WHOLE, RolloutShare, Sums


class StepFailed(ValueError):
    """A step cannot begin, because an external part failed (a reward function, say). The run's state is unchanged, so
    it can be saved and resumed."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """A measurement on validation data.

    Attributes:
        loss: mean over ``labels``; lower is better.
        bytes: bytes of text that the labels spell; 0: not known.
        extra: further numbers, such as a reward.
    """

    loss: float
    labels: int
    bytes: int = 0
    extra: Mapping[str, float] = field(default_factory=dict)


class Objective:
    """Makes the micro-batches of each step, and their loss.

    ``position`` is where in its data it is; setting it to what it was, and giving ``state`` back, makes the same
    batches again.
    """

    position: Position
    outside = False
    """True if micro-batches come from sources that can fail on one rank alone during a run, such as files."""

    def described(self) -> Sequence[str]:
        """Describe the data read from each file, for the start of a run."""
        raise NotImplementedError

    def batches(self, step: int) -> Sequence[Batch]:
        """Return the micro-batches of ``step`` (from 0), on the host. A micro-batch is weighted by its ``num_labels``.

        Raises:
            StepFailed: they cannot be made; the position is what it was.
        """
        raise NotImplementedError

    def loss(self, batch: Batch) -> Tensor:
        """Compute the mean loss over the labels of a micro-batch on the model's device. A loss without a gradient is
        not part of the step, and ``metrics`` does not count it."""
        raise NotImplementedError

    def metrics(self) -> Sums:
        """Return further numbers of the last step's micro-batches that this rank has computed, for the log, which shows
        their means over all ranks."""
        return {}

    def evaluate(self, share: RolloutShare = WHOLE) -> Evaluation | None:
        """Evaluate on validation data; None without data. ``share``: this rank's part; all ranks call it."""
        raise NotImplementedError

    def micro_batches(self, epoch: int) -> int:
        """Return the number of micro-batches in an epoch."""
        raise ValueError("epochs are not known for this data: set steps")

    def steps_of(self, epochs: float, accumulate: int) -> int:
        """Return the number of optimizer steps in ``epochs`` epochs, counting a last one that is only begun."""
        whole = int(epochs)
        count = float(sum(self.micro_batches(epoch) for epoch in range(whole)))
        if epochs > whole:
            count += (epochs - whole) * self.micro_batches(whole)
        return max(1, math.ceil(round(count, 6) / accumulate))

    def identity(self) -> dict[str, str]:
        """Return digests by part (``data/identity.py``): if they are equal, equal positions mean equal batches."""
        raise NotImplementedError

    def state(self) -> Mapping[str, Tensor]:
        """Return the state that the next steps need beside the position, as tensors on the CPU.

        An example: answers drawn before the last step. The tensors are copies that later steps do not change.
        """
        return {}

    def load_state(self, tensors: Mapping[str, Tensor]) -> None:
        """Restore the result of ``state``. Raises ValueError for a state of another objective."""
        if tensors:
            raise ValueError("the checkpoint holds the state of another objective")
