r"""1-bit LAMB: LAMB whose momentum is summed over ranks in one bit a number (Li et al. 2021, arXiv:2104.06069).

The first ``freeze_step`` steps are LAMB's, with ratios c = |w| / |r| whose average over time, c_a, is kept. Then the
variance that steps are divided by stays as it is (f), m is summed as in 1-bit Adam, as z = m / (sqrt(f) + eps), and

    g = (m - b1 m_before) / (1 - b1)        v <- b2 v + (1 - b2) g^2
    s <- clip(max(sqrt(f) / sqrt(v)), 0.9 s, 1.1 s), between 0.5 and 4
    w <- w - lr c_a s (m / (sqrt(f) + eps) + decay w)

The ratio cannot be recomputed from compressed numbers, so s follows how the variance would have changed. Vectors
take the steps of 1-bit Adam, as those of LAMB take AdamW's.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .lamb import lamb_update
from .onebit import OneBitAdam

AVERAGE = 0.9
"""Share of the average ratio that a step keeps."""
LEAST, MOST, CHANGE = 0.5, 4.0, 0.1


class OneBitLamb(OneBitAdam):
    """State: ``m`` and ``v``; of matrices also ``frozen`` like ``v``, and ``ratio`` and ``stretch``, a number each."""

    def new_state(self, name: str, parameter: nn.Parameter) -> dict[str, Tensor]:
        state = super().new_state(name, parameter)
        if self.is_matrix(name):
            state["frozen"] = torch.zeros_like(state["v"])
            state["ratio"] = torch.zeros((), device=parameter.device)
            state["stretch"] = torch.ones((), device=parameter.device)
        return state

    def update(self, name: str, weight: Tensor, gradient: Tensor, factor: float, scale: Tensor | None) -> None:
        if not self.is_matrix(name):
            super().update(name, weight, gradient, factor, scale)
            return
        state = self.state[name]
        ratio = lamb_update(self, name, weight, gradient, state["m"], state["v"], factor, scale)
        state["ratio"].mul_(AVERAGE).add_(ratio, alpha=1 - AVERAGE)
        state["frozen"].copy_(state["v"])

    def _apply(self, name: str, z: Tensor, before: Tensor, factor: float) -> None:
        if not self.is_matrix(name):
            super()._apply(name, z, before, factor)
            return
        parameter, state, config = self.parameters[name], self.state[name], self.config
        kept = state.get("master", parameter)
        weight, frozen, v = kept.detach().float(), state["frozen"].float(), state["v"].float()
        root = self._split(self.root)[list(self.everything).index(name)]
        gradient = z.sub(before, alpha=config.beta1).mul_(root).div_(1 - config.beta1).view_as(weight)
        v.mul_(config.beta2).addcmul_(gradient, gradient, value=1 - config.beta2)
        state["v"].copy_(v)
        stretch = state["stretch"]
        wanted = frozen.sqrt().add_(config.eps).div_(v.sqrt().add_(config.eps)).max()
        stretch.copy_(wanted.clamp(stretch * (1 - CHANGE), stretch * (1 + CHANGE)).clamp(LEAST, MOST))
        step = self.direction(name, z).add_(weight, alpha=self.decay(name))
        average = state["ratio"] / (1 - AVERAGE**config.freeze_step)
        weight.sub_(step.mul_(average * stretch * (config.learning_rate * factor)))
        self._put(name, kept, weight)

    def _flat(self, kind: str) -> Tensor:
        """Concatenate a state; a matrix's variance is the frozen one."""
        own = self.state
        if kind == "v":
            self.state = {n: {**s, "v": s.get("frozen", s["v"])} for n, s in own.items()}
        try:
            return super()._flat(kind)
        finally:
            self.state = own
