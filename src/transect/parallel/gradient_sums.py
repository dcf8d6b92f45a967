"""Sums of the gradients of a step's micro-batches on one rank, by parameter."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn


def collect(parameters: Mapping[str, nn.Parameter], sums: dict[str, Tensor]) -> None:
    """Move the gradients in 16 bits to ``sums`` in float32, where later ones are not lost. Those in float32 add up in
    the parameters themselves."""
    for name, parameter in parameters.items():
        if parameter.grad is not None and parameter.dtype != torch.float32:
            if name in sums:
                sums[name].add_(parameter.grad)
            else:
                sums[name] = parameter.grad.float()
            parameter.grad = None


def collected(parameters: Mapping[str, nn.Parameter], sums: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the gradient of each parameter that has one: its sum, or else the parameter's own."""
    found = {name: sums.get(name, parameter.grad) for name, parameter in parameters.items()}
    return {name: gradient for name, gradient in found.items() if gradient is not None}
