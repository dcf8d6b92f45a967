"""The executors of ranks that have requests of their own and share experts with other ranks
(``engine/sharing.py``): ``GPUSharingRunner``, and ``GPUSharingStageRunner`` for one stage of a pipeline.

Layers with experts exchange tokens in shapes that follow from the largest step of all ranks. That size is agreed on
before a step is launched, and is part of what a graph is known by. A rank without a batch runs a step of its layers'
experts alone.
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ....models.decoder import Decoder
from ....parallel.experts import ExpertRanks, idle
from .runner import GPURunner, Sampled
from .stage_runner import GPUStageRunner
from .step_inputs import StepLayout
from .step_plan import StepPlan, Variant


class GPUSharingRunner(GPURunner):
    """Runs batches as ``GPURunner`` does, with the same arguments, in lockstep with the ranks of ``sharing``."""

    def __init__(self, model: Decoder, k_cache: Tensor, v_cache: Tensor, sharing: ExpertRanks, **options: Any) -> None:
        self._sharing = sharing
        super().__init__(model, k_cache, v_cache, **options)

    @torch.inference_mode()
    def idle(self) -> None:
        """Take part in a step without a batch."""
        size = self._sharing.meet(0)
        if not size:
            return
        plan = StepPlan(StepLayout(0, 0, 0, 0), False, [], (), Variant(), (), [])._replace(graph=True)
        with self._on_stream():
            self._launch(("idle", size), partial(idle, self._model, self._model.norm.weight), plan)

    def _run(self, plan: StepPlan, eager: bool = False) -> tuple[int | None, Tensor, Sampled]:
        self._sharing.meet(plan.layout.tokens)
        return super()._run(plan, eager)

    def _warm(self, layout: StepLayout, *arguments: Any, **options: Any) -> None:
        self._sharing.size = layout.tokens  # a graph for steps of which this rank's is the largest
        super()._warm(layout, *arguments, **options)

    def _key(self, plan: StepPlan, waits: bool) -> Hashable:
        return super()._key(plan, waits), self._sharing.size


class GPUSharingStageRunner(GPUSharingRunner, GPUStageRunner):
    """A stage whose experts are shared with the same stage of other ranks. Arguments as for ``GPUStageRunner``, and
    ``sharing``."""
