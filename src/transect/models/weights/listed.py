"""``Listed``: a matrix in codes of a codebook (``spec/numbers/codebook.py``), rebuilt for each product."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ...ops.opset import OpSet
from ...spec.numbers.layouts import ListedLayout, MatrixLayout
from ...spec.numbers.number_format import Codebook, NumberFormat, WeightFormat
from ..quantized_layouts import byte_values, code_shape, listed_values, scale_shape, to_listed
from ..staging import Staging, dense_values
from ..stored import ListedCodes
from .rebuilt import rebuilt_product
from .weight import Dimension, Values, Weight, WeightKind, WeightSite, part_of, shard_bias


class Listed(Weight):
    """Buffers ``codes`` uint8 and ``scale``, as ``to_listed`` gives them, and ``table``, the values of each byte.
    ``dense`` has ``dtype``.
    """

    codes: Tensor
    scale: Tensor
    table: Tensor

    def __init__(
        self,
        out_features: int,
        in_features: int,
        bias: bool = False,
        *,
        codebook: Codebook,
        ops: OpSet | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(out_features, in_features)
        self.codebook, self.dtype = codebook, dtype or torch.get_default_dtype()
        shapes = (f(codebook, out_features, in_features) for f in (code_shape, scale_shape))
        codes, scale = shapes
        self.register_buffer("codes", torch.empty(codes, dtype=torch.uint8, device=device))
        scale_dtype = getattr(torch, codebook.scale_dtype)
        self.register_buffer("scale", torch.empty(scale, dtype=scale_dtype, device=device))
        self.register_buffer("table", torch.empty(256, 8 // codebook.code_bits, device=device), persistent=False)
        self.add_bias(bias, device, dtype)

    def takes(self, layout: MatrixLayout) -> bool:
        return layout == ListedLayout(self.codebook)

    def load(self, values: Values | ListedCodes, staging: Staging) -> None:
        if isinstance(values, ListedCodes):
            codes, scale = values.codes, values.scale
        else:
            codes, scale = to_listed(staging.bring(dense_values(values)), self.codebook)
        self.codes.copy_(codes)
        self.scale.copy_(scale)
        self.table.copy_(byte_values(self.codebook))

    def forward(self, x_TI: Tensor) -> Tensor:
        return rebuilt_product(x_TI, self)

    def dense(self) -> Tensor:
        return listed_values(self.codes, self.scale, self.table, self.codebook.group, self.in_features).to(self.dtype)

    @property
    def nbytes(self) -> int:
        return self.codes.nbytes + self.scale.nbytes

    @property
    def workspace(self) -> int:
        """Bytes for rebuilding the matrix: its codes as whole numbers, its values and its scales."""
        return 3 * 4 * self.out_features * self.in_features

    @property
    def format(self) -> WeightFormat:
        return WeightFormat(
            f"{len(self.codebook.values)} values", 8 * self.nbytes / (self.out_features * self.in_features)
        )

    def shard(self, dim: Dimension, rank: int, n: int) -> Listed:
        step = self.codebook.group if dim == "in" else 1
        part = part_of(self.shape[dim == "in"], rank, n, step, "groups")
        size = part.stop - part.start
        shape = (size, self.in_features) if dim == "out" else (self.out_features, size)
        cut = Listed(*shape, codebook=self.codebook, device="meta", dtype=self.dtype)
        per_byte, group = 8 // self.codebook.code_bits, self.codebook.group
        if dim == "out":
            codes, scale = self.codes[part], self.scale[part]
        else:
            codes = self.codes[:, part.start // per_byte : part.stop // per_byte]
            scale = self.scale[:, part.start // group : part.stop // group]
        cut.codes, cut.scale, cut.table = codes.clone(), scale.clone(), self.table
        cut.add_bias(shard_bias(self.bias, dim, part, rank))
        return cut


class ListedHolder:
    """Codes of a codebook, see ``Holder``."""

    def __init__(self, site: WeightSite) -> None:
        pass

    def rounded(self, form: NumberFormat) -> WeightKind | None:
        return None if form.codebook is None else partial(Listed, codebook=form.codebook)

    def stored(self, layout: MatrixLayout) -> WeightKind | None:
        return partial(Listed, codebook=layout.codebook) if isinstance(layout, ListedLayout) else None
