"""``Embedding``: a table that rows are gathered from (tokens, learned positions)."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..formats.ggml_blocks import QuantizedTensor
from .staging import Staging, dense_values


class Embedding(nn.Module):
    """``index [T] int64 -> rows [T, D]`` of ``weight [rows, D]``, which is allocated and not initialised."""

    lookup: Callable[[Tensor, Tensor], Tensor] | None = None
    """Function that gathers the rows, if their gradient does not go to the weight; None for torch's."""

    def __init__(
        self, rows: int, dim: int, *, device: torch.device | str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, dim, device=device, dtype=dtype))

    def forward(self, index_T: Tensor) -> Tensor:
        if self.lookup is not None:
            return self.lookup(index_T, self.weight)
        return F.embedding(index_T, self.weight)

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, numbers of a row)."""
        return tuple(self.weight.shape)

    @property
    def bits(self) -> float:
        """Bits of a number."""
        return 8 * self.weight.element_size()

    def load(self, values: Tensor | QuantizedTensor, staging: Staging) -> None:
        """Copy the values of a file, of this shape."""
        staging.copy(dense_values(values), self.weight.detach())

    def extra_repr(self) -> str:
        return f"{self.weight.shape[0]} rows of {self.weight.shape[1]}"
