r"""Muon: momentum, then the nearest orthogonal matrix (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/).

For a matrix of a layer with gradient G:

    M <- mu M + G        U = G + mu M (Nesterov)        W <- (1 - lr decay) W - lr sqrt(max(1, rows / columns)) O(U)

O(U) replaces U's singular values by about 1: with X = U / |U|, five rounds of X <- a X + (b A + c A^2) X with A = X X^T
drive every singular value towards 1 (between 0.7 and 1.2, which is near enough). Embeddings, the head, norms, biases,
routers and experts are left to AdamW, with its own learning rate.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ...costs.training import ROUNDS
from ...ops.optim.rounding import FIRST
from .adamw import adamw_update
from .base import Optimizer

COEFFICIENTS = (3.4445, -4.7750, 2.0315)


class Muon(Optimizer):
    """State: ``momentum`` for matrices of the layers, ``m`` and ``v`` for the rest."""

    @staticmethod
    def takes(name: str, parameter: Tensor) -> bool:
        """Return True if a parameter is updated by Muon."""
        return parameter.ndim == 2 and "layers." in name and "router" not in name and "experts_" not in name

    def new_state(self, name: str, parameter: nn.Parameter) -> dict[str, Tensor]:
        dtype = torch.float32 if self.master_weights else parameter.dtype
        kinds = ("momentum",) if self.takes(name, parameter) else ("m", "v")
        return {kind: torch.zeros_like(parameter, dtype=dtype) for kind in kinds}

    def update(self, name: str, weight: Tensor, gradient: Tensor, factor: float, scale: Tensor | None) -> None:
        state = self.state[name]
        if "momentum" not in state:
            adamw_update(self, name, weight, gradient, state["m"], state["v"], factor, scale)
            return
        config, gradient = self.config, self.widened(gradient, scale)
        momentum, wide = state["momentum"].float(), weight.detach().float()
        momentum.mul_(config.muon_momentum).add_(gradient)
        rate = config.muon_learning_rate * factor
        wide.mul_(1 - rate * self.decay(name))
        stretch = max(1.0, weight.shape[0] / weight.shape[1]) ** 0.5
        direction = orthogonal(gradient.add(momentum, alpha=config.muon_momentum))
        wide.add_(direction, alpha=-rate * stretch)
        if weight.dtype != torch.float32:
            self.keep(name, state["momentum"], momentum, shift=FIRST)
            self.keep(name, weight, wide)


def orthogonal(x: Tensor) -> Tensor:
    """Orthogonalize ``[rows, columns]``: the same singular vectors, with singular values near 1; bfloat16 on a GPU."""
    a, b, c = COEFFICIENTS
    out = x.to(torch.bfloat16 if x.is_cuda else torch.float32)
    wide = x.shape[0] > x.shape[1]
    out = out.mT if wide else out
    out = out / (out.norm() + 1e-7)
    for _ in range(ROUNDS):
        square = out @ out.mT
        out = a * out + (b * square + c * square @ square) @ out
    return out.mT if wide else out
