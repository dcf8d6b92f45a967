r"""Losses that keep the experts of a mixture busy and the router's logits small, added to the loss of a batch.

For one layer, with T tokens, E experts and k choices of each token; the mean over the layers counts:

    balance = E sum_e f_e P_e       f_e = choices of expert e / T       P_e = mean over tokens of its score
    z       = mean over tokens of (log sum_e exp l_e)^2

Balance is k where all experts are equally busy, and more where they are not. Sigmoid scores are divided by their sum
first. f has no gradient, so the losses reach the router (and what is below it) through the scores and logits.

Source: Fedus et al. 2021, arXiv:2101.03961 (balance); Zoph et al. 2022, arXiv:2202.08906 (z).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from ...models.decoder import Decoder
from ...models.moe import MoE
from ..config import RouterConfig
from .share import Sums


class Balance:
    """The two losses of a model's routers; 0, at no cost, for a model without experts."""

    def __init__(self, model: Decoder, config: RouterConfig) -> None:
        wanted = bool(config.balance or config.z_loss)
        self._config = config
        self._layers = [module for module in model.modules() if isinstance(module, MoE)] if wanted else []
        self._seen: list[tuple[Tensor, Tensor]] = []
        self._last: list[tuple[Tensor, Tensor, int]] = []
        """Both losses of each micro-batch since ``begin``, and its number of labels."""

    def begin(self) -> None:
        """Drop the recorded losses."""
        self._last = []

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Record the routers' losses of a forward pass. Recomputation in a backward pass is not recorded again."""
        self._seen = []
        for layer in self._layers:
            layer.watch = self._see
        try:
            yield
        finally:
            for layer in self._layers:
                layer.watch = None

    def sums(self) -> Sums:
        """Return the two losses of the micro-batches since ``begin``, for the log; waits for the device."""
        labels = sum(count for _, _, count in self._last)
        balance = math.fsum(float(value) * count for value, _, count in self._last)
        z = math.fsum(float(value) * count for _, value, count in self._last)
        return {"expert_balance": (balance, labels), "router_z": (z, labels)} if self._last else {}

    def _see(self, logits_TE: Tensor, experts_Tk: Tensor) -> None:
        self._seen.append((logits_TE, experts_Tk))

    def loss(self, labels: int = 1) -> Tensor | float:
        """Return the term to add to the loss of the watched batch with ``labels`` labels."""
        if not self._seen:
            return 0.0
        balance = torch.stack([balance_loss(*seen, self._layers[0].moe.score) for seen in self._seen]).mean()
        z = torch.stack([z_loss(logits) for logits, _ in self._seen]).mean()
        if torch.is_grad_enabled():
            self._last.append((balance.detach(), z.detach(), labels))
        self._seen = []
        return self._config.balance * balance + self._config.z_loss * z


def balance_loss(logits_TE: Tensor, experts_Tk: Tensor, score: str = "softmax") -> Tensor:
    """Compute the balance loss, a scalar; k if all experts are equally busy."""
    tokens, experts = logits_TE.shape
    scores = logits_TE.sigmoid() if score == "sigmoid" else logits_TE.softmax(-1)
    if score == "sigmoid":
        scores = scores / (scores.sum(-1, keepdim=True) + 1e-20)
    flat = experts_Tk.flatten().long()
    chosen = torch.zeros(experts, dtype=scores.dtype, device=scores.device)
    chosen = chosen.scatter_add(0, flat, torch.ones_like(flat, dtype=scores.dtype)) / max(1, tokens)
    return experts * (chosen * scores.mean(0)).sum()


def z_loss(logits_TE: Tensor) -> Tensor:
    """Compute the z loss, a scalar."""
    return logits_TE.logsumexp(-1).square().mean()
