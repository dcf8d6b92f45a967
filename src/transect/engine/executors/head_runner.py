"""``HeadRunner``: runs an EAGLE-3 head on a CPU. A row draws at the position after the next, and the output that it
draws from is left as the feature of its next entry (``scheduling/drafters/eagle.py``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...models.eagle import EagleHead
from ..scheduling.batch import Handle, ScheduledBatch
from .runner import Runner


class HeadRunner(Runner):
    """See ``Runner``; the blocks of rows are those of the model that the head drafts for."""

    ahead = 1
    _model: EagleHead  # type: ignore[assignment]

    def _finish(self, batch: ScheduledBatch, hidden_TD: Tensor, starts: Sequence[int]) -> Handle:
        drawn = [(row, start + row.num_tokens - 1) for row, start in zip(batch.rows, starts, strict=True) if row.draws]
        if drawn:
            size = self._block_size
            blocks = torch.tensor([[row.block_ids[row.end // size]] for row, _ in drawn])
            offsets = torch.tensor([row.end % size for row, _ in drawn])
            self._model.features.put(hidden_TD[torch.tensor([at for _, at in drawn])], blocks[:, 0], offsets)
        return super()._finish(batch, hidden_TD, starts)
