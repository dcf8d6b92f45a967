"""Small things that operator files share: the dtype to compute in, and inputs to try an operator on."""

from __future__ import annotations

import torch
from torch import Tensor


def compute_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for float64, else float32: sums and exponentials of half inputs are computed in float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def sample(*shape: int, seed: int = 0) -> Tensor:
    """Generate float32 normal numbers, the same on every machine."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
