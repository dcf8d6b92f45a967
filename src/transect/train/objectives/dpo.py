r"""Direct preference optimization (Rafailov et al. 2023, arXiv:2305.18290) and its variants.

For a prompt with a chosen answer c and a rejected one r, under the model p and the frozen model p0 it began as:

    d = (log p(c) - log p0(c)) - (log p(r) - log p0(r))

    sigmoid    -(1 - e) log sigmoid(beta d) - e log sigmoid(-beta d)          e: label_smoothing
    robust     (-(1 - e) log sigmoid(beta d) + e log sigmoid(-beta d)) / (1 - 2 e)
    hinge      max(0, 1 - beta d)
    ipo        (d' - 1 / (2 beta))^2    with each side's log-probabilities averaged over its tokens

Sources: hinge is SLiC (Zhao et al. 2023, arXiv:2305.10425), ipo Azar et al. 2023 (arXiv:2310.12036), smoothing Mitchell
2023 ("A note on DPO with noisy preferences"), robust Chowdhury et al. 2024 (arXiv:2403.00409).

Data: rows with ``chosen`` and ``rejected``, strings or messages, after a ``prompt`` or after the messages with which
both begin. A label of the step is a pair.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .examples import ExampleBatch
from .preferences import Preferences


class DPO(Preferences):
    """See ``Objective``."""

    def examples_loss(self, batch: ExampleBatch) -> tuple[Tensor, dict[str, Tensor]]:
        settings = self._config.dpo
        gains = self.gains(batch)
        margin = gains[:, 0] - gains[:, 1]
        numbers = {"margin": margin, "accuracy": (margin > 0).float()}
        scaled, smoothing = settings.beta * margin, settings.label_smoothing
        if settings.loss == "ipo":
            each = gains / self.answer_tokens(batch).clamp(min=1)
            losses = (each[:, 0] - each[:, 1] - 1 / (2 * settings.beta)) ** 2
        elif settings.loss == "hinge":
            losses = torch.relu(1 - scaled)
        else:
            right, wrong = -(1 - smoothing) * F.logsigmoid(scaled), -smoothing * F.logsigmoid(-scaled)
            losses = right + wrong if settings.loss == "sigmoid" else (right - wrong) / (1 - 2 * smoothing)
        return losses.mean(), numbers
