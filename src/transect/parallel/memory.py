"""What each rank of a layout needs to serve a model, and the smallest layout in which it fits. Plain arithmetic, no
torch.

Ranks that differ by their tokens of the vocabulary alone need the same but for a few rows, so of each stage the first
rank stands for all.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..models.config import ModelConfig
from ..models.cost import weight_bytes
from ..models.memory.serving import ServingEstimate, ServingPlan, serving
from ..models.storage import Storage
from .layout import Layout
from .shards import Shard

MOST_RANKS = 64


@dataclass(frozen=True, slots=True)
class StageEstimate:
    """One stage of a layout: what its first rank has, and needs."""

    shard: Shard
    estimate: ServingEstimate


def stages(
    config: ModelConfig, layout: Layout, plan: ServingPlan, storage: Storage, budget: int | None
) -> list[StageEstimate]:
    """The account of a rank of each stage.

    Args:
        plan: of the whole model; its ``weights`` are shared out as ``storage`` says.
        budget: bytes of one device that are free.

    Raises:
        ValueError: the model cannot be cut so.
    """
    whole = weight_bytes(config, storage)
    found = []
    for stage in range(layout.pipeline):
        sharing = layout.tensor * layout.data if layout.expert else 1
        shard = Shard(config, 0, layout.tensor, stage, layout.pipeline, 0, sharing)
        share = weight_bytes(config, storage, shard.shapes()) / whole
        found.append(
            StageEstimate(shard, serving(shard.local, replace(plan, weights=int(plan.weights * share)), budget))
        )
    return found


def smallest_sharing(
    config: ModelConfig, plan: ServingPlan, storage: Storage, budget: int, most: int = MOST_RANKS
) -> Layout | None:
    """The layout with the fewest ranks that share the experts, and of these with the fewest that cut the rest, in which
    every rank fits."""
    for ranks in range(2, most + 1):
        for tensor in (n for n in range(1, ranks + 1) if ranks % n == 0):
            layout = Layout(tensor, 1, ranks // tensor, True)
            try:
                found = stages(config, layout, plan, storage, budget)
            except ValueError:  # it cannot be cut so
                continue
            if all(stage.estimate.fits for stage in found):
                return layout
    return None


def smallest_layout(
    config: ModelConfig, plan: ServingPlan, storage: Storage, budget: int, most: int = MOST_RANKS
) -> Layout | None:
    """The layout with the fewest ranks, and of these with the fewest stages, in which every rank fits."""
    for ranks in range(1, most + 1):
        for pipeline in (n for n in range(1, ranks + 1) if ranks % n == 0):
            layout = Layout(ranks // pipeline, pipeline)
            try:
                found = stages(config, layout, plan, storage, budget)
            except ValueError:  # it cannot be cut so
                continue
            if all(stage.estimate.fits for stage in found):
                return layout
    return None
