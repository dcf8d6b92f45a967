r"""``Adapted``: low-rank factors beside a frozen weight of any kind (Hu et al. 2021, arXiv:2106.09685).

    y = W x + (alpha / rank) B A x        A [rank, in] random, B [out, rank] zero at the start, W frozen

At the start it is the base exactly.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from ...ops.cpu.training import Kernels
from ..staging import Staging
from ..storage import WeightFormat
from .adapted_product import adapted_product
from .weight import Adapter, Dimension, TrainingPart, Values, Weight, part_of


class Adapted(Weight):
    """``base`` with ``a [rank, I]`` and ``b [O, rank]``, which are trained. The bias is the base's.

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
    ) -> None:
        super().__init__(base.out_features, base.in_features)
        self.base = base
        self.native = None if base.held() is None else native
        self.scale = alpha / rank
        like = base.training_part().like
        if not like.is_floating_point():
            raise ValueError("an adapter needs a base with floating-point weights or scales")
        generator = torch.Generator().manual_seed(seed)
        bound = 1 / math.sqrt(base.in_features)
        a = torch.empty(rank, base.in_features).uniform_(-bound, bound, generator=generator)
        self.a = nn.Parameter(a.to(like.device, like.dtype))
        self.b = nn.Parameter(torch.zeros(base.out_features, rank, device=like.device, dtype=like.dtype))

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
        out: Tensor = self.base(x_TI)
        return torch.addmm(out, x_TI @ self.a.mT, self.b.mT, alpha=self.scale)

    def dense(self) -> Tensor:
        """The plain matrix that computes the same, in the base's dtype; without a gradient."""
        with torch.no_grad():
            weight = self.base.dense()
            return (weight.float() + self.scale * (self.b.float() @ self.a.float())).to(weight.dtype)

    @property
    def format(self) -> WeightFormat:
        base = self.base.format
        beside = 8 * (self.a.nbytes + self.b.nbytes) / (self.out_features * self.in_features)
        return WeightFormat(f"{base.name} with an adapter", base.bits + beside)

    @property
    def nbytes(self) -> int:
        return self.base.nbytes + self.a.nbytes + self.b.nbytes

    def shard(self, dim: Dimension, rank: int, n: int) -> Adapted:
        cut = Adapted(self.base.shard(dim, rank, n), self.a.shape[0], self.scale * self.a.shape[0], seed=0)
        with torch.no_grad():
            if dim == "out":
                cut.a.copy_(self.a)
                cut.b.copy_(self.b[part_of(self.out_features, rank, n)])
            else:
                cut.a.copy_(self.a[:, part_of(self.in_features, rank, n)])
                cut.b.copy_(self.b)
        cut.native = None if cut.base.held() is None else self.native
        return cut

    def load(self, values: Values, staging: Staging) -> None:
        self.base.load(values, staging)

    def training_part(self) -> TrainingPart:
        part = self.base.training_part()
        return replace(part, parameter=None, adapter=Adapter(self.a, self.b, self.scale))
