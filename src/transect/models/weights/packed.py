"""``Packed``: a matrix in the layout of the C++ CPU kernels, as a file packs it (``ops/cpu/kinds.h``).

Numbers stay in the file's format: a Q4_1 matrix stays in 4 bits. The product is computed in float32, or from inputs in
bfloat16, from exactly the values that dequantizing would give.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise

import torch
from torch import Tensor

from ...formats.affine import AffineGroups
from ...formats.ggml_blocks import QuantizedTensor
from ...ops.cpu.library import GROUP_ROWS, Library, PackedWeight
from ...ops.cpu.packing import pack, pack_fp8, pack_groups
from ...ops.opset import OpSet
from ...spec.numbers.fp8 import FP8
from ...spec.numbers.int4 import INT4, NATIVE_GROUP
from ...spec.numbers.int8 import INT8
from ...spec.numbers.layouts import SCALE_BLOCK, GroupLayout, MatrixLayout, ScaledLayout
from ...spec.numbers.number_format import NumberFormat, WeightFormat
from ...spec.numbers.registry import listed
from ..quantized_layouts import to_fp8, to_int8
from ..staging import Staging, dense_values
from ..stored import Codes4, Codes8
from .weight import Dimension, TrainingPart, Values, Weight, part_of, shard_bias

EMPTY = torch.empty(0, dtype=torch.uint8)


class Packed(Weight):
    """A packed matrix, without values until it is loaded or ``take`` is called.

    Args:
        half: dense matrices are kept in bfloat16, not as they come.
        rounding: all matrices are rounded to this format, one that ``refuses`` has nothing against.
        whole: it is not part of a matrix, so a checkpoint's scales of blocks are whole too.
    """

    batch_invariant = True

    def __init__(
        self,
        out_features: int,
        in_features: int,
        bias: bool = False,
        *,
        library: Library,
        half: bool = False,
        rounding: NumberFormat | None = None,
        whole: bool = True,
        ops: OpSet | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(out_features, in_features)
        self._library, self._half, self._rounding = library, half, rounding
        self._whole = whole
        self._matrix: PackedWeight | None = None
        self.add_bias(bias, "cpu", torch.float32)

    def take(self, matrix: PackedWeight) -> None:
        """Use this packed matrix, which may be mapped from a file."""
        assert (matrix.n, matrix.k) == self.shape
        self._matrix = replace(matrix, bias=None if self.bias is None else self.bias.detach())

    def takes(self, layout: MatrixLayout) -> bool:
        if self._rounding is not None or self.in_features % NATIVE_GROUP:
            return False
        if isinstance(layout, ScaledLayout):
            return self._whole or not layout.blocks
        return isinstance(layout, GroupLayout) and not layout.ordered and layout.group % NATIVE_GROUP == 0

    def load(self, values: Values | Codes8 | Codes4, staging: Staging) -> None:
        if self._rounding is not None:
            assert not isinstance(values, (Codes8, Codes4))  # see ``takes``
            self.take(_ROUNDED[self._rounding](self._library, dense_values(values)))
        elif isinstance(values, (Codes8, Codes4)):
            self.take(_pack_codes(self._library, values))
        else:
            if self._half and isinstance(values, Tensor):
                values = values.to(torch.bfloat16)
            self.take(pack(self._library, values))

    @property
    def matrix(self) -> PackedWeight:
        """Packed matrix with its bias."""
        if self._matrix is None:
            raise ValueError("this matrix has no values yet")
        return self._matrix

    def forward(self, x_TI: Tensor) -> Tensor:
        return self._library.linear(x_TI, self.matrix)

    def grouped(self, x: Tensor, starts: Tensor, order: Tensor | None = None) -> Tensor:
        """Compute one product for each expert with rows, with the groups of rows of that expert."""
        each, matrix = self.out_features // (len(starts) - 1), self.matrix
        size = matrix.data.numel() // -(-self.out_features // GROUP_ROWS)
        rows = x if order is None else x[order.long() // max(1, len(order) // max(1, len(x)))]
        out = rows.new_empty(len(rows), each, dtype=torch.float32)
        for e, (first, end) in enumerate(pairwise(starts.tolist())):
            if end > first:
                low, high = e * each // GROUP_ROWS, -(-(e + 1) * each // GROUP_ROWS)
                begin = low * GROUP_ROWS
                n = min(high * GROUP_ROWS, self.out_features) - begin
                bias = None if matrix.bias is None else matrix.bias[begin : begin + n].contiguous()
                own = replace(matrix, n=n, data=matrix.data[low * size : high * size], bias=bias)
                products = self._library.linear(rows[first:end].contiguous(), own)
                out[first:end] = products[:, e * each - begin : (e + 1) * each - begin]
        return out

    def dense(self) -> Tensor:
        return self._library.rows(self.matrix, torch.arange(self.out_features))

    def rows(self, index_T: Tensor) -> Tensor:
        return self._library.rows(self.matrix, index_T)

    @property
    def nbytes(self) -> int:
        return 0 if self._matrix is None else self._matrix.data.numel()

    @property
    def format(self) -> WeightFormat:
        bits = 8 * self.nbytes / (self.out_features * self.in_features)
        return WeightFormat("packed" if self._matrix is None else self._matrix.kind.name, bits)

    def shard(self, dim: Dimension, rank: int, n: int) -> Packed:
        groups = -(-self.out_features // GROUP_ROWS)
        data = self.matrix.data.view(groups, -1)
        if dim == "out":
            part = part_of(self.out_features, rank, n, GROUP_ROWS, "groups of rows")
            data = data[part.start // GROUP_ROWS : part.stop // GROUP_ROWS]
        else:
            panel = self._library.panel(self.matrix.kind)
            part = part_of(self.in_features, rank, n, panel, "panels of columns")
            each = data.shape[1] * panel // self.in_features
            data = data[:, part.start // panel * each : part.stop // panel * each]
        size = part.stop - part.start
        outputs, inputs = (size, self.in_features) if dim == "out" else (self.out_features, size)
        cut = Packed(outputs, inputs, library=self._library, half=self._half)
        cut.add_bias(shard_bias(self.bias, dim, part, rank))
        cut.take(PackedWeight(self.matrix.kind, outputs, inputs, data.reshape(-1).clone()))
        return cut

    def packed(self, library: Library) -> PackedWeight:
        return self.matrix

    def training_part(self) -> TrainingPart:
        def fill(out: Tensor) -> None:
            out.copy_(self.dense())

        return TrainingPart(self.out_features, self.in_features, torch.empty(0), fill)


class PackedEmbedding(torch.nn.Module):
    """A packed table that rows are gathered from, decoded to float32."""

    def __init__(self, table: Packed) -> None:
        super().__init__()
        self.table = table

    def forward(self, index_T: Tensor) -> Tensor:
        return self.table.rows(index_T)

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, numbers of a row)."""
        return self.table.shape

    @property
    def bits(self) -> float:
        """Bits of a number."""
        return self.table.format.bits

    def load(self, values: Tensor | QuantizedTensor, staging: Staging) -> None:
        """Copy the values of a file, of this shape."""
        self.table.load(values, staging)


def _by_panel(values: Codes8) -> Tensor:
    """Expand scales of rows or blocks to a scale for each ``NATIVE_GROUP`` numbers of each row."""
    panels = values.codes.shape[1] // NATIVE_GROUP
    if values.scale.ndim == 1:
        return values.scale[:, None].expand(-1, panels).contiguous()
    rows = values.scale.repeat_interleave(SCALE_BLOCK, 0)[: len(values.codes)]
    return rows.repeat_interleave(SCALE_BLOCK // NATIVE_GROUP, 1)[:, :panels].contiguous()


def _pack_codes(library: Library, values: Codes8 | Codes4) -> PackedWeight:
    if isinstance(values, Codes8) and values.layout.fp8:
        return pack_fp8(library, values.codes, _by_panel(values))
    return pack_groups(library, groups_of_codes(values))


def groups_of_codes(values: Codes8 | Codes4) -> AffineGroups:
    """Convert a checkpoint's codes, whole numbers of 8 or 4 bits, for the C++ kernels, without rounding."""
    if isinstance(values, Codes8):
        codes = (values.codes.to(torch.int16) + 128).to(torch.uint8)
        wide = values.scale[:, None].expand(-1, codes.shape[1] // NATIVE_GROUP).contiguous()
        return AffineGroups(codes.numpy(), wide.numpy(), (-128 * wide).numpy(), NATIVE_GROUP, 8, half_exact=False)
    times = values.codes.shape[1] // values.scale.shape[1] // NATIVE_GROUP
    scale, zero = (t.repeat_interleave(times, 1).numpy() for t in (values.scale, values.zero))
    return AffineGroups(values.codes.numpy(), scale, zero, NATIVE_GROUP, 4, half_exact=False)


def _rounded8(library: Library, values: Tensor, form: NumberFormat) -> PackedWeight:
    codes, scale = (to_fp8 if form is FP8 else to_int8)(values)
    return _pack_codes(library, Codes8(ScaledLayout(form is FP8), codes.view(torch.int8), scale[:, 0]))


def _groups_of_4(weight: Tensor) -> AffineGroups:
    from .int4_serving import affine_groups

    return affine_groups(weight)


_ROUNDED: Mapping[NumberFormat, Callable[[Library, Tensor], PackedWeight]] = {
    INT4: lambda library, values: pack_groups(library, _groups_of_4(values)),
    FP8: lambda library, values: _rounded8(library, values, FP8),
    INT8: lambda library, values: _rounded8(library, values, INT8),
}
"""Functions that round and pack a matrix, by format."""


def refuses(form: NumberFormat) -> str | None:
    """Return the reason why the C++ kernels do not round matrices to a format, as a sentence; None if they do."""
    if form in _ROUNDED:
        return None
    return f"the C++ kernels do not take {form.name}; they take {listed((each.name for each in _ROUNDED), 'and')}"
