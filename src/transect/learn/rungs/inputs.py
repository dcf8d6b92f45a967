"""Inputs that rungs draw: tensors from a generator of numpy, so that every check has other numbers."""

from __future__ import annotations

import inspect
from importlib import import_module
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
    """Generate new normal numbers in the shape and dtype of a floating-point tensor, and positive ones if it has no
    negative ones; every other value stays unchanged."""
    if isinstance(value, Tensor) and value.is_floating_point():
        made = normal(rng, *value.shape, dtype=value.dtype)
        return made.abs() if value.numel() and bool((value >= 0).all()) else made
    return value


def flat(value: Any) -> Any:
    """Return an object of this package as a dict that can be sent to a program: its class, and what makes it again;
    every other value stays unchanged.

    An argument ``lengths_B`` of a class is read from its attribute ``lengths_B``, or else ``lengths``.
    """
    kind = type(value)
    if not kind.__module__.startswith("transect."):
        return value
    names = list(inspect.signature(kind).parameters)
    fields = {name: getattr(value, name if hasattr(value, name) else name.rpartition("_")[0]) for name in names}
    return {"module": kind.__module__, "kind": kind.__qualname__, "fields": fields}


def built(value: Any) -> Any:
    """Make the object that ``flat`` took apart; every other value stays unchanged."""
    if not isinstance(value, dict) or "kind" not in value:
        return value
    return getattr(import_module(value["module"]), value["kind"])(**value["fields"])
