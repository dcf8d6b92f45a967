r"""AdamW (Loshchilov & Hutter 2017, arXiv:1711.05101).

    m <- b1 m + (1 - b1) g        v <- b2 v + (1 - b2) g^2
    w <- (1 - lr decay) w - lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^t)) + eps)

The moments have the weight's dtype (float32 with master weights). In 16 bits a step is computed in float32 and weight
and moments are rounded once, at its end, on every device: by chance, or to the nearest. The order of operations is that
of torch's, so a float32 run agrees with it to rounding.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...costs.memory.sizes import WIDE
from ...ops.optim.adamw import AdamWStep, FusedAdamW
from ...ops.optim.rounding import FIRST, SECOND, WEIGHT
from .base import Optimizer


class AdamW(Optimizer):
    """State: ``m`` and ``v`` like the parameter. On a GPU a step is one launch over all parameters."""

    _fused: tuple[tuple[str, ...], FusedAdamW] | None = None

    @property
    def skips(self) -> bool:
        return all(parameter.is_cuda for parameter in self.parameters.values())

    def new_state(self, name: str, parameter: nn.Parameter) -> dict[str, Tensor]:
        dtype = torch.float32 if self.master_weights else parameter.dtype
        return {kind: torch.zeros_like(parameter, dtype=dtype) for kind in ("m", "v")}

    @torch.no_grad()
    def gradient_norm(self) -> Tensor:
        given = self.gradients()
        dtypes = {gradient.dtype for gradient in given.values()}
        if not given or not self.skips or len(dtypes) > 1 or len({self.parameters[n].dtype for n in given}) > 1:
            return super().gradient_norm()
        return self._tables(tuple(given)).norm(list(given.values()))

    def _tables(self, names: tuple[str, ...]) -> FusedAdamW:
        """Return the address tables of these parameters, which are the same in every step."""
        if self._fused is None or self._fused[0] != names:
            weights, states = [self.parameters[name] for name in names], [self.state[name] for name in names]
            masters = [state["master"] for state in states if "master" in state]
            tables = FusedAdamW(
                weights,
                [s["m"] for s in states],
                [s["v"] for s in states],
                [self.decay(name) for name in names],
                masters,
                chance=self.config.rounding == "stochastic" and not masters and weights[0].dtype == torch.bfloat16,
                numbers=[self.numbers[name] for name in names],
            )
            self._fused = names, tables
        return self._fused[1]

    def update_all(self, gradients: Mapping[str, Tensor], factor: float, scale: Tensor | None) -> None:
        if not gradients or not self.skips:
            super().update_all(gradients, factor, scale)
            return
        config = self.config
        numbers = AdamWStep(
            config.learning_rate * factor,
            config.beta1,
            config.beta2,
            config.eps,
            1 - config.beta1**self.steps,
            math.sqrt(1 - config.beta2**self.steps),
            self.seed,
            self.steps,
        )
        given = list(gradients.values())
        one = torch.ones((), device=given[0].device) if scale is None else scale
        self._tables(tuple(gradients)).step(given, numbers, one)

    def update(self, name: str, weight: Tensor, gradient: Tensor, factor: float, scale: Tensor | None) -> None:
        state = self.state[name]
        adamw_update(self, name, weight, gradient, state["m"], state["v"], factor, scale)


def adamw_update(
    optimizer: Optimizer,
    name: str,
    weight: Tensor,
    gradient: Tensor,
    m: Tensor,
    v: Tensor,
    factor: float,
    scale: Tensor | None = None,
    decay: float | None = None,
) -> None:
    """Apply the formula above in place to ``weight``, ``m`` and ``v`` of the parameter ``name``; ``decay`` is
    ``optimizer.decay(name)`` if None."""
    decay = optimizer.decay(name) if decay is None else decay
    if weight.dtype != torch.float32:
        flat = (weight.detach().view(-1), gradient.reshape(-1), m.view(-1), v.view(-1))
        for part, narrow in enumerate(zip(*(t.split(WIDE) for t in flat), strict=True)):
            wide = [narrow[0].float(), optimizer.widened(narrow[1], scale), narrow[2].float(), narrow[3].float()]
            adamw_update(optimizer, name, wide[0], wide[1], wide[2], wide[3], factor, None, decay)
            for index, shift in ((0, WEIGHT), (2, FIRST), (3, SECOND)):
                optimizer.keep(name, narrow[index], wide[index], part * WIDE, shift)
        return
    config = optimizer.config
    rate = config.learning_rate * factor
    gradient = optimizer.widened(gradient, scale)
    weight.mul_(1 - rate * decay)
    m.lerp_(gradient, 1 - config.beta1)
    v.mul_(config.beta2).addcmul_(gradient, gradient, value=1 - config.beta2)
    correction = math.sqrt(1 - config.beta2**optimizer.steps)
    denominator = v.sqrt().div_(correction).add_(config.eps)
    weight.addcdiv_(m, denominator, value=-rate / (1 - config.beta1**optimizer.steps))
