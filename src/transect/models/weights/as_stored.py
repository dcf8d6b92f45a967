"""``AsStored``: a matrix in the checkpoint's packing, which may differ between layers.

It stands around a weight of the layout that is expected. If the file's is another one, such as plain numbers in a layer
that was left out of quantization, it makes another weight when it is loaded. All else is asked of that weight.
``WeightAround`` is the base of this and other weights around a weight.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from ...ops.opset import OpSet
from ...spec.numbers.layouts import MatrixLayout
from ...spec.numbers.number_format import WeightFormat
from ..staging import Staging
from ..stored import PackedValues, Values
from .weight import Dimension, Product, StreamProduct, TrainingPart, Weight

if TYPE_CHECKING:
    from ...ops.linear.stream_products import StreamProducts


class WeightAround(Weight):
    """A weight around ``inner``, which has its values, memory and format."""

    inner: Weight

    def dense(self) -> Tensor:
        return self.inner.dense()

    def training_part(self) -> TrainingPart:
        return self.inner.training_part()

    @property
    def nbytes(self) -> int:
        return self.inner.nbytes

    @property
    def workspace(self) -> int:
        return self.inner.workspace

    @property
    def format(self) -> WeightFormat:
        return self.inner.format


class AsStored(WeightAround):
    """A weight around ``make(layout, outputs, inputs, bias, ops=, device=, dtype=)``.

    ``layout`` is the expected one, None if plain numbers are.
    """

    def __init__(
        self,
        out_features: int,
        in_features: int,
        bias: bool = False,
        *,
        layout: MatrixLayout | None,
        make: Callable[..., Weight],
        ops: OpSet,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(out_features, in_features)
        self._make, self._layout, self._settings = make, layout, {"ops": ops, "dtype": dtype}
        self.inner = make(layout, out_features, in_features, bias, device=device, **self._settings)

    @classmethod
    def _around(cls, inner: Weight, like: AsStored) -> AsStored:
        made = cls.__new__(cls)
        Weight.__init__(made, *inner.shape)
        made._make, made._layout, made._settings = like._make, like._layout, like._settings
        made.inner = inner
        return made

    @property
    def bias(self) -> nn.Parameter | None:  # type: ignore[override]
        """Bias of the inner weight."""
        return self.inner.bias

    def takes(self, layout: MatrixLayout) -> bool:
        return True

    def load(self, values: Values | PackedValues, staging: Staging) -> None:
        layout = values.layout if isinstance(values, PackedValues) else None
        if layout != self._layout:
            old, self._layout = self.inner, layout
            device = next(t.device for t in (*old.parameters(), *old.buffers()))
            biased = old.bias is not None
            self.inner = self._make(layout, *old.shape, biased, device=device, **self._settings)
            if old.bias is not None and self.inner.bias is not None:
                self.inner.bias.data = old.bias.data
            self.inner.requires_grad_(False)
        self.inner.load(values, staging)  # type: ignore[arg-type]

    def forward(self, x_TI: Tensor) -> Tensor:
        return self.inner(x_TI)  # type: ignore[no-any-return]

    def shard(self, dim: Dimension, rank: int, n: int) -> Weight:
        return self._around(self.inner.shard(dim, rank, n), self)

    def rows(self, index_T: Tensor) -> Tensor:
        return self.inner.rows(index_T)

    def grouped(self, x: Tensor, starts: Tensor, order: Tensor | None = None) -> Tensor:
        return self.inner.grouped(x, starts, order)

    def product(self) -> Product:
        return self.inner.product()

    def gated_product(self) -> Product | None:
        return self.inner.gated_product()

    def stream_product(self, products: StreamProducts) -> StreamProduct | None:
        return self.inner.stream_product(products)

    def join_with(self, others: Sequence[Weight], *, gated: bool = False) -> Weight | None:
        inner = [other.inner if isinstance(other, AsStored) else other for other in others]
        return self.inner.join_with(inner, gated=gated)

    def held(self) -> Tensor | None:
        return self.inner.held()

    def tie(self, table: nn.Parameter) -> bool:
        return self.inner.tie(table)
