"""Inputs that rungs draw: tensors from a generator of numpy, so that every check has other numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor


def normal(rng: Any, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Generate a tensor of normal numbers in the given shape."""
    return torch.from_numpy(np.asarray(rng.standard_normal(shape, dtype=np.float32))).to(dtype)


def strided(rng: Any, *shape: int) -> Tensor:
    """Generate normal numbers in a tensor of the given shape whose last dimension has the stride 2."""
    return normal(rng, *shape[:-1], 2 * shape[-1])[..., ::2]


def floats(rng: Any, count: int) -> list[float]:
    """Generate a plain list of normal numbers."""
    return [float(each) for each in rng.standard_normal(count)]


def like(rng: Any, value: Any) -> Any:
    """Generate new normal numbers in the shape and dtype of a floating-point tensor; every other value stays
    unchanged."""
    if isinstance(value, Tensor) and value.is_floating_point():
        return normal(rng, *value.shape, dtype=value.dtype)
    return value
