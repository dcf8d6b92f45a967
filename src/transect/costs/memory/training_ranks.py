"""Accounts of the ranks of a training run that is distributed over several.

The account is that of one device (``training.py``) over the part of the model that the rank has. Ranks of one stage
need the same but for a few numbers, so the first of each stage stands for all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import lru_cache

from ...spec.layouts.ranks import owners
from ...spec.layouts.refusals import refusal
from ...spec.layouts.schedule import most_kept
from ...spec.layouts.shards import Shard
from ...spec.layouts.spread import Spread
from ...spec.model import ModelConfig
from .part import RankPart
from .shared import COPY_RANKS, copies_bytes
from .terms import Estimate
from .training import training
from .training_plan import TrainingPlan, trained_shapes


@dataclass(frozen=True, slots=True)
class StageMemory:
    """One stage of a layout: the part of its first rank, and the account of that rank."""

    shard: Shard
    part: RankPart
    estimate: Estimate


def training_ranks(config: ModelConfig, plan: TrainingPlan, spread: Spread) -> list[StageMemory]:
    """Account for a rank of each stage.

    Args:
        plan: of the run; one data rank computes ``micro_batch`` tokens at a time, and all data ranks share
            ``accumulate`` of these.

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
    """Return a function for ``fit.py``: the account of the rank that needs most."""

    def of(config: ModelConfig, plan: TrainingPlan) -> Estimate:
        return max((s.estimate for s in training_ranks(config, plan, spread)), key=lambda found: found.needed)

    return of


def for_rank(plan: TrainingPlan, spread: Spread) -> TrainingPlan:
    """Return ``plan`` as carried out by a rank: sharded layers that are not one node keep all of a layer or only its
    input."""
    if spread.zero != 3 or plan.merged:
        return plan
    kept = plan.checkpointing if plan.checkpointing == "none" else "full"
    return replace(plan, whole=0, checkpointing=kept)


def part_of(config: ModelConfig, plan: TrainingPlan, spread: Spread, stage: int = 0) -> RankPart:
    """Return the part of the first rank of a stage."""
    shard, shapes = _stage(config, spread.tensor, stage, spread.pipeline, spread.data if spread.expert else 1)
    owned, sharing = None, spread.data * spread.context
    if spread.zero in (1, 2):
        trained = trained_shapes(shard.local, plan) if plan.adapted else shapes
        sizes = {name: math.prod(shape) for name, shape in trained.items()}
        owner = owners(sizes, sharing)
        held = [sum(size for name, size in sizes.items() if owner[name] == rank) for rank in range(sharing)]
        most = held.index(max(held))
        owned = frozenset(name for name in sizes if owner[name] == most)
    micro = plan.accumulate // spread.data
    return RankPart(
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
        shared=_shared(plan, spread),
        tiles=spread.tiles,
        host_state=spread.host_state,
        host_weights=spread.host_weights,
    )


def _shared(plan: TrainingPlan, spread: Spread) -> int:
    """Return the bytes in which GPUs sum gradients by copy engines, if all of them may be on one host."""
    ranks = spread.data * spread.context
    copies = spread.copies and spread.zero != 2 and not spread.host_state
    return copies_bytes(ranks) if copies and plan.backend == "gpu" and 1 < ranks <= COPY_RANKS else 0


@lru_cache(maxsize=256)
def _stage(
    config: ModelConfig, tensor: int, stage: int, stages: int, experts: int = 1
) -> tuple[Shard, dict[str, tuple[int, ...]]]:
    """Return the first rank of a stage, and its part of every weight."""
    shard = Shard(config, 0, tensor, stage, stages, 0, experts)
    return shard, {shard.own_name(name): shape for name, shape in shard.shapes().items()}


def check(config: ModelConfig, plan: TrainingPlan, spread: Spread) -> None:
    """Check that a run can be distributed so.

    Raises:
        ValueError: it cannot; the message names what can (``spec/layouts/refusals.py``).
    """
    reason = refusal(plan.run, spread, config)
    if reason is not None:
        raise ValueError(reason)
