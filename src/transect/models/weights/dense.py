"""``Dense``: a matrix as numbers of one float type, trained or not."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...ops.opset import OpSet
from ...spec.numbers.dense import dense_format
from ...spec.numbers.number_format import WeightFormat
from ..staging import Staging, dense_values
from .weight import Dimension, Product, StreamProduct, TrainingPart, Values, Weight, draw_normal, part_of, shard_bias

if TYPE_CHECKING:
    from ...ops.linear.stream_products import ResidualStream, Size, StreamProducts


class Dense(Weight):
    """Parameters ``weight [O, I]`` and ``bias [O]`` or None. Allocated and not initialised.

    Joined with others, its parameters are views of one storage; who holds them (an optimizer, a checkpoint) sees no
    difference.
    """

    batch_invariant = True

    def __init__(
        self,
        out_features: int,
        in_features: int,
        bias: bool = False,
        *,
        ops: OpSet,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(out_features, in_features)
        self.ops = ops
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.add_bias(bias, device, dtype)

    @classmethod
    def over(cls, weight: Tensor, bias: Tensor | None, ops: OpSet) -> Dense:
        """Build a frozen weight over existing tensors."""
        made = cls(*weight.shape, ops=ops, device="meta", dtype=weight.dtype)
        made.weight = nn.Parameter(weight, requires_grad=False)
        made.add_bias(bias)
        return made

    def forward(self, x_TI: Tensor) -> Tensor:
        return self.ops.linear(x_TI, self.weight, self.bias)

    def grouped(self, x: Tensor, starts: Tensor, order: Tensor | None = None) -> Tensor:
        return self.ops.grouped_linear(x, self.weight, starts, order, self.bias)

    def grouped_gate_up(self, up: Weight) -> Callable[[Tensor, Tensor, Tensor | None], Tensor] | None:
        if not isinstance(up, Dense) or self.bias is not None or up.bias is not None:
            return None
        return lambda x, starts, order: self.ops.grouped_gate_up(x, self.weight, up.weight, starts, order)

    def dense(self) -> Tensor:
        return self.weight

    @property
    def format(self) -> WeightFormat:
        return dense_format(8 * self.weight.element_size())

    def shard(self, dim: Dimension, rank: int, n: int) -> Dense:
        part = part_of(self.weight.shape[dim == "in"], rank, n)
        weight = self.weight.detach()[part] if dim == "out" else self.weight.detach()[:, part]
        cut = weight.clone(memory_format=torch.contiguous_format)
        return Dense.over(cut, shard_bias(self.bias, dim, part, rank), self.ops)

    def load(self, values: Values, staging: Staging) -> None:
        staging.copy(dense_values(values), self.weight.detach())

    def draw(self, std: float, generator: torch.Generator | None = None) -> None:
        draw_normal(self.weight, std, generator)

    def rows(self, index_T: Tensor) -> Tensor:
        return F.embedding(index_T, self.weight)

    def product(self) -> Product:
        op, weight, bias = self.ops.linear, self.weight, self.bias
        return lambda x: op(x, weight, bias)

    def gated_product(self) -> Product:
        op, weight, bias = self.ops.gate_up, self.weight, self.bias
        return lambda x: op(x, weight, bias)

    def stream_product(self, products: StreamProducts) -> DenseStream:
        return DenseStream(products, self.weight, self.bias)

    def join_with(self, others: Sequence[Weight], *, gated: bool = False) -> Dense | None:
        parts = [self, *(other for other in others if isinstance(other, Dense))]
        biases = [part.bias for part in parts if part.bias is not None]
        alike = len({(part.weight.dtype, part.weight.device) for part in parts}) == 1
        if len(parts) <= len(others) or len(biases) not in (0, len(parts)) or not alike:
            return None
        sizes = [part.out_features for part in parts]
        weight = _together([part.weight.detach() for part in parts])
        for part, view in zip(parts, weight.split(sizes), strict=True):
            part.weight.data = view
        bias = _together([bias.detach() for bias in biases]) if biases else None
        if bias is not None:
            for own, view in zip(biases, bias.split(sizes), strict=True):
                own.data = view
        return Dense.over(weight, bias, self.ops)

    def training_part(self) -> TrainingPart:
        def settle(place: Tensor) -> None:
            self.weight.data = place

        fill = partial(_copy, self.weight)
        return TrainingPart(self.out_features, self.in_features, self.weight, fill, settle, self.weight)

    def held(self) -> Tensor:
        return self.weight

    def tie(self, table: nn.Parameter) -> bool:
        self.weight = table
        return True


class DenseStream:
    """The products of ``StreamProducts`` with one matrix."""

    def __init__(self, products: StreamProducts, weight: Tensor, bias: Tensor | None) -> None:
        self._products, self._weight, self._bias = products, weight, bias

    @property
    def biased(self) -> bool:
        """True if ``linear`` adds a bias; other products have none."""
        return self._bias is not None

    @property
    def leaves(self) -> object:
        """The norm's input and its sums of squares, in the dtype of the stream."""
        return DenseStream

    def takes(self, x: Tensor, sizes: Sequence[Size], wanted: int | None = None) -> bool:
        return wanted is None and self._products.takes(x, sizes)

    def add(self, x: Tensor, residual: Tensor, scale: Tensor, eps: float) -> ResidualStream:
        return self._products.add(x, self._weight, residual, scale, eps)

    def linear(self, stream: ResidualStream) -> Tensor:
        return self._products.linear(stream, self._weight, self._bias)

    def chain(self, after: Sequence[StreamProduct]) -> None:
        """Return None, because there is no such kernel."""

    def plain(self, x: Tensor) -> Tensor:
        return self._products.product(x, self._weight)

    def gated(self, stream: ResidualStream) -> Tensor:
        return self._products.gate_up(stream, self._weight)


def _together(weights: Sequence[Tensor]) -> Tensor:
    """Concatenate matrices ``[O, I]`` or biases ``[O]``: a view if they are contiguous in one memory, else a copy."""
    first, at = weights[0], weights[0].storage_offset()
    memory = first.untyped_storage().data_ptr()
    for weight in weights:
        if not (memory and weight.untyped_storage().data_ptr() == memory and weight.storage_offset() == at):
            return torch.cat([*weights])
        at += weight.numel()
    return first.as_strided((sum(len(weight) for weight in weights), *first.shape[1:]), first.stride())


def _copy(weight: Tensor, place: Tensor) -> None:
    place.copy_(weight.detach())
