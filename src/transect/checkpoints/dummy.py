"""Random weights of a true shape, for measuring without a checkpoint: same seed, same weights on the same device."""

from __future__ import annotations

import zlib
from functools import partial

import torch
from torch import Tensor

from ..models.stored import Stored, StoredWeights
from ..spec.model import ModelConfig
from ..spec.weights import weight_shapes

STD = 0.02


def dummy_weights(
    config: ModelConfig,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> StoredWeights:
    """Yield every weight of ``shapes.weight_shapes`` by name: matrices normal with deviation 0.02, norms 1, biases 0.

    Each matrix is drawn, whole, when it is read, from a stream of its own, made of ``seed`` and its name, so the order
    does not matter. A GPU draws other numbers than the CPU does.
    """

    last: dict[str, Tensor] = {}
    """Matrix that was drawn last: parts of it are often requested in sequence."""

    def drawn(name: str, shape: tuple[int, ...], rows: slice, columns: slice) -> Tensor:
        if name in last:
            return last[name][rows, columns]
        weight = torch.empty(shape, dtype=dtype, device=device)
        if len(shape) == 1:
            return weight.fill_(0.0 if name.endswith(".bias") else 1.0)[rows]
        generator = torch.Generator(weight.device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        last.clear()
        last[name] = weight.normal_(0.0, STD, generator=generator)
        return weight[rows, columns]

    for name, shape in weight_shapes(config).items():
        yield name, Stored(shape, partial(drawn, name, shape))
