"""What each rank of a layout needs to serve a model, and the smallest layout in which it fits. Plain arithmetic, no
torch.

Ranks that differ by their tokens of the vocabulary alone need the same but for a few rows, so of each stage the first
rank stands for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace

from ..models.cost import weight_bytes
from ..models.memory.serving import ServingEstimate, ServingPlan, serving
from ..models.storage import Storage
from ..models.streaming.plan import StreamPlan
from ..ops.comm.lines import MOST_BYTES, lines_for, memory_bytes
from ..spec.layouts.ranks import RankLayout
from ..spec.layouts.shards import Shard, vocabulary_share
from ..spec.model import ModelConfig

MOST_RANKS = 64
Streams = Callable[[Mapping[str, tuple[int, ...]]], StreamPlan | None]


@dataclass(frozen=True, slots=True)
class StageEstimate:
    """One stage of a layout: what its first rank has, and needs."""

    shard: Shard
    estimate: ServingEstimate
    stream: StreamPlan | None = None


def stages(
    config: ModelConfig,
    layout: RankLayout,
    plan: ServingPlan,
    storage: Storage,
    budget: int | None,
    streams: Streams = lambda shapes: None,
) -> list[StageEstimate]:
    """The account of a rank of each stage.

    Args:
        plan: of the whole model; its ``weights`` are shared out as ``storage`` says.
        budget: bytes of one device that are free.
        streams: the layers that stream of a rank with these shapes of weights.

    Raises:
        ValueError: the model cannot be cut so.
    """
    whole = weight_bytes(config, storage)
    shared = shared_bytes(config.vocab_size, layout.tensor, plan)
    found = []
    for stage in range(layout.pipeline):
        sharing = layout.tensor * layout.data if layout.expert else 1
        shard = Shard(config, 0, layout.tensor, stage, layout.pipeline, 0, sharing)
        shapes = shard.shapes()
        share = weight_bytes(config, storage, shapes) / whole
        own = replace(plan, weights=int(plan.weights * share), stream=streams(shapes), shared=shared)
        found.append(StageEstimate(shard, serving(shard.local, own, budget), own.stream))
    return found


def shared_bytes(vocab: int, tensor: int, plan: ServingPlan) -> int:
    """What a GPU shares with the others of its tensor group: memory for sums, and its logits."""
    if tensor == 1 or plan.backend != "gpu":
        return 0
    logits = plan.max_num_seqs * vocabulary_share(vocab, tensor) * plan.element
    return memory_bytes(lines_for(tensor, MOST_BYTES)) + logits


def smallest_sharing(
    config: ModelConfig, plan: ServingPlan, storage: Storage, budget: int, most: int = MOST_RANKS
) -> RankLayout | None:
    """The layout with the fewest ranks that share the experts, and of these with the fewest that cut the rest, in which
    every rank fits."""
    for ranks in range(2, most + 1):
        for tensor in (n for n in range(1, ranks + 1) if ranks % n == 0):
            layout = RankLayout(tensor, 1, ranks // tensor, True)
            try:
                found = stages(config, layout, plan, storage, budget)
            except ValueError:  # it cannot be cut so
                continue
            if all(stage.estimate.fits for stage in found):
                return layout
    return None


def smallest_layout(
    config: ModelConfig, plan: ServingPlan, storage: Storage, budget: int, most: int = MOST_RANKS
) -> RankLayout | None:
    """The layout with the fewest ranks, and of these with the fewest stages, in which every rank fits."""
    for ranks in range(1, most + 1):
        for pipeline in (n for n in range(1, ranks + 1) if ranks % n == 0):
            layout = RankLayout(ranks // pipeline, pipeline)
            try:
                found = stages(config, layout, plan, storage, budget)
            except ValueError:  # it cannot be cut so
                continue
            if all(stage.estimate.fits for stage in found):
                return layout
    return None
