r"""LAMB: the direction of AdamW, and steps in proportion to each matrix (You et al. 2020, arXiv:1904.00962).

    m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g^2
    r = (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps) + decay w
    w <- w - lr |w| / |r| r

The ratio |w| / |r| is 1 where one of the norms is 0. It keeps steps in bounds that grow with a large batch's learning
rate. As in AdamW, matrices decay and are scaled; vectors (norms, biases) take AdamW's step.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...ops.optim.rounding import FIRST, SECOND
from .adamw import adamw_update
from .base import Optimizer


class Lamb(Optimizer):
    """State: ``m`` and ``v`` like the parameter."""

    def new_state(self, name: str, parameter: nn.Parameter) -> dict[str, Tensor]:
        dtype = torch.float32 if self.master_weights else parameter.dtype
        return {kind: torch.zeros_like(parameter, dtype=dtype) for kind in ("m", "v")}

    def update(self, name: str, weight: Tensor, gradient: Tensor, factor: float, scale: Tensor | None) -> None:
        state = self.state[name]
        if not self.is_matrix(name):
            adamw_update(self, name, weight, gradient, state["m"], state["v"], factor, scale)
            return
        lamb_update(self, name, weight, gradient, state["m"], state["v"], factor, scale)


def lamb_update(
    optimizer: Optimizer,
    name: str,
    weight: Tensor,
    gradient: Tensor,
    first: Tensor,
    second: Tensor,
    factor: float,
    scale: Tensor | None,
) -> Tensor:
    """Apply the formula above in place to ``weight``, ``first`` (m) and ``second`` (v) of the matrix ``name``. Returns
    the ratio, a float32 scalar."""
    config, gradient = optimizer.config, optimizer.widened(gradient, scale)
    m, v, wide = first.float(), second.float(), weight.detach().float()
    m.lerp_(gradient, 1 - config.beta1)
    v.mul_(config.beta2).addcmul_(gradient, gradient, value=1 - config.beta2)
    step = v.sqrt().div_(math.sqrt(1 - config.beta2**optimizer.steps)).add_(config.eps)
    step = m.div(1 - config.beta1**optimizer.steps).div_(step).add_(wide, alpha=optimizer.decay(name))
    sizes = torch.stack([wide.norm(), step.norm()])
    ratio = torch.where((sizes > 0).all(), sizes[0] / sizes[1], torch.ones_like(sizes[0]))
    wide.sub_(step.mul_(ratio * (config.learning_rate * factor)))
    if weight.dtype != torch.float32:
        optimizer.keep(name, first, m, shift=FIRST)
        optimizer.keep(name, second, v, shift=SECOND)
        optimizer.keep(name, weight, wide)
    return ratio
