r"""0/1 Adam: 1-bit Adam that sums rarely, and whose variance learns rarely (Lu et al. 2022, arXiv:2202.06009).

Variance: v takes in a gradient summed in full at some steps only, after which the momentum of that step is exact too.
The first ``VARIANCE_STEPS`` are all of them, the next as many are every second, then every fourth, and so on; from
``freeze_step`` on there are none. All other steps before that are those of 1-bit Adam.

Local steps: from ``freeze_step`` on a rank steps by its own momentum, and every ``sync_every`` steps all agree:

    z_i <- b1 z_i + (1 - b1) n g_i / d        w_i <- w_i - lr z_i        u_i <- u_i + lr z_i
    agree:  z = S(u_i / (n L))        w <- (1 - L decay) w_0 - L z        u_i <- 0        L: the sum of lr since then

d is sqrt(v) + eps, and z is m / d, as in ``onebit.py``. S is a sum of signs (``parallel/compressed.py``), which owes
errors in the unit of z, also from the steps before; w_0 the weights when the ranks last agreed. Between agreements
their weights differ a little; a checkpoint makes them agree first. With ``sync_every`` 1 every step agrees.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .onebit import OneBitAdam

VARIANCE_STEPS = 16
"""Steps that learn the variance before the interval between them doubles."""


def learns_variance(step: int) -> bool:
    """Return True if step ``step``, from 0, uses a gradient summed in full precision."""
    first, interval = 0, 1
    while step >= first + VARIANCE_STEPS * interval:
        first += VARIANCE_STEPS * interval
        interval *= 2
    return (step - first) % interval == 0


class ZeroOneAdam(OneBitAdam):
    """State: as ``OneBitAdam``. Weights are float32, or have float32 masters."""

    _moved: Tensor | None = None
    """u of this rank."""
    _before: Tensor | None = None
    """Weights at the last synchronization of the ranks."""
    _rates = 0.0
    """Sum of learning rates since the last synchronization."""
    _since = 0

    @property
    def compresses(self) -> bool:
        return self.frozen or not learns_variance(self.steps)

    @property
    def variance_steps(self) -> int:
        return sum(map(learns_variance, range(min(self.steps, self.config.freeze_step)))) or 1

    @property
    def frozen(self) -> bool:
        """True if the variance no longer changes."""
        return self.steps >= self.config.freeze_step

    @torch.no_grad()
    def step(self, factor: float = 1.0, scale: Tensor | None = None) -> None:
        if not self.compresses:  # in full: AdamW on the momentum that all have
            self.settle()
            super().step(factor, scale)
            self._momentum = None
        elif not self.frozen or self.config.sync_every == 1:
            super().step(factor, scale)
        else:
            self._local_step(factor, scale)

    def _local_step(self, factor: float, scale: Tensor | None) -> None:
        self.steps += 1
        config, m = self.config, self.momentum()
        if self._moved is None or self._before is None:
            self._moved, self._before = torch.zeros_like(m), torch.empty_like(m)
        if not self._since:
            for name, part in zip(self.everything, self._split(self._before), strict=True):
                part.copy_(self._kept(name).detach().reshape(-1))
        moved = self._moved
        share = (1 - config.beta1) * self._group.size
        m.mul_(config.beta1)
        roots = self._split(self.root)
        given = self._sums if self._sums else self.gradients()
        rate = config.learning_rate * factor
        for (name, parameter), part, root in zip(self.everything.items(), self._split(m), roots, strict=True):
            gradient = given.get(name, parameter.grad)
            if gradient is not None:
                part.add_(self.widened(gradient.reshape(-1).clone(), scale).div_(root), alpha=share)
            kept = self._kept(name)
            self._put(name, kept, kept.detach().clone().sub_(self.direction(name, part, 1.0), alpha=rate))
        moved.add_(m, alpha=rate)
        self._rates += rate
        self._since += 1
        if self._since >= config.sync_every:
            self._agree()

    def _agree(self) -> None:
        """Synchronize the weights and the momentum of all ranks."""
        moved, before = self._moved, self._before
        assert moved is not None and before is not None and self.sums is not None
        if not self._rates:  # no weight has moved
            self._since = 0
            return
        # In the unit of the momentum, in which what earlier sums left out is still owed.
        together = self.sums.sum(moved / (self._group.size * self._rates)) * self._rates
        for name, first, step in zip(self.everything, self._split(before), self._split(together), strict=True):
            kept = self._kept(name)
            weight = first.view_as(kept) * (1 - self._rates * self.decay(name))
            self._put(name, kept, weight.sub_(self.direction(name, step, 1.0)))
        self._momentum = together / self._rates
        moved.zero_()
        self._rates, self._since = 0.0, 0

    def _kept(self, name: str) -> Tensor:
        """Return the float32 copy of a weight."""
        return self.state[name].get("master", self.parameters[name])

    @torch.no_grad()
    def settle(self) -> None:
        if self._since:
            self._agree()
        super().settle()

    def load_state_tensors(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        self._moved = self._before = None
        self._rates, self._since = 0.0, 0
        super().load_state_tensors(tensors, steps)
