r"""1-bit Adam: AdamW whose momentum is summed over ranks in one bit a number (Tang et al. 2021, arXiv:2102.02888).

The first ``freeze_step`` steps are AdamW's. Then v stays as it is, and with g_i the part of the gradient that rank i of
n has (they add up to the gradient):

    d = sqrt(v / (1 - b2^T)) + eps
    z <- S(b1 z / n + (1 - b1) g_i / d)        w <- (1 - lr decay) w - lr / (1 - b1^t) * z

S is a sum of signs and scales that makes its errors good later (``parallel/compressed.py``), and T is ``freeze_step``.
z is m / d. The paper sums m and divides by d afterwards; but numbers that share a scale may have very different d, as
rows of an embedding have, and small ones would take steps far too large. All of z are of about one size.
Numbers whose v is 0 have had no gradient and are left alone. The norm that
gradients are clipped by is then the root of the mean of the ranks' squared norms, sqrt(n sum_i |g_i|^2): the norm of
their sum would need the sum.

Whatever dtype the weights have, z and d are float32, on every rank. With ``zero`` 1 a rank has the states and master
weights of its own parameters alone beside these, and weights travel whole after a step, as ever.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from ...ops.optim.rounding import WEIGHT
from ...parallel.compressed import SignSums
from ...parallel.group import Group
from .adamw import adamw_update
from .base import Optimizer


class OneBitAdam(Optimizer):
    """1-bit Adam. State: ``m`` and ``v`` like the parameter, as AdamW's; compensation errors are not part of it, and
    start at 0 when a run resumes."""

    sums: SignSums | None = None
    """Compressed sum of momentum over ranks, set at the first compressed step."""
    _momentum: Tensor | None = None
    """z of all parameters, concatenated, float32, equal on every rank."""
    _root: Tensor | None = None
    """d, in the same order."""
    _group = Group.alone()
    _all: Mapping[str, nn.Parameter] | None = None

    def connect(self, group: Group, parameters: Mapping[str, nn.Parameter]) -> None:
        """Set the ranks that train together, and all parameters that they train, which are equal on all ranks."""
        self._group, self._all = group, dict(parameters)

    @property
    def everything(self) -> Mapping[str, nn.Parameter]:
        """All parameters that the ranks train."""
        return self.parameters if self._all is None else self._all

    @property
    def compresses(self) -> bool:
        """True if the next step takes each rank's local gradients and sums momentum itself."""
        return self.steps >= self.config.freeze_step

    @torch.no_grad()
    def norm_of(self, gradients: Mapping[str, Tensor]) -> Tensor:
        """Compute the norm by which a rank's gradients are clipped, a float32 scalar, equal on every rank."""
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
        own.div_(self.root).mul_(1 - self.config.beta1 if scale is None else (1 - self.config.beta1) * scale)
        own.add_(before, alpha=self.config.beta1 / self._group.size)
        assert self.sums is not None
        now = self.sums.sum(own)
        for name, z, old in zip(self.everything, self._split(now), self._split(before), strict=True):
            if name in self.parameters:
                self._apply(name, z, old, factor)
        self._momentum = now

    def _apply(self, name: str, z: Tensor, before: Tensor, factor: float) -> None:
        """Take the step of one parameter; ``z`` and ``before``: its momentum over d now and one step ago."""
        parameter, state = self.parameters[name], self.state[name]
        kept = state.get("master", parameter)
        weight = kept.detach().float()
        rate = self.config.learning_rate * factor
        weight.mul_(1 - rate * self.decay(name))
        weight.sub_(self.direction(name, z), alpha=rate)
        self._put(name, kept, weight)

    def direction(self, name: str, z: Tensor, correction: float | None = None) -> Tensor:
        """Return the direction of a step, shaped like the parameter; ``correction``: None for 1 - b1^t."""
        v = self.state[name]["v"]
        found = z.view_as(v) / (1 - self.config.beta1**self.steps if correction is None else correction)
        return found.masked_fill_(v == 0, 0.0)

    def _put(self, name: str, kept: Tensor, weight: Tensor) -> None:
        """Write a float32 weight to its float32 copy, and to the parameter."""
        if kept.dtype == torch.float32:
            kept.copy_(weight)
        else:
            self.keep(name, kept, weight, shift=WEIGHT)
        if kept is not self.parameters[name]:
            self.parameters[name].copy_(kept)

    @property
    def root(self) -> Tensor:
        """d of all parameters."""
        assert self._root is not None
        return self._root

    def momentum(self) -> Tensor:
        """Return z of all parameters; computed from the states of all ranks when compressed steps begin."""
        if self._momentum is None:
            self._root = self._flat("v").div_(1 - self.config.beta2**self.variance_steps).sqrt_().add_(self.config.eps)
            self._momentum = self._flat("m").div_(self._root)
            self.sums = self.sums or SignSums(self._group, len(self._root), self._root.device)
        return self._momentum

    @property
    def variance_steps(self) -> int:
        """Number of steps that have updated v."""
        return self.config.freeze_step

    def _flat(self, kind: str) -> Tensor:
        """Concatenate a state of all parameters, float32, on every rank."""
        device = next(iter(self.everything.values())).device
        found = torch.zeros(sum(parameter.numel() for parameter in self.everything.values()), device=device)
        for name, part in zip(self.everything, self._split(found), strict=True):
            if name in self.parameters:
                part.copy_(self.state[name][kind].reshape(-1))
        if len(self.parameters) < len(self.everything):
            self._group.all_reduce(found)
        return found

    def _split(self, flat: Tensor) -> tuple[Tensor, ...]:
        """Split a concatenation into the parts of the parameters, in order."""
        return flat.split([parameter.numel() for parameter in self.everything.values()])

    @torch.no_grad()
    def settle(self) -> None:
        if self._momentum is not None:
            for name, part in zip(self.everything, self._split(self._momentum * self.root), strict=True):
                if name in self.parameters:
                    self.state[name]["m"].copy_(part.view_as(self.state[name]["m"]))

    def load_state_tensors(self, tensors: Mapping[str, Tensor], steps: int) -> None:
        self._momentum = self._root = self.sums = None
        super().load_state_tensors(tensors, steps)
