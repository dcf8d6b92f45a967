"""A layout as plain values for drawings: the ranks with their coordinates, the layers of each stage, the schedule."""

from __future__ import annotations

from typing import Any

from .ranks import RankLayout, share
from .schedule import schedule, simulate
from .spread import Spread

MOST_RANKS = 1024
"""Ranks that are described."""


def layout_picture(spread: Spread, n_layers: int, micro_batches: int) -> dict[str, Any]:
    """Describe a layout.

    Args:
        n_layers: layers of the model.
        micro_batches: of a step, for each group of stages.
    """
    layout = RankLayout(spread.tensor, spread.pipeline, spread.data, spread.expert, spread.context)
    places = [{"rank": rank, **layout.place(rank)._asdict()} for rank in range(min(layout.size, MOST_RANKS))]
    chunks = spread.chunks
    parts = [share(n_layers, part, spread.pipeline * chunks) for part in range(spread.pipeline * chunks)]
    layers = [
        sum(part.stop - part.start for part in parts[stage :: spread.pipeline]) for stage in range(spread.pipeline)
    ]
    return {
        "sizes": {
            "data": spread.data, "pipeline": spread.pipeline, "context": spread.context, "tensor": spread.tensor,
        },
        "words": str(spread),
        "notes": _notes(spread),
        "ranks": places,
        "layers": layers,
        "schedule": _timeline(spread, micro_batches) if spread.pipeline > 1 else None,
    }  # fmt: skip


def _notes(spread: Spread) -> list[str]:
    """Return sentences on what is cut or kept elsewhere."""
    cut = {
        1: "the optimizer's state",
        2: "the optimizer's state and gradients",
        3: "weights, gradients and optimizer's state",
    }
    found = [f"Replicas share {cut[spread.zero]}: each has a part."] if spread.zero and spread.data > 1 else []
    found += ["Replicas share the experts."] if spread.expert else []
    found += ["Tensor ranks share the tokens of norms too."] if spread.sequence else []
    if spread.host_state:
        found.append(f"{'Weights and optimizer' if spread.host_weights else 'Optimizer'} state is in host memory.")
    return found


def _timeline(spread: Spread, micro_batches: int) -> dict[str, Any] | None:
    """Return the schedule in time, a forward pass of a stage as the unit; None if the step cannot be scheduled."""
    try:
        actions = schedule(spread.schedule, spread.pipeline, micro_batches, spread.chunks)
    except ValueError:
        return None
    times = simulate(actions, 1 / spread.chunks, 2 / spread.chunks)
    return {"name": spread.schedule, **times.to_dict()}
