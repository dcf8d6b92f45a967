r"""``AdaptedEmbedding``: low-rank factors beside a frozen embedding table.

    row t = E[t] + s B[t] A        A [rank, D] random, B [V, rank] zero at the start, E [V, D] frozen

It is ``Adapted`` for the table ``E``: merged, both are ``E + s B A``.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..embedding import Embedding
from .low_rank import LowRank


class AdaptedEmbedding(nn.Module):
    """``base`` with ``a [rank, D]`` and ``b [V, rank]``, which are trained."""

    batch_invariant = False

    def __init__(self, base: Embedding, rank: int, alpha: float, *, seed: int, rank_stabilized: bool = False) -> None:
        super().__init__()
        self.base = base
        self.scale = alpha / (math.sqrt(rank) if rank_stabilized else rank)
        table = base.weight
        generator = torch.Generator().manual_seed(seed)
        a = torch.empty(rank, table.shape[1]).normal_(generator=generator)
        self.a = nn.Parameter(a.to(table.device, table.dtype))
        self.b = nn.Parameter(torch.zeros(table.shape[0], rank, device=table.device, dtype=table.dtype))

    @property
    def weight(self) -> nn.Parameter:
        """Table of the base, which a head may share."""
        return self.base.weight

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, numbers of a row)."""
        return self.base.shape

    @property
    def factors(self) -> LowRank:
        """Factors in the form of files."""
        return LowRank(self.a.detach(), self.b.detach(), self.scale)

    @torch.no_grad()
    def take(self, low: LowRank) -> None:
        """Copy these factors and their scale."""
        self.scale = low.scale
        self.a.copy_(low.a)
        self.b.copy_(low.b)

    def forward(self, index_T: Tensor) -> Tensor:
        return torch.addmm(self.base(index_T), F.embedding(index_T, self.b), self.a, alpha=self.scale)

    def dense(self) -> Tensor:
        """Return the plain table that gives the same rows."""
        table = self.base.weight
        return LowRank(self.a, self.b, self.scale).applied(table).to(table.dtype)
