"""``GPUHeadRunner``: runs an EAGLE-3 head on a GPU; see ``executors/head_runner.py``. A step of drafts reads nothing on
the host, so CUDA graphs hold it as they hold those of the model."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from ....models.eagle import EagleHead
from .runner import GPURunner
from .step_inputs import StepFields
from .step_plan import StepPlan


class GPUHeadRunner(GPURunner):
    """See ``GPURunner``; the blocks of rows are those of the model that the head drafts for."""

    ahead = 1

    def __init__(self, head: EagleHead, *caches: Tensor, **options: Any) -> None:
        # Every token is attended to through the cache, and the features of all tokens are read.
        options |= {"whole_prompts": None, "prune_last_layer": False}
        super().__init__(head, *caches, **options)  # type: ignore[arg-type]

    def _drawing(self, plan: StepPlan, fields: StepFields, hidden_RD: Tensor) -> None:
        tables = fields.table if plan.decode else fields.table.index_select(0, fields.draw_row)
        head: Any = self._model
        head.features.write(hidden_RD, tables, fields.draw_position.long() - self.ahead)
