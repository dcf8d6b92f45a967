"""``Embedding``: a table that rows are gathered from (tokens, learned positions)."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Embedding(nn.Module):
    """``index [T] int64 -> rows [T, D]`` of ``weight [rows, D]``, which is allocated and not initialised."""

    def __init__(
        self, rows: int, dim: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, dim, device=device, dtype=dtype))

    def forward(self, index_T: Tensor) -> Tensor:
        return F.embedding(index_T, self.weight)

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]} rows of {self.weight.shape[1]}"
