"""What each rank needs to train a model that is spread over several. Plain arithmetic, no torch.

The account is that of one device (``models/memory/training.py``) over the part of the model that the rank has. Ranks of
one stage need the same but for a few numbers, so the first of each stage stands for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from ..models.config import ModelConfig
from ..models.memory.part import Part
from ..models.memory.terms import Estimate
from ..models.memory.training import training
from ..models.memory.training_plan import TrainingPlan, trained_shapes
from .layout import check_shares, owners
from .schedule import Name, most_kept, schedule
from .shards import Shard


@dataclass(frozen=True, slots=True, kw_only=True)
class Spread:
    """How a run is spread. The sizes of the axes multiply to the number of ranks.

    Attributes:
        data: ranks that compute other micro-batches.
        zero: what is cut over ``data`` and ``context`` ranks, which have the same weights; see ``replicas.py``.
        tensor: ranks that share each layer. sequence: they share the tokens of norms too.
        pipeline: stages of layers.
        schedule, chunks: how micro-batches pass through them, see ``schedule.py``.
        context: ranks that share the tokens of a sequence.
        reduce: bytes of a number while gradients are summed: 4 or 2.
        host_state: master weights and the optimizer's state are in the memory of the host. host_weights: the weights
            too, with zero 3, on one rank or several.

    Raises:
        ValueError: a size is not at least 1, or settings exclude each other.
    """

    data: int = 1
    zero: int = 0
    tensor: int = 1
    sequence: bool = False
    pipeline: int = 1
    schedule: Name = "1f1b"
    chunks: int = 1
    context: int = 1
    reduce: int = 4
    host_state: bool = False
    host_weights: bool = False

    def __post_init__(self) -> None:
        for name in ("data", "tensor", "pipeline", "context"):
            if getattr(self, name) < 1:
                raise ValueError(f"parallel.{name} must be at least 1, not {getattr(self, name)}")
        if self.zero not in (0, 1, 2, 3):
            raise ValueError(f"parallel.zero is 0, 1, 2 or 3, not {self.zero}")
        if self.zero and self.data == 1 and not (self.zero == 3 and self.host_weights):
            raise ValueError(f"parallel.zero = {self.zero} cuts over several ranks: set parallel.data to 2 or more")
        if self.sequence and self.tensor == 1:
            raise ValueError("sequence parallelism is between tensor ranks: set parallel.tensor to 2 or more")

    @property
    def ranks(self) -> int:
        """All of them."""
        return self.data * self.tensor * self.pipeline * self.context

    @property
    def settings(self) -> str:
        """The settings that differ from one device, as the file of a run names them."""
        sizes = ("data", "zero", "tensor", "pipeline", "context")
        found = [f"{name} = {getattr(self, name)}" for name in sizes if getattr(self, name) > (name != "zero")]
        found = [each for each in found if self.data > 1 or not each.startswith("zero")]
        found += ["sequence = true"] if self.sequence else []
        found += ['reduce = "bfloat16"'] if self.reduce == 2 and self.data * self.context > 1 else []
        found += [f'offload = "{"all" if self.host_weights else "optimizer"}"'] if self.host_state else []
        return ", ".join(found)

    def __str__(self) -> str:
        names = (("dp", self.data), ("tp", self.tensor), ("pp", self.pipeline), ("cp", self.context))
        found = [f"{name} {size}" for name, size in names if size > 1] or ["one device"]
        found += [f"zero {self.zero}"] if self.zero else []
        found += ["sp"] if self.sequence else []
        return ", ".join([*found, *(["states on the host"] if self.host_state else [])])


@dataclass(frozen=True, slots=True)
class StageMemory:
    """One stage: what its first rank has, and needs."""

    shard: Shard
    part: Part
    estimate: Estimate


def training_ranks(config: ModelConfig, plan: TrainingPlan, spread: Spread) -> list[StageMemory]:
    """The account of a rank of each stage.

    Args:
        plan: of the run; ``micro_batch`` is what one data rank computes at a time, and all share ``accumulate`` of
            them.

    Raises:
        ValueError: the model or the step cannot be cut so.
    """
    check(config, plan, spread)
    plan = for_rank(plan, spread)
    found = []
    for stage in range(spread.pipeline):
        part = part_of(config, plan, spread, stage)
        shard = Shard(config, 0, spread.tensor, stage, spread.pipeline)
        found.append(StageMemory(shard, part, training(part.config, plan, part)))
    return found


def estimator(spread: Spread) -> Callable[[ModelConfig, TrainingPlan], Estimate]:
    """What ``models.memory.fit`` asks: the account of the rank that needs most."""

    def of(config: ModelConfig, plan: TrainingPlan) -> Estimate:
        return max((s.estimate for s in training_ranks(config, plan, spread)), key=lambda found: found.needed)

    return of


def for_rank(plan: TrainingPlan, spread: Spread) -> TrainingPlan:
    """``plan`` as a rank carries it out: sharded layers that are not one node keep all of a layer or its input
    alone."""
    if spread.zero != 3 or plan.merged:
        return plan
    kept = plan.checkpointing if plan.checkpointing == "none" else "full"
    return replace(plan, whole=0, checkpointing=kept)


def part_of(config: ModelConfig, plan: TrainingPlan, spread: Spread, stage: int = 0) -> Part:
    """What the first rank of a stage has."""
    shard, shapes = _stage(config, spread.tensor, stage, spread.pipeline)
    owned, sharing = None, spread.data * spread.context
    if spread.zero in (1, 2):
        trained = trained_shapes(shard.local, plan) if plan.adapted else shapes
        sizes = {name: math.prod(shape) for name, shape in trained.items()}
        owner = owners(sizes, sharing)
        held = [sum(size for name, size in sizes.items() if owner[name] == rank) for rank in range(sharing)]
        most = held.index(max(held))
        owned = frozenset(name for name in sizes if owner[name] == most)
    micro = plan.accumulate // spread.data
    return Part(
        config=shard.local,
        shapes=shapes,
        last=shard.last,
        vocabulary=len(range(config.vocab_size)[shard.vocabulary]),
        tensor=spread.tensor,
        sequence=spread.sequence,
        context=spread.context,
        in_flight=most_kept(spread.schedule, stage, spread.pipeline, micro, spread.chunks) / spread.chunks,
        data=spread.data,
        zero=spread.zero,
        reduce=spread.reduce,
        owned=owned,
        host_state=spread.host_state,
        host_weights=spread.host_weights,
    )


@lru_cache(maxsize=256)
def _stage(config: ModelConfig, tensor: int, stage: int, stages: int) -> tuple[Shard, dict[str, tuple[int, ...]]]:
    """The first rank of a stage, and its part of every weight."""
    shard = Shard(config, 0, tensor, stage, stages)
    return shard, {shard.own_name(name): shape for name, shape in shard.shapes().items()}


def check(config: ModelConfig, plan: TrainingPlan, spread: Spread) -> None:
    """See that a run can be spread so.

    Raises:
        ValueError: it cannot; the message names what can.
    """
    check_shares(plan.accumulate, spread.data)
    Shard(config, 0, spread.tensor, 0, spread.pipeline)
    if spread.schedule == "interleaved":
        schedule(spread.schedule, spread.pipeline, plan.accumulate // spread.data, spread.chunks)
    if spread.tensor > 1 or spread.pipeline > 1:
        axis = "tensor" if spread.tensor > 1 else "pipeline"
        if plan.adapted:
            raise ValueError(
                f"parallel.{axis} is for runs that train all weights: set it to 1 for adapters, and parallel.data to "
                "the number of ranks"
            )
        if plan.optimizer != "adamw":
            raise ValueError(
                f'parallel.{axis} updates parts of matrices, which optimizer.name = "{plan.optimizer}" cannot: set it '
                'to 1, or optimizer.name to "adamw"'
            )
    if spread.zero == 3 and plan.adapted:
        raise ValueError("parallel.zero = 3 is for runs that train all weights: set parallel.zero to 2 for adapters")
    if spread.zero == 3 and plan.optimizer != "adamw":
        raise ValueError(
            f'parallel.zero = 3 updates pieces of matrices, which optimizer.name = "{plan.optimizer}" cannot: set '
            'parallel.zero to 2, or optimizer.name to "adamw"'
        )
