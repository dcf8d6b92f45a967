"""``GPUStageRunner``: the executor of one stage of a pipeline on a GPU. ``engine/executors/stage_runner.py`` has the
idea.

Hidden states come from the stage before into one place on the device, the layers (a CUDA graph, where the step has one)
read them there and leave theirs in another, and from there they go to the stage after. Both ways are NCCL's, on the
stream of the steps and outside of graphs: a stage's device waits for hidden states, its host does not. The last stage
draws on its device as ever; its host tells the drawn tokens to the other stages when it hands them to its own
scheduler.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ....models.decoder import Decoder
from ....ops.position.embed_tokens import placed
from ....parallel.mesh import Mesh
from ...scheduling.batch import Handle, ScheduledBatch, StepResult
from ..runner import copy_blocks
from ..stage_runner import Elsewhere
from .runner import GPURunner, Sampled
from .step_plan import StepPlan, Variant


@dataclass(slots=True)
class _Telling:
    """The handle of a step whose draws the last stage makes."""

    inner: Handle
    mesh: Mesh
    step: int
    _result: StepResult | None = None

    def draw(self) -> None:
        """Launch the draws."""
        self.inner.draw()

    def result(self) -> StepResult:
        """Return the drawn tokens, after sending them to the other stages."""
        if self._result is None:
            self._result = self.inner.result()
            for rank in self.mesh.pipeline.ranks[:-1]:
                self.mesh.world.send(self._result, rank, tag=self.step)
        return self._result


class GPUStageRunner(GPURunner):
    """Runs this stage's part of every batch. Arguments as for ``GPURunner``; ``model`` and caches are those of this
    stage's layers."""

    def __init__(self, model: Decoder, k_cache: Tensor, v_cache: Tensor, mesh: Mesh, **options: Any) -> None:
        self._mesh, group = mesh, mesh.pipeline
        super().__init__(model, k_cache, v_cache, stages=group.size, **options)
        self._planner.feeds = False
        self._first, self._last = group.rank == 0, group.rank == group.size - 1
        like = model.norm.weight
        self._incoming, self._outgoing = (
            torch.zeros(self._most_tokens if there else 0, model.config.dim, dtype=like.dtype, device=like.device)
            for there in (not self._first, not self._last)
        )

    @torch.inference_mode()
    def submit(self, batch: ScheduledBatch) -> Handle:
        """Start this stage's part of a step; the last stage draws."""
        if self._last:
            return _Telling(super().submit(batch), self._mesh, batch.step)
        with self._on_stream():
            memory = self._ring.memory()
            copy_blocks(self._k_cache, self._v_cache, batch.block_copies)
            plan = self._planner.plan(batch, memory)
            turn, _, _ = self._run(plan._replace(variant=Variant()))
            assert turn is not None
            self._ring.results(turn, self._stream)
        return Elsewhere(self._mesh, batch.step, self._mesh.pipeline.ranks[-1])

    def _run(self, plan: StepPlan, eager: bool = False) -> tuple[int | None, Tensor, Sampled]:
        group, tokens = self._mesh.pipeline, plan.layout.tokens
        if not self._first:
            group.receive(self._incoming[:tokens], group.rank - 1)
        found = super()._run(plan, eager)
        if not self._last and (work := group.send(self._outgoing[:tokens], group.rank + 1)) is not None:
            work.wait()  # on the stream: the next step may not write there before
        return found

    def _hidden(self, plan: StepPlan, context: Any) -> Tensor:
        model, fields = self._model, self._fields(plan.layout)
        if self._first:
            x_TD = model.begin(placed(self._arena.view(torch.int64), fields.source), fields.position)
        else:
            x_TD = self._incoming[: plan.layout.tokens]
        x_TD = model.stack(x_TD, fields.position, context)
        if self._last:
            return model.finish(x_TD)
        self._outgoing[: plan.layout.tokens].copy_(x_TD)
        return x_TD

    def _compute(self, plan: StepPlan, waits: bool = False) -> tuple[Tensor, Sampled]:
        if self._last:
            return super()._compute(plan, waits)
        return self._hidden(plan, self._context(plan)), None
