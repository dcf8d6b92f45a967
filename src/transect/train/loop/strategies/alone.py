"""The strategy of a single rank, which has the whole model and runs every micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from ....checkpoints.load import fill
from ....models.decoder import Decoder
from ....models.stored import StoredWeights
from ....parallel.world import World
from ...config import TrainConfig
from ...data.batches import Batch
from ...model.build import Trainable
from ...optim import Optimizer

if TYPE_CHECKING:
    from ....parallel.offload.pieces import FileUpload
    from ....parallel.sharded import Sharded

LossOf = Callable[[int, Batch], Tensor]


class Alone:
    """Interface of strategies for ``Crew``; this one is for a world of one rank.

    Args:
        config: the run.
        world: its ranks.
        at: reports this rank's progress (``Crew.at``).
    """

    together = False
    """True if ranks sum their gradients, so that a nonfinite gradient is searched for in the sum."""
    writers = 1
    """Number of ranks that write a part of the state to a checkpoint."""
    wide = False
    """True if gradients have the dtype of their sums instead of the weights' dtype."""
    units: Sharded | None = None
    """Layers of a model whose weights are sharded, after ``take``."""
    upload: FileUpload | None = None
    """File that receives offloaded weights after an update; None if they go into the parameters."""

    def __init__(self, config: TrainConfig, world: World, at: Callable[[str], None]) -> None:
        self.config, self.world, self.at = config, world, at

    @property
    def folder(self) -> str:
        """Folder of this rank's data that is offloaded to a disk; empty if there is none."""
        path = self.config.parallel.offload_path
        return str(Path(path) / f"rank-{self.world.rank}") if path else ""

    def cut(self, trainable: Trainable) -> Trainable:
        """Return this rank's part of a model that all ranks have with the same weights. Raises ValueError if the model
        cannot be divided so."""
        return trainable

    def parts(self, model: Decoder) -> Sequence[Decoder]:
        """Return the parts that this rank computes: a model, or some runs of its layers."""
        return [model]

    def fill(self, model: Decoder, weights: Callable[[], StoredWeights]) -> None:
        """Load the weights of a whole model."""
        fill(model, weights())

    def take(
        self, trainable: Trainable, recompute: bool
    ) -> tuple[Mapping[str, nn.Parameter], Mapping[str, Sequence[int]]]:
        """Divide the work on the result of ``cut``, when all weights are loaded.

        Args:
            recompute: layers are computed again in the backward pass; looked at where weights are sharded.

        Returns:
            What the optimizer of this rank updates, and the shapes of all the run's parameters.
        """
        return trainable.parameters, {name: p.shape for name, p in trainable.parameters.items()}

    def connect(self, optimizer: Optimizer, trainable: Trainable) -> None:
        """Give the ranks to an optimizer that communicates itself."""

    def gradients(self, batches: Sequence[Batch], loss_of: LossOf, optimizer: Optimizer, losses: Tensor) -> Tensor:
        """Run all micro-batches of a step forward and backward, and give ``optimizer`` their gradient.

        Args:
            batches: on the device; each counts by its labels.
            loss_of: the mean loss of a micro-batch; gets its number too.
            losses: ``[micro-batches]`` float32 zeros; gets what each adds to the mean loss.

        Returns:
            The global norm of the gradient, a float32 scalar.
        """
        gather_all(batches, loss_of, optimizer, losses)
        return optimizer.gradient_norm()

    def stepped(self, optimizer: Optimizer) -> None:
        """Complete the optimizer's step: collect all ranks' updates, and drop the gradients."""
        optimizer.zero_grad()

    def snapshot(self, trainable: Trainable) -> Callable[[Path], None]:
        """Return a function that writes the present weights into a directory, to be called on the first rank only;
        every rank must call this method."""
        return trainable.snapshot()

    def state(self, optimizer: Optimizer) -> Mapping[str, Tensor]:
        """Return this rank's part of the optimizer's state, on the CPU, by the names that ``StoredTensors`` reads;
        every rank must call it. If the model is divided, the first rank has all of it."""
        return optimizer.lent()

    def own_state(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return this rank's part of a whole state, of a run on any number of ranks."""
        return tensors


def gather_all(batches: Sequence[Batch], loss_of: LossOf, optimizer: Optimizer, losses: Tensor) -> None:
    """Run micro-batches one after another on this rank; the optimizer gathers their gradients."""
    labels = sum(batch.num_labels for batch in batches)
    for index, batch in enumerate(batches):
        if batch.num_labels:
            backward(loss_of(index, batch), batch.num_labels / labels, losses[index])
            if len(batches) > 1:
                optimizer.gather()


def backward(loss: Tensor, share: float, found: Tensor) -> None:
    """Run the backward pass of a micro-batch's share of the loss, and record the share."""
    loss = loss * share
    loss.backward()  # type: ignore[no-untyped-call]
    found.copy_(loss.detach())
