"""One rank, which has the whole model and runs every micro-batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from torch import Tensor, nn

from ....checkpoints.load import fill
from ....models.decoder import Decoder
from ....models.stored import StoredWeights
from ....parallel.offload.pieces import FileUpload
from ....parallel.sharded import Sharded
from ....parallel.world import World
from ...config import TrainConfig
from ...data.batches import Batch
from ...model.build import Trainable
from ...optim import Optimizer

LossOf = Callable[[int, Batch], Tensor]


class Alone:
    """A strategy, as ``Crew`` asks it; this one is for a world of one rank.

    Args:
        config: the run.
        world: its ranks.
        at: reports this rank's progress (``Crew.at``).
    """

    together = False
    """Ranks sum their gradients, so a gradient that is not finite is looked for in the sum."""
    writers = 1
    """Ranks that keep a part of the state in a checkpoint."""
    wide = False
    """Gradients come in the dtype of their sums, not in that of the weights."""
    units: Sharded | None = None
    """The layers of a model whose weights are sharded, after ``take``."""
    upload: FileUpload | None = None
    """The file that offloaded weights go to after an update; None if they go into the parameters."""

    def __init__(self, config: TrainConfig, world: World, at: Callable[[str], None]) -> None:
        self.config, self.world, self.at = config, world, at

    @property
    def folder(self) -> str:
        """Folder of what this rank offloads to a disk; empty if nothing is."""
        path = self.config.parallel.offload_path
        return str(Path(path) / f"rank-{self.world.rank}") if path else ""

    def cut(self, trainable: Trainable) -> Trainable:
        """This rank's part of a model that all ranks have with the same weights. ValueError if it cannot be cut so."""
        return trainable

    def parts(self, model: Decoder) -> Sequence[Decoder]:
        """Return the parts that this rank computes: a model, or some runs of its layers."""
        return [model]

    def fill(self, model: Decoder, weights: Callable[[], StoredWeights]) -> None:
        """Take the weights of a whole model."""
        fill(model, weights())

    def take(
        self, trainable: Trainable, recompute: bool
    ) -> tuple[Mapping[str, nn.Parameter], Mapping[str, Sequence[int]]]:
        """Share the work on what ``cut`` gave, when all weights are there.

        Args:
            recompute: layers are computed again in the backward pass; looked at where weights are sharded.

        Returns:
            What the optimizer of this rank updates, and the shapes of all the run's parameters.
        """
        return trainable.parameters, {name: p.shape for name, p in trainable.parameters.items()}

    def connect(self, optimizer: Optimizer, trainable: Trainable) -> None:
        """Tell an optimizer that exchanges things itself with whom."""

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
        """After the optimizer's step: have everybody's updates, and forget the gradients."""
        optimizer.zero_grad()

    def snapshot(self, trainable: Trainable) -> Callable[[Path], None]:
        """A function that writes the weights of now into a directory, of use on the first rank alone; every
        rank must call it."""
        return trainable.snapshot()

    def state(self, optimizer: Optimizer) -> Mapping[str, Tensor]:
        """This rank's part of the optimizer's state, on the CPU, by the names that ``StoredTensors`` reads; every rank
        must call it. Where the model is cut the first rank has all of it."""
        return optimizer.lent()

    def own_state(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """This rank's part of a whole state, of a run on however many ranks."""
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
    """Run the backward pass of a micro-batch's share of the loss, and note the share."""
    loss = loss * share
    loss.backward()  # type: ignore[no-untyped-call]
    found.copy_(loss.detach())
