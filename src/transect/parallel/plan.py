"""``ParallelPlan``: how a training run is to use the ranks of a mesh, whose sizes are its ``RankLayout``."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..spec.layouts.ranks import RankLayout
from ..spec.layouts.spread import Spread
from .experts import Way


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelPlan:
    """Plan for training a model on the ranks of a mesh. Fields that ``Spread`` has too mean the same.

    Attributes:
        reduce_dtype: data type in which gradients are summed over ranks.
        expert_way: collective that brings tokens to shared experts, see ``experts.py``.
        host: with ``zero`` 3, weights are in host memory and on the device a layer at a time; ``zero`` 3 may then be on
            one rank.
        folder: with ``host``, a folder on a disk: the weights are in files there.
        device: device that computes; None for the model's own.
    """

    zero: int = 0
    reduce_dtype: torch.dtype = torch.float32
    sequence: bool = False
    schedule: str = "1f1b"
    chunks: int = 1
    expert_way: Way = "auto"
    host: bool = False
    copies: bool = True
    fused: bool = False
    folder: str = ""
    tiles: int = 1
    device: torch.device | None = None


def spread_of(layout: RankLayout, plan: ParallelPlan) -> Spread:
    """Return a layout and a plan as one."""
    return Spread(
        data=layout.data,
        zero=plan.zero,
        tensor=layout.tensor,
        sequence=plan.sequence,
        pipeline=layout.pipeline,
        schedule=plan.schedule,
        chunks=plan.chunks,
        context=layout.context,
        expert=layout.expert,
        host_state=plan.host,
        host_weights=plan.host,
        tiles=plan.tiles,
    )
