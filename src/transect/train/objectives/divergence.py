r"""The divergence of a student's next-token distribution from a teacher's, without the logits of all tokens.

With p = softmax(z / temperature) of the student, q of the teacher, and D the mean over the tokens that have a label:

    forward  sum q (log q - log p)      reverse  sum p (log p - log q)
    jsd      b sum q (log q - log m) + (1 - b) sum p (log p - log m),    m = b q + (1 - b) p

    loss = weight D + (1 - weight) cross entropy of the labels, at temperature 1

Gradients for u = z / temperature, with a = log p - log q (reverse) or (1 - b) (log p - log m) (jsd):

    forward  p - q                      reverse, jsd  p (a - sum p a)

As in ``ops/loss/linear_cross_entropy_torch.py`` both gradients are made with the loss, a few rows of logits at a time.
Each of these rows is held about six times (both models' logits and log-probabilities, the loss's terms), so only a
quarter as many exist at once (``DISTILLATION_PARTS``). No factor temperature^2 is applied, as in TRL.

Sources: Hinton et al. 2015 (arXiv:1503.02531); the generalized Jensen-Shannon divergence of Agarwal et al. 2023
(arXiv:2306.13649).

Shapes: T tokens, D and E model dims of student and teacher, V vocabulary that both know.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...costs.memory.sizes import DISTILLATION_PARTS, LOSS_ELEMENTS
from ..data.batches import IGNORE


@dataclass(frozen=True, slots=True)
class Divergence:
    """Kind and weight of the divergence, with the names of ``[distill]``."""

    kind: str = "forward"
    mixture: float = 0.5
    temperature: float = 1.0
    weight: float = 1.0

    def of(self, log_p: Tensor, log_q: Tensor) -> tuple[Tensor, Tensor]:
        """Compute the divergence of each row ``[R]`` and its gradient for u ``[R, V]``, from log-probabilities ``[R,
        V]``."""
        p = log_p.exp()
        if self.kind == "forward":
            q = log_q.exp()
            return (q * (log_q - log_p)).sum(-1), p - q
        if self.kind == "reverse":
            apart = log_p - log_q
            value = (p * apart).sum(-1)
            return value, p * (apart - value[:, None])
        b = self.mixture
        log_m = torch.logaddexp(log_p + math.log1p(-b), log_q + math.log(b))
        apart = (1 - b) * (log_p - log_m)
        own = (p * apart).sum(-1)
        return b * (log_q.exp() * (log_q - log_m)).sum(-1) + own, p * (apart - own[:, None])


def distillation_loss(
    hidden_TD: Tensor, weight_VD: Tensor, teacher_TE: Tensor, teacher_VE: Tensor, labels_T: Tensor, how: Divergence
) -> tuple[Tensor, Tensor]:
    """Compute the mean loss over the labels and, without a gradient, the mean divergence; float32 scalars (or float64).

    Vocabularies may be padded to different sizes; what only one of the models has is left out of the divergence.
    """
    loss, divergence = _Distillation.apply(hidden_TD, weight_VD, teacher_TE, teacher_VE, labels_T, how)
    return loss, divergence


class _Distillation(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, tx: Tensor, tweight: Tensor, labels: Tensor, how: Divergence
    ) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        dx = torch.zeros_like(x) if ctx.needs_input_grad[0] else None
        dw = torch.zeros_like(weight, dtype=wide) if ctx.needs_input_grad[1] else None
        shared = min(weight.shape[0], tweight.shape[0])
        used = (labels != IGNORE).nonzero()[:, 0]
        loss, total = x.new_zeros((), dtype=wide), x.new_zeros((), dtype=wide)
        for part in used.split(max(1, LOSS_ELEMENTS // weight.shape[0] // DISTILLATION_PARTS)) if len(used) else ():
            rows = x[part]
            z = (rows @ weight.mT).to(wide)
            log_p = (z[:, :shared] / how.temperature).log_softmax(-1)
            log_q = ((tx[part] @ tweight[:shared].mT).to(wide) / how.temperature).log_softmax(-1)
            value, gradient = how.of(log_p, log_q)
            total += value.sum()
            dz = torch.zeros_like(z)
            dz[:, :shared] = gradient * (how.weight / how.temperature)
            loss += how.weight * value.sum()
            if how.weight < 1:
                target = labels[part][:, None]
                log_p = z.log_softmax(-1)
                loss -= (1 - how.weight) * log_p.gather(1, target).sum()
                dz += (1 - how.weight) * log_p.exp()
                dz.scatter_add_(1, target, dz.new_full(target.shape, how.weight - 1))
            dz = dz.div_(len(used)).to(x.dtype)
            if dx is not None:
                dx[part] = dz @ weight
            if dw is not None:
                dw += dz.mT @ rows
        ctx.save_for_backward(dx, None if dw is None else dw.to(weight.dtype))
        divergence = total / len(used)
        ctx.mark_non_differentiable(divergence)
        return loss / len(used), divergence

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor | None, ...]:
        scale = upstream[0]
        dx, dw = (None if kept is None else kept * scale.to(kept.dtype) for kept in ctx.saved_tensors)
        return dx, dw, None, None, None, None
