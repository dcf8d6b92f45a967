"""Common parts of all strategies of several ranks: a ``Parallel``, and sums of gradients over ranks."""

from __future__ import annotations

import gc
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from ....models.decoder import Decoder
from ....models.stored import StoredWeights
from ....parallel.mesh import Mesh
from ....parallel.parallelize import Parallel, parallelize
from ....parallel.plan import ParallelPlan
from ....parallel.replicas import GradientReplicas
from ....parallel.sharded import Sharded
from ....parallel.world import World
from ...config import TrainConfig
from ...data.batches import Batch
from ...model.build import Trainable
from ...optim import Optimizer
from ...optim.onebit import OneBitAdam
from .alone import Alone, LossOf

REDUCE = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Together(Alone):
    """A strategy of several ranks. A subclass sums the gradients (``_sums``)."""

    together = True
    parallel: Parallel
    """Model on the ranks, from ``cut`` on."""

    def __init__(self, config: TrainConfig, world: World, at: Callable[[str], None]) -> None:
        super().__init__(config, world, at)
        self.mesh = Mesh(world, config.parallel.layout)

    @property
    def spread(self) -> GradientReplicas | Sharded | None:
        """Sums over ranks with the same weights, after ``take``; None if no other rank has them."""
        return self.parallel.spread

    @property
    def _writer(self) -> GradientReplicas | Sharded | None:
        """Ranks that write their part of the state to a checkpoint; None if the first one writes all of it."""
        return None if self.parallel.cut else self.spread

    @property
    def writers(self) -> int:  # type: ignore[override]
        """Number of ranks that write a part of the state to a checkpoint."""
        return 1 if self._writer is None else self._writer.group.size

    @property
    def wide(self) -> bool:  # type: ignore[override]
        """True if gradients have the dtype of their sums."""
        return self.spread is not None and self.spread.group.size > 1

    def cut(self, trainable: Trainable) -> Trainable:
        """Return this rank's part of the model; see ``Alone.cut``."""
        parallel = self.config.parallel
        plan = ParallelPlan(
            zero=3 if parallel.sharded else parallel.zero,
            reduce_dtype=REDUCE[parallel.reduce],
            sequence=parallel.sequence,
            schedule=parallel.schedule,
            chunks=parallel.runs,
            expert_way=parallel.expert_way,
            host=parallel.offload == "all",
            copies=parallel.sums != "nccl" and parallel.offload == "none",
            fused=parallel.sums == "fused",
            folder=self.folder,
            tiles=parallel.tiles,
            device=trainable.device,
        )
        trainable.moment.slice = self.mesh.place.context
        found = self.parallel = parallelize(trainable.model, self.mesh, plan, trainable.weights)
        return replace(trainable, model=found.model, parameters=found.parameters, parallel=found, weights=None)

    def parts(self, model: Decoder) -> Sequence[Decoder]:
        """Return the parts that this rank computes; see ``Alone.parts``."""
        return self.parallel.parts

    def fill(self, model: Decoder, weights: Callable[[], StoredWeights]) -> None:
        """Load the weights; see ``Alone.fill``."""
        self.parallel.fill(weights)

    def take(
        self, trainable: Trainable, recompute: bool
    ) -> tuple[Mapping[str, nn.Parameter], Mapping[str, Sequence[int]]]:
        """Divide the work; see ``Alone.take``."""
        shapes: Mapping[str, Sequence[int]] = {name: p.shape for name, p in trainable.parameters.items()}
        if self.parallel.cut:  # also where several ranks have one parameter
            shapes = self.parallel.shapes
            gc.collect()  # the whole model, which is in a cycle with its stack, would stay for many steps
        own = self.parallel.share(trainable.parameters, recompute)
        self.world.exchange(None)  # a rank that has no room for its part fails before others wait for it
        return own, shapes

    def connect(self, optimizer: Optimizer, trainable: Trainable) -> None:
        """Connect a 1-bit optimizer to the ranks; see ``Alone.connect``."""
        if isinstance(optimizer, OneBitAdam):
            optimizer.connect(self.mesh.replicas, trainable.parameters)

    def gradients(self, batches: Sequence[Batch], loss_of: LossOf, optimizer: Optimizer, losses: Tensor) -> Tensor:
        """Run a step's micro-batches; see ``Alone.gradients``."""
        own = optimizer if isinstance(optimizer, OneBitAdam) and optimizer.compresses else None
        gradients = self._sums(batches, loss_of, optimizer, losses, own is not None)
        if own is not None:  # their sum is the optimizer's business
            own.give(gradients)
            return own.norm_of(gradients)
        self.parallel.complete(gradients)
        optimizer.give(gradients)
        return self._norm(optimizer, gradients)

    def _sums(
        self, batches: Sequence[Batch], loss_of: LossOf, optimizer: Optimizer, losses: Tensor, own: bool
    ) -> dict[str, Tensor]:
        """Run this rank's micro-batches of a step, and sum all ranks' gradients; ``own``: this rank's gradients."""
        raise NotImplementedError

    def _norm(self, optimizer: Optimizer, gradients: Mapping[str, Tensor]) -> Tensor:
        """Return the norm of the gradients given to ``optimizer``. If every rank has the whole sum of each, and sums
        are fused, the norm was computed with them, or is computed as on one rank."""
        parallel = self.parallel
        if not parallel.plan.fused or parallel.plan.zero or parallel.mesh.parts.size > 1 or parallel.shares_experts:
            return parallel.norm(gradients)
        square = self.spread.square if isinstance(self.spread, GradientReplicas) else None
        return optimizer.gradient_norm() if square is None else square.sqrt()

    def stepped(self, optimizer: Optimizer) -> None:
        """Complete the optimizer's step; see ``Alone.stepped``."""
        optimizer.zero_grad()
        if self.spread is not None:
            self.spread.share()
            self.spread.clear()

    def snapshot(self, trainable: Trainable) -> Callable[[Path], None]:
        """Return a function that writes the weights; see ``Alone.snapshot``."""
        if self.spread is None and not self.parallel.cut:
            return trainable.snapshot()
        weights = self.parallel.weights()
        if weights is not None:
            return trainable.snapshot(weights)
        return trainable.snapshot() if self.world.rank == 0 else lambda directory: None

    def state(self, optimizer: Optimizer) -> Mapping[str, Tensor]:
        """Return this rank's part of the state; see ``Alone.state``."""
        writer = self._writer
        if writer is None:
            return self.parallel.whole_state(optimizer.state_tensors())
        return {writer.stored_name(name): part for name, part in optimizer.lent(writer.writes).items()}

    def own_state(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return this rank's part of a whole state; see ``Alone.own_state``."""
        return self.parallel.own_state(tensors)
