"""Compute the distribution that answers were drawn from: temperature, then min-p, top-k and top-p.

An answer's token was drawn from ``softmax(z / temperature)`` over the tokens that these settings left, and its
log-probability is the one in that distribution. The optimizer compares it with the same distribution under changed
weights, so the set of tokens is kept from the time of the draw: with a new set, a token could fall out of it, and its
ratio would be meaningless (DeepSeek-AI 2025, arXiv:2512.02556, "keep sampling mask").

Shapes: T tokens, D model dim, V vocabulary, R rows at a time.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from ...costs.memory.sizes import LOSS_ELEMENTS
from ..data.batches import IGNORE
from .logprobs import KeptTokens


@dataclass(frozen=True, slots=True)
class Cut:
    """Truncation of the vocabulary before a draw, with the meanings of ``SamplingParams``."""

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def drawn_from(z_RV: Tensor, labels_R: Tensor, cut: Cut) -> Tensor:
    """Mark the tokens that could be drawn, bool ``[R, V]``: those that the engine's sampler keeps, and the drawn one.

    Args:
        z_RV: logits over the temperature. labels_R: what was drawn.
    """
    sorted_RV, ids_RV = z_RV.sort(dim=-1, descending=True, stable=True)
    keep = torch.ones_like(sorted_RV, dtype=torch.bool)
    if cut.min_p > 0:
        keep &= sorted_RV >= sorted_RV[:, :1] + math.log(cut.min_p)
    if 0 < cut.top_k < z_RV.shape[1]:
        keep &= sorted_RV >= sorted_RV[:, cut.top_k - 1 : cut.top_k]
    if cut.top_p < 1:
        weight = torch.where(keep, (sorted_RV - sorted_RV[:, :1]).double().exp(), 0.0)
        reached = weight.cumsum(-1)
        nucleus = reached - weight < cut.top_p * reached[:, -1:]
        nucleus[:, 0] = True
        keep &= nucleus
    could = torch.zeros_like(keep).scatter_(1, ids_RV, keep)
    # The engine rounds otherwise, so at the border the two may differ by a token.
    return could.scatter_(1, labels_R[:, None], True)


@torch.no_grad()
def kept_tokens(hidden_TD: Tensor, weight_VD: Tensor, labels_T: Tensor, temperature: float, cut: Cut) -> KeptTokens:
    """Return the tokens that could be drawn at every labelled position. Logits exist a few rows at a time."""
    counts = torch.zeros(len(labels_T), dtype=torch.int64, device=labels_T.device)
    used = (labels_T != IGNORE).nonzero()[:, 0]
    found = []
    for part in used.split(max(1, LOSS_ELEMENTS // weight_VD.shape[0])) if len(used) else ():
        z_RV = (hidden_TD[part] @ weight_VD.mT).float() / temperature
        could = drawn_from(z_RV, labels_T[part], cut)
        counts[part] = could.sum(-1)
        found.append(could.nonzero()[:, 1])
    bounds = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    return KeptTokens(torch.cat(found) if found else counts.new_empty(0), bounds)
