"""``StageRunner``: the executor of one stage of a pipeline (pipeline parallel).

Each stage runs some of the layers: it receives hidden states from the stage before and sends its own to the stage
after. The last stage has the head, draws tokens and sends them to all others. Every stage plans the same steps, so no
stage waits for a plan; a stage waits only for hidden states, and for drawn tokens when the scheduler needs them.
Several steps are in flight at the same time, each at another stage, and no sequence is in two of them that need its
tokens (``SchedulerConfig.pipeline_depth``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from ...models.decoder import Decoder
from ...parallel.mesh import Mesh
from ..scheduling.batch import Handle, ScheduledBatch, StepResult
from ..scheduling.constraint import MaskFiller, fill_each
from .penalties import Pick
from .runner import CompletedStep, Runner, copy_blocks


@dataclass(slots=True)
class Elsewhere:
    """The handle of a step whose tokens the last stage draws."""

    mesh: Mesh
    step: int
    source: int
    """Rank that sends the tokens."""
    _result: StepResult | None = None

    def draw(self) -> None:
        """Do nothing: the last stage draws."""

    def result(self) -> StepResult:
        """Wait for the result that the last stage sends, and return it."""
        if self._result is None:
            self._result = self.mesh.world.receive(self.source, tag=self.step)
        return self._result


class StageRunner(Runner):
    """Runs this stage's part of every batch, within ``submit``. Arguments as for ``Runner``; ``model`` and caches are
    those of this stage's layers."""

    def __init__(
        self, model: Decoder, k_cache: Tensor, v_cache: Tensor, mesh: Mesh, *, fill_masks: MaskFiller = fill_each
    ) -> None:
        super().__init__(model, k_cache, v_cache, fill_masks=fill_masks)
        self._mesh, group = mesh, mesh.pipeline
        self._before, self._after = group.rank - 1, group.rank + 1
        self._first, self._last = group.rank == 0, group.rank == group.size - 1
        self._others = group.ranks[:-1]
        self._last_rank = group.ranks[-1]
        self._dtype = next(model.parameters()).dtype if model.embed.bits else torch.float32
        self._sent: deque[tuple[dist.Work | None, Tensor]] = deque()
        """Hidden states in transit to the next stage, kept until they have arrived."""

    @torch.inference_mode()
    def submit(self, batch: ScheduledBatch) -> Handle:
        """Receive the hidden states of the stage before, run the layers, and send the result on; the last stage
        draws."""
        copy_blocks(self._k_cache, self._v_cache, batch.block_copies)
        model = self._model
        tokens_T, positions_T, context, starts = self._inputs(batch)
        if self._sharing is not None:
            self._sharing.meet(len(tokens_T))
        if self._first:
            x_TD = model.begin(tokens_T, positions_T)
        else:
            x_TD = torch.empty(len(tokens_T), model.config.dim, dtype=self._dtype)
            self._mesh.pipeline.receive(x_TD, self._before)
        x_TD = model.stack(x_TD, positions_T, context)
        if self._last:
            return self._finish(batch, model.finish(x_TD), starts)
        self._send(x_TD.to(self._dtype).contiguous())
        return Elsewhere(self._mesh, batch.step, self._last_rank)

    def _send(self, x_TD: Tensor) -> None:
        while self._sent and (self._sent[0][0] is None or self._sent[0][0].is_completed()):
            self._sent.popleft()
        self._sent.append((self._mesh.pipeline.send(x_TD, self._after), x_TD))

    def _draw(
        self,
        batch: ScheduledBatch,
        hidden_TD: Tensor,
        starts: Sequence[int],
        logits_RV: Tensor | None,
        picks: Sequence[Pick],
    ) -> CompletedStep:
        done = super()._draw(batch, hidden_TD, starts, logits_RV, picks)
        for rank in self._others:
            self._mesh.world.send(done.step_result, rank, tag=batch.step)
        return done
