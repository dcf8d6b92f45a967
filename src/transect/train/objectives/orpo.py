r"""Odds ratio preference optimization (Hong et al. 2024, arXiv:2403.07691): preferences without a reference.

With m(y) the mean log-probability of an answer's tokens, and odds(y) = exp m(y) / (1 - exp m(y)):

    loss = nll(c) - beta log sigmoid(log odds(c) - log odds(r))

nll is the mean cross entropy of the chosen documents: of prompt and answer, as in TRL, or of the answer alone
(``train_prompt = false``). Data as for ``dpo``.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..data.batches import IGNORE
from .examples import ExampleBatch
from .logprobs import batch_hidden, document_sums, token_logprobs
from .preferences import Preferences

CLOSEST_TO_CERTAIN = -1e-6
"""Largest mean log-probability used; nearer to 0, the odds exceed float32."""


class ORPO(Preferences):
    """See ``Objective``."""

    NAME = "orpo"
    REFERENCE = False

    def examples_loss(self, batch: ExampleBatch) -> tuple[Tensor, dict[str, Tensor]]:
        settings, model = self._config.orpo, self._trainable.model
        answer_T = batch.labels_T != IGNORE
        labels_T = self._all_labels(batch) if settings.train_prompt else batch.labels_T
        values_T = token_logprobs(batch_hidden(model, batch), model.head.dense(), labels_T)
        chosen_T = self._chosen(batch) & (labels_T != IGNORE)
        nll = -(values_T * chosen_T).sum() / chosen_T.sum().clamp(min=1)
        sums = document_sums(values_T * answer_T, batch.cu_seqlens).view(-1, 2)
        mean = (sums / self.answer_tokens(batch).clamp(min=1)).clamp(max=CLOSEST_TO_CERTAIN)
        log_odds = mean - torch.log(-torch.expm1(mean))
        ratio = log_odds[:, 0] - log_odds[:, 1]
        loss = nll - settings.beta * F.logsigmoid(ratio).mean()
        numbers = {"nll": nll.expand_as(ratio), "log_odds_ratio": ratio, "accuracy": (ratio > 0).float()}
        return loss, numbers

    @staticmethod
    def _chosen(batch: ExampleBatch) -> Tensor:
        """Mark the tokens of chosen documents, bool ``[T]``."""
        lengths = batch.cu_seqlens.diff().long()
        document_T = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        return document_T % 2 == 0

    def _all_labels(self, batch: ExampleBatch) -> Tensor:
        """Return labels for every next token of the chosen documents, and for the answers of the rejected ones."""
        following_T = torch.full_like(batch.tokens_T, IGNORE)
        following_T[:-1] = batch.tokens_T[1:]
        following_T[batch.cu_seqlens[1:].long() - 1] = IGNORE
        return torch.where(self._chosen(batch), following_T, batch.labels_T)
