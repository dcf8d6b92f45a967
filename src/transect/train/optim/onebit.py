r"""1-bit Adam: AdamW whose momentum is summed over ranks in one bit a number (Tang et al. 2021, arXiv:2102.02888).

The first ``freeze_step`` steps are AdamW's. Then v stays as it is, and with g_i the part of the gradient that rank i of
n has (they add up to the gradient):

    m <- S(b1 m / n + (1 - b1) g_i)        w <- (1 - lr decay) w - lr / (1 - b1^t) * m / (sqrt(v / (1 - b2^T)) + eps)

S is a sum of signs and scales that makes its errors good later (``parallel/compressed.py``), and T is ``freeze_step``.
Numbers whose v is 0 have had no gradient, and would take steps of m / eps: they are left alone. The norm that
gradients are clipped by is then the root of the mean of the ranks' squared norms, sqrt(n sum_i |g_i|^2): the norm of
their sum would need the sum.

Whatever dtype the weights have, m is float32 in all compressed steps, on every rank. With ``zero`` 1 a rank has v
and the master weights of its own parameters alone, and weights travel whole after a step, as ever.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...ops.optim.rounding import WEIGHT
from ...parallel.compressed import SignSums
from ...parallel.group import Group
from .adamw import adamw_update
from .base import Optimizer


class OneBitAdam(Optimizer):
    """State: ``m`` and ``v`` like the parameter, as AdamW's; errors that are owed are not part of it, and begin at 0
    when a run is taken up again."""

    sums: SignSums | None = None
    """What momentum is summed by, from the first compressed step on."""
    _momentum: Tensor | None = None
    """All ranks' ``m``, of all parameters one behind the other, float32."""
    _group = Group.alone()
    _all: Mapping[str, nn.Parameter] | None = None

    def connect(self, group: Group, parameters: Mapping[str, nn.Parameter]) -> None:
        """Say which ranks train together, and all parameters that they train. All have the same ones."""
        self._group, self._all = group, dict(parameters)

    @property
    def everything(self) -> Mapping[str, nn.Parameter]:
        """All parameters that the ranks train."""
        return self.parameters if self._all is None else self._all

    @property
    def compresses(self) -> bool:
        """Whether the next step is given each rank's own gradients, and sums momentum itself."""
        return self.steps >= self.config.freeze_step

    @torch.no_grad()
    def norm_of(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """The norm that own gradients are clipped by, a float32 scalar, the same on every rank."""
        norms = torch._foreach_norm(list(gradients.values()), 2, dtype=torch.float32) if gradients else []
        device = next(iter(self.everything.values())).device
        square = torch.stack(list(norms)).square().sum() if norms else torch.zeros((), device=device)
        return (self._group.all_reduce(square.reshape(1))[0] * self._group.size).sqrt()

    def new_state(self, name: str, parameter: nn.Parameter) -> dict[str, Tensor]:
        dtype = torch.float32 if self.master_weights else parameter.dtype
        return {kind: torch.zeros_like(parameter, dtype=dtype) for kind in ("m", "v")}

    def update(self, name: str, weight: Tensor, gradient: Tensor, factor: float, scale: Tensor | None) -> None:
        state = self.state[name]
        adamw_update(self, name, weight, gradient, state["m"], state["v"], factor, scale)

    @torch.no_grad()
    def step(self, factor: float = 1.0, scale: Tensor | None = None) -> None:
        if not self.compresses:
            super().step(factor, scale)
            return
        self.steps += 1
        before = self.momentum()
        own = torch.zeros_like(before)
        given = self._sums if self._sums else self.gradients()
        for (name, parameter), part in zip(self.everything.items(), self._split(own), strict=True):
            gradient = given.get(name, parameter.grad)
            if gradient is not None:
                part.copy_(gradient.reshape(-1))
        own.mul_(1 - self.config.beta1 if scale is None else (1 - self.config.beta1) * scale)
        own.add_(before, alpha=self.config.beta1 / self._group.size)
        assert self.sums is not None
        now = self.sums.sum(own)
        for name, m, old in zip(self.everything, self._split(now), self._split(before), strict=True):
            if name in self.parameters:
                self._apply(name, m, old, factor)
        self._momentum = now

    def _apply(self, name: str, m: Tensor, before: Tensor, factor: float) -> None:
        """Take the step of one parameter; ``m`` and ``before``: its momentum now and one step ago, ``[numbers]``."""
        parameter, state = self.parameters[name], self.state[name]
        kept = state.get("master", parameter)
        weight = kept.detach().float()
        rate = self.config.learning_rate * factor
        weight.mul_(1 - rate * self.decay(name))
        weight.sub_(self.direction(m.view_as(weight), state["v"].float()), alpha=rate)
        self._put(name, kept, weight)

    def direction(self, m: Tensor, v: Tensor, correction: float | None = None) -> Tensor:
        """What a step is in proportion to, with v as it was at ``freeze_step``; ``correction``: 1 - b1^t if None."""
        config = self.config
        root = v.sqrt().div_(math.sqrt(1 - config.beta2 ** max(1, config.freeze_step)))
        found = m.div(1 - config.beta1**self.steps if correction is None else correction).div_(root.add_(config.eps))
        return found.masked_fill_(v == 0, 0.0)

    def _put(self, name: str, kept: Tensor, weight: Tensor) -> None:
        """Write a float32 weight to where it is kept, and to the parameter."""
        if kept.dtype == torch.float32:
            kept.copy_(weight)
        else:
            self.keep(name, kept, weight, shift=WEIGHT)
        if kept is not self.parameters[name]:
            self.parameters[name].copy_(kept)

    def momentum(self) -> Tensor:
        """All parameters' m; made of the states of all ranks when compressed steps begin."""
        if self._momentum is None:
            device = next(iter(self.everything.values())).device
            numbers = sum(parameter.numel() for parameter in self.everything.values())
            found = torch.zeros(numbers, device=device)
            for name, part in zip(self.everything, self._split(found), strict=True):
                if name in self.parameters:
                    part.copy_(self.state[name]["m"].reshape(-1))
            if len(self.parameters) < len(self.everything):
                self._group.all_reduce(found)
            self._momentum = found
            self.sums = self.sums or SignSums(self._group, numbers, device)
        return self._momentum

    def _split(self, flat: Tensor) -> tuple[Tensor, ...]:
        """The part of each parameter, in their order."""
        return flat.split([parameter.numel() for parameter in self.everything.values()])

    def settle(self) -> None:
        if self._momentum is not None:
            for name, part in zip(self.everything, self._split(self._momentum), strict=True):
                if name in self.parameters:
                    self.state[name]["m"].copy_(part.view_as(self.state[name]["m"]))

    def load_state_tensors(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        self._momentum = self.sums = None
        super().load_state_tensors(tensors, steps)
