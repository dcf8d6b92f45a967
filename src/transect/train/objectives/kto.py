r"""Kahneman-Tversky optimization (Ethayarajh et al. 2024, arXiv:2402.01306): answers that are good or bad, each alone.

With g(y) = log p(y) - log p0(y), the gain of an answer over the frozen model that the run began with:

    z = max(0, mean over the micro-batch of g of answers beside prompts that they do not belong to)
    good:  desirable_weight (1 - sigmoid(beta (g - z)))        bad:  undesirable_weight (1 - sigmoid(beta (z - g)))

z estimates the KL divergence from the frozen model and has no gradient. A micro-batch should hold several answers.
Data: rows with ``prompt``, ``completion`` and a ``label`` of true or false; or pairs, which are taken apart. A label of
the step is an answer.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .examples import ExampleBatch, Examples, read_rated
from .preferences import Preferences


class KTO(Preferences):
    """See ``Objective``."""

    NAME = "kto"

    def read(self, paths: Sequence[str]) -> Examples:
        trainable, config = self._trainable, self._config
        assert trainable.tokenizer is not None and trainable.template is not None
        stream, good = read_rated(
            paths, trainable.tokenizer, trainable.template, seed=config.seed, skip=config.data.on_bad_row == "skip",
            columns=config.data.columns, tell=self._described.append,
        )  # fmt: skip
        self._described.append(f"{sum(good)} answers are good, {len(good) - sum(good)} are bad")
        return Examples(stream, config.data, config.seed, good)

    def examples_loss(self, batch: ExampleBatch) -> tuple[Tensor, dict[str, Tensor]]:
        settings = self._config.kto
        gains = self.gains(batch)
        divergence = gains[:, 1].detach().mean().clamp(min=0)
        gain, good = gains[:, 0], batch.good
        toward = torch.where(good, gain - divergence, divergence - gain)
        weight = torch.where(good, settings.desirable_weight, settings.undesirable_weight)
        losses = weight * (1 - torch.sigmoid(settings.beta * toward))
        numbers = {"kl": divergence.expand_as(gain), "gain_good": gain[good], "gain_bad": gain[~good]}
        return losses.mean(), numbers
