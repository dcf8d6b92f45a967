"""Inputs that rungs draw: tensors from a generator of numpy, so that every check has other numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def normal(rng: Any, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Normal numbers, a tensor ``shape``."""
    return torch.from_numpy(np.asarray(rng.standard_normal(shape, dtype=np.float32))).to(dtype)


def strided(rng: Any, *shape: int) -> Tensor:
    """Normal numbers in a tensor ``shape`` whose last dimension has the stride 2."""
    return normal(rng, *shape[:-1], 2 * shape[-1])[..., ::2]


def floats(rng: Any, count: int) -> list[float]:
    """Normal numbers, a plain list."""
    return [float(each) for each in rng.standard_normal(count)]


def like(rng: Any, value: Any) -> Any:
    """Fresh normal numbers in the shape and dtype of a floating-point tensor; every other value unchanged."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return normal(rng, *value.shape, dtype=value.dtype)
    return value
