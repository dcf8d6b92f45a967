r"""``Adapted``: low-rank factors beside a frozen weight of any kind (Hu et al. 2021, arXiv:2106.09685).

    y = W x + s B A x        A [rank, in] random, B [out, rank] zero at the start, W frozen

s is alpha / rank, or alpha / sqrt(rank) where it is rank-stabilised (Kalajdzievski 2023, arXiv:2312.03732). With a
magnitude m for each output it is DoRA (Liu et al. 2024, arXiv:2402.09353), n the norms of the rows of W + s B A, which
have no gradient:

    y = m / n (W + s B A) x        m = n at the start

With dropout the adapter's part sees some inputs as 0. At the start all of these are the base exactly.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.cpu.training import Kernels
from ...spec.numbers.number_format import WeightFormat
from ..staging import Staging
from .adapted_product import adapted_product
from .dropout import Dropout
from .low_rank import LowRank
from .weight import Adapter, Dimension, Product, TrainingPart, Values, Weight, part_of


class Adapted(Weight):
    """``base`` with ``a [rank, I]``, ``b [O, rank]`` and DoRA's ``m [O]`` or None, which are trained. The bias is the
    base's.

    ``native`` computes it where the base is held dense in float32 on the CPU.
    """

    def __init__(
        self,
        base: Weight,
        rank: int,
        alpha: float,
        *,
        seed: int,
        native: Kernels | None = None,
        rank_stabilized: bool = False,
        dora: bool = False,
        dropout: Dropout | None = None,
    ) -> None:
        super().__init__(base.out_features, base.in_features)
        self.base = base
        self.dropout = dropout
        dropped = dropout is not None and dropout.p > 0
        self.native = None if base.held() is None or dora or dropped else native
        self.scale = alpha / (math.sqrt(rank) if rank_stabilized else rank)
        like = base.training_part().like
        if not like.is_floating_point():
            raise ValueError("an adapter needs a base with floating-point weights or scales")
        generator = torch.Generator().manual_seed(seed)
        bound = 1 / math.sqrt(base.in_features)
        a = torch.empty(rank, base.in_features).uniform_(-bound, bound, generator=generator)
        self.a = nn.Parameter(a.to(like.device, like.dtype))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank, device=like.device, dtype=like.dtype))
        self._fixed: Tensor | None = None
        self.m: nn.Parameter | None = None
        if dora:
            norms = torch.linalg.vector_norm(base.dense().detach(), dim=1)
            self.m = nn.Parameter(norms.to(like.device, like.dtype))

    @classmethod
    def over(cls, base: Weight, low: LowRank, **options: Any) -> Adapted:
        """Build an adapter over given factors; ``options`` as for the constructor."""
        made = cls(base, low.a.shape[0], 1.0, seed=0, **options)
        made.take(low)
        return made

    @torch.no_grad()
    def take(self, low: LowRank) -> None:
        """Copy these factors and their scale."""
        self.scale = low.scale
        self.a.copy_(low.a)
        self.b.copy_(low.b)
        if low.magnitude is not None:
            self.m = nn.Parameter(low.magnitude.to(self.b.device, self.b.dtype), requires_grad=self.b.requires_grad)
            self.native = None

    @property
    def factors(self) -> LowRank:
        """Factors in the form of files."""
        return LowRank(self.a.detach(), self.b.detach(), self.scale, None if self.m is None else self.m.detach())

    @property
    def bias(self) -> Any:  # type: ignore[override]
        """The bias of the base."""
        return self.base.bias

    def forward(self, x_TI: Tensor) -> Tensor:
        if self.native is not None and x_TI.dtype == torch.float32:
            held = self.base.held()
            assert held is not None
            y = adapted_product(self.native, x_TI, held, self.a, self.b, self.scale)
            return y if self.bias is None else y + self.bias
        return self._beside(x_TI, self.base(x_TI), self._share())

    def _beside(self, x_TI: Tensor, out: Tensor, share_O: Tensor | None) -> Tensor:
        """Return the base's product with the adapter's; ``share_O`` is m / n."""
        dropped = x_TI if self.dropout is None else self.dropout(x_TI)
        low = dropped @ self.a.mT
        if share_O is None:
            return torch.addmm(out, low, self.b.mT, alpha=self.scale)
        plain = out if dropped is x_TI else self.base(dropped)
        plain = plain if self.bias is None else plain - self.bias
        return out + (share_O - 1) * plain + (share_O * self.scale) * (low @ self.b.mT)

    @torch.no_grad()
    def _norms(self) -> Tensor:
        """Return the norms of the rows of W + s B A, ``[O]``."""
        moved = LowRank(self.a, self.b, self.scale).applied(self.base.dense())
        return torch.linalg.vector_norm(moved, dim=1).to(self.b.dtype)

    def _share(self) -> Tensor | None:
        """Return m / n ``[O]``; None without m."""
        if self.m is None:
            return None
        return self.m / self._norms() if self._fixed is None else self._fixed

    def fix(self) -> Adapted:
        """Freeze the factors for inference, so that norms are computed once. Returns itself."""
        self.requires_grad_(False)
        self._fixed = None
        self._fixed = self._share()
        return self

    def product(self) -> Product:
        base, share_O = self.base.product(), self._share()
        share_O = None if share_O is None else share_O.detach()
        return lambda x: self._beside(x, base(x), share_O)

    def dense(self) -> Tensor:
        """Return the plain matrix that computes the same, in the base's dtype; with the gradients of the factors."""
        weight = self.base.dense()
        moved = LowRank(self.a, self.b, self.scale).applied(weight)
        if self.m is not None:
            moved = moved * (self.m / torch.linalg.vector_norm(moved.detach(), dim=1))[:, None]
        return moved.to(weight.dtype)

    @property
    def trained(self) -> list[nn.Parameter]:
        """Trained parameters."""
        return [self.a, self.b] if self.m is None else [self.a, self.b, self.m]

    @property
    def format(self) -> WeightFormat:
        base = self.base.format
        beside = 8 * sum(each.nbytes for each in self.trained) / (self.out_features * self.in_features)
        return WeightFormat(f"{base.name} with an adapter", base.bits + beside)

    @property
    def nbytes(self) -> int:
        return self.base.nbytes + sum(each.nbytes for each in self.trained)

    def shard(self, dim: Dimension, rank: int, n: int) -> Adapted:
        low = self.factors
        if dim == "out":
            part = part_of(self.out_features, rank, n)
            low = replace(low, b=low.b[part], magnitude=None if low.magnitude is None else low.magnitude[part])
        elif self.m is not None:
            raise ValueError("DoRA needs the norms of whole rows: its inputs cannot be cut; merge the adapter first")
        else:
            low = replace(low, a=low.a[:, part_of(self.in_features, rank, n)])
        return Adapted.over(self.base.shard(dim, rank, n), low, native=self.native, dropout=self.dropout)

    def load(self, values: Values, staging: Staging) -> None:
        self.base.load(values, staging)

    def unadapted(self) -> tuple[Weight, LowRank | None]:
        return (self.base, self.factors) if self.m is None else (self, None)

    def refuses_merging(self) -> str | None:
        if self.m is not None:
            return "DoRA scales the outputs of a product, which merged layers do not keep"
        if self.dropout is not None and self.dropout.p > 0:
            return "an adapter with dropout has another input than the matrix beside it"
        return self.base.refuses_merging()

    def tie(self, table: nn.Parameter) -> bool:
        return self.base.tie(table)

    def training_part(self) -> TrainingPart:
        if (reason := self.refuses_merging()) is not None:
            raise ValueError(f"{reason}: train with merged = false")
        part = self.base.training_part()
        return replace(part, parameter=None, adapter=Adapter(self.a, self.b, self.scale))
