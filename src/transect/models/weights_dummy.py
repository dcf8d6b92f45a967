"""Random weights of a true shape, for measuring without a checkpoint: same seed, same weights on the same device."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

import torch
from torch import Tensor

from .config import ModelConfig
from .shapes import weight_shapes

STD = 0.02


def dummy_weights(
    config: ModelConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> Iterator[tuple[str, Tensor]]:
    """Every weight of ``shapes.weight_shapes`` by name: matrices normal with deviation 0.02, norms 1, biases 0.

    Each matrix is drawn from a stream of its own, made of ``seed`` and its name, so the order does not matter. A GPU
    draws other numbers than the CPU does.
    """
    for name, shape in weight_shapes(config).items():
        weight = torch.empty(shape, dtype=dtype, device=device)
        if len(shape) == 2:
            generator = torch.Generator(weight.device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
            weight.normal_(0.0, STD, generator=generator)
        else:
            weight.fill_(0.0 if name.endswith(".bias") else 1.0)
        yield name, weight
