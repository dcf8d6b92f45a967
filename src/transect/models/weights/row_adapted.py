r"""``RowAdapted``: a frozen weight of any kind, to which each row of a step adds the low-rank product of its adapter.

    y_t = W x_t + s B A x_t        with s, A, B of the adapter that row t has; W x_t if it has none

The factors of all adapters lie in tensors with a slot for each (``ops/linear/adapters``), at addresses that do not
change. So a CUDA graph of a step serves any adapters, and one is loaded by copies into its slot. Which slot each row
has is in ``StepRows``, which the executor sets before a step. If no row has an adapter, everything that the base can do
is done: its gated products, and those on the residual stream.

Shapes: T rows, I inputs, O outputs, S slots, P parts, R the largest rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from ...ops.linear.gate_up import gate_halves
from ...ops.opset import OpSet
from ...spec.numbers.number_format import WeightFormat
from ..staging import Staging
from .low_rank import Factors, LowRank
from .weight import Chain, Gated, Product, StreamProduct, TrainingPart, Values, Weight

if TYPE_CHECKING:
    from ...ops.linear.stream_products import ResidualStream, Size, StreamProducts


class StepRows:
    """The adapters of the rows of the present step; one object for all weights of a model."""

    def __init__(self) -> None:
        self.slots_T: Tensor | None = None
        """int32 ``[T]``: slot of each row's adapter, -1 for none; None if no row has an adapter."""

    def only(self, rows_R: Tensor) -> None:
        """Continue in the last layer with these rows of the step."""
        if self.slots_T is not None:
            self.slots_T = self.slots_T.index_select(0, rows_R)


class RowAdapters(Protocol):
    """Slots for the adapters of a model."""

    slots: int
    rows: StepRows

    def prepare(self, factors: Factors) -> Any:
        """Convert factors to the form that ``put`` takes, in host memory. May be called in any thread."""
        ...

    def put(self, slot: int, prepared: Any) -> None:
        """Fill a slot that no step in flight reads on the host."""
        ...


class RowAdapted(Weight):
    """``base`` with buffers ``a [S, P R, I]``, ``b [S, R, O]`` and ``scale [S, P]``, float32.

    Args:
        base: its product is the same for all rows.
        rows: of the step.
        ops: operators of the model.
        factors: a, b and scale.
        sizes: outputs of each part; several where ``base`` is several matrices in one storage.
    """

    a: Tensor
    b: Tensor
    scale: Tensor

    def __init__(
        self,
        base: Weight,
        rows: StepRows,
        ops: OpSet,
        factors: tuple[Tensor, Tensor, Tensor],
        sizes: tuple[int, ...],
    ) -> None:
        super().__init__(base.out_features, base.in_features)
        self.base, self.step_rows, self.ops, self.sizes = base, rows, ops, sizes
        for name, tensor in zip(("a", "b", "scale"), factors, strict=True):
            self.register_buffer(name, tensor)

    @classmethod
    def over(
        cls,
        base: Weight,
        rows: StepRows,
        ops: OpSet,
        *,
        slots: int,
        rank: int,
        device: torch.device,
        dtype: torch.dtype,
    ) -> RowAdapted:
        """Build a weight with room for adapters, but without any."""
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        a, b = (
            torch.zeros(slots, rank, base.in_features, **options),
            torch.zeros(slots, rank, base.out_features, **options),
        )
        return cls(base, rows, ops, (a, b, torch.zeros(slots, 1, device=device)), (base.out_features,))

    def put(self, slot: int, low: LowRank | None) -> None:
        """Copy factors into a slot, on the present stream; None for an adapter that has none for this matrix."""
        if low is None:
            self.scale[slot] = 0.0
            return
        rank, a, b = low.a.shape[0], self.a[slot], self.b[slot]
        a[:rank].copy_(low.a, non_blocking=True)
        b[:rank].copy_(low.b.T, non_blocking=True)
        a[rank:].zero_()
        b[rank:].zero_()
        self.scale[slot] = low.scale

    @property
    def batch_invariant(self) -> bool:  # type: ignore[override]
        """True if the base is; the operators of the model decide the rest."""
        return self.base.batch_invariant

    @property
    def bias(self) -> Any:  # type: ignore[override]
        """The bias of the base."""
        return self.base.bias

    def forward(self, x_TI: Tensor) -> Tensor:
        return self._beside(x_TI, self.base)

    def _beside(self, x_TI: Tensor, base: Product) -> Tensor:
        slots_T = self.step_rows.slots_T
        if slots_T is None:
            return base(x_TI)
        low_rank = x_TI, self.a, self.b, self.scale, slots_T, self.sizes
        added: Tensor = self.ops.add_low_rank(lambda: base(x_TI), *low_rank)
        return added

    def dense(self) -> Tensor:
        return self.base.dense()

    def product(self) -> Product:
        base = self.base.product()
        return lambda x: self._beside(x, base)

    def gated_product(self) -> Product | None:
        gated = self.base.gated_product()
        if gated is None:
            return None
        whole, swiglu, rows, half = self.product(), self.ops.swiglu, self.step_rows, self.out_features // 2
        # A kernel with the gate inside does not round before it: a row would have other bits in a step with adapters.
        rounds_once = not self.ops.is_batch_invariant("add_low_rank")

        def run(x: Tensor) -> Tensor:
            if rows.slots_T is None and rounds_once:
                return gated(x)
            y = whole(x)
            return gate_halves(y) if y.is_cuda else swiglu(y[:, :half], y[:, half:])  # type: ignore[no-any-return]

        return run

    def stream_product(self, products: StreamProducts) -> StreamProduct | None:
        base = self.base.stream_product(products)
        return None if base is None else _WithoutAdapters(base, self.step_rows)

    def join_with(self, others: Sequence[Weight], *, gated: bool = False) -> RowAdapted | None:
        parts = [self, *(other for other in others if isinstance(other, RowAdapted))]
        if len(parts) <= len(others):
            return None
        base = self.base.join_with([part.base for part in parts[1:]], gated=gated)
        if base is None:
            return None
        rank = self.a.shape[1]
        sizes = tuple(part.out_features for part in parts)
        a, b = torch.cat([part.a for part in parts], 1), torch.cat([part.b for part in parts], 2)
        scale = torch.cat([part.scale for part in parts], 1)
        for number, (part, own) in enumerate(zip(parts, b.split(sizes, 2), strict=True)):
            part.a, part.b = a[:, number * rank : (number + 1) * rank], own
            part.scale = scale[:, number : number + 1]
        return RowAdapted(base, self.step_rows, self.ops, (a, b, scale), sizes)

    @property
    def format(self) -> WeightFormat:
        return self.base.format

    @property
    def nbytes(self) -> int:
        return self.base.nbytes + sum(each.nbytes for each in (self.a, self.b, self.scale))

    @property
    def workspace(self) -> int:
        return self.base.workspace

    def load(self, values: Values, staging: Staging) -> None:
        self.base.load(values, staging)

    def training_part(self) -> TrainingPart:
        raise ValueError("adapters of rows are for serving: train one with a LoRA section of a run")


class _WithoutAdapters:
    """A base's products on a stream, for steps in which no row has an adapter."""

    def __init__(self, base: StreamProduct, rows: StepRows) -> None:
        self.base, self._rows = base, rows

    @property
    def biased(self) -> bool:
        return self.base.biased

    @property
    def leaves(self) -> object:
        return self.base.leaves

    def takes(self, x: Tensor, sizes: Sequence[Size], wanted: int | None = None) -> bool:
        """Return True if no row has an adapter, and the base takes the step."""
        return self._rows.slots_T is None and self.base.takes(x, sizes, wanted)

    def add(self, x: Gated, residual: Tensor, scale: Tensor, eps: float) -> ResidualStream:
        return self.base.add(x, residual, scale, eps)

    def linear(self, stream: ResidualStream) -> Tensor:
        return self.base.linear(stream)

    def plain(self, x: Gated) -> Tensor:
        return self.base.plain(x)

    def gated(self, stream: ResidualStream) -> Gated:
        return self.base.gated(stream)

    def chain(self, after: Sequence[StreamProduct]) -> Chain | None:
        return self.base.chain([each.base if isinstance(each, _WithoutAdapters) else each for each in after])

    def stack(self, below: Sequence[StreamProduct | None]) -> StreamProduct | None:
        """Combine this matrix and others below it into one product; None if there is no such kernel."""
        combine: Callable[..., StreamProduct | None] | None = getattr(self.base, "stack", None)
        if combine is None:
            return None
        found = combine([each.base if isinstance(each, _WithoutAdapters) else each for each in below])
        return None if found is None else _WithoutAdapters(found, self._rows)
