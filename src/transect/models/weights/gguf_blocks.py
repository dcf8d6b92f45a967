"""``GGUFBlocks``: a matrix in a block type of GGUF files, in the file's own bits, multiplied as it is
(``ops/linear/packed/gguf/gguf_matmul.py``). For inference on a GPU; the C++ CPU kernels have ``Packed``."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from typing import Any

import torch
from torch import Tensor

from ...ops.activation import swiglu
from ...ops.lang.jit import runs_triton
from ...ops.linear import gate_up
from ...ops.linear.few_rows.cuda import Beside
from ...ops.linear.packed.chain import ChainWeights
from ...ops.linear.packed.gguf import gguf_chain, gguf_matmul, gguf_row
from ...ops.linear.packed.gguf.gguf_layout import COLUMNS, ROWS, arrange, arranged_shape, dense
from ...ops.linear.packed.gguf.gguf_row import BlockPart, Matrix
from ...ops.linear.stream_products import ResidualStream, Size, StreamProducts
from ...ops.moe import grouped_blocks
from ...ops.opset import OpSet
from ...spec.numbers.gguf import UNITS
from ...spec.numbers.layouts import BlockLayout, MatrixLayout
from ...spec.numbers.number_format import NumberFormat, WeightFormat
from ..staging import Staging
from ..stored import BlockCodes
from .in_blocks import join_blocks
from .weight import (
    Chain,
    Dimension,
    Product,
    StreamProduct,
    TrainingPart,
    Values,
    Weight,
    WeightKind,
    WeightSite,
    by_expert,
    join_biases,
    part_of,
    shard_bias,
)


class GGUFBlocks(Weight):
    """Buffer ``arranged``: uint8, see ``ops/linear/packed/gguf/gguf_layout.py``; joined with others, a view along its
    first dimension."""

    arranged: Tensor

    def __init__(
        self,
        out_features: int,
        in_features: int,
        bias: bool = False,
        *,
        block_type: str,
        products: gguf_matmul.Products,
        ops: OpSet | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(out_features, in_features)
        self.block_type, self.in_turns = block_type, False
        self._products, self._dtype = products, dtype or torch.get_default_dtype()
        shape = arranged_shape(UNITS[block_type], out_features, in_features)
        self.register_buffer("arranged", torch.empty(shape, dtype=torch.uint8, device=device))
        self.add_bias(bias, device, dtype)

    def takes(self, layout: MatrixLayout) -> bool:
        return isinstance(layout, BlockLayout) and layout.units.name == self.block_type

    def load(self, values: Values | BlockCodes, staging: Staging) -> None:
        if not isinstance(values, BlockCodes):
            raise ValueError(f"{self.block_type} blocks can only be read from a file, and the file holds other numbers")
        self.arranged.copy_(arrange(self.block_type, staging.bring(values.blocks), self.in_features))

    def draw(self, std: float, generator: torch.Generator | None = None) -> None:
        """Fill with random codes and small scales; ``std`` has no effect."""
        device = None if generator is None else generator.device
        seed = int(torch.randint(1 << 31, (), generator=generator, device=device))
        outputs, inputs = self.shape
        self.arranged.copy_(gguf_matmul.drawn(self.block_type, outputs, inputs, self.arranged.device, seed))

    def forward(self, x_TI: Tensor) -> Tensor:
        return self.product()(x_TI)

    def grouped(self, x: Tensor, starts: Tensor, order: Tensor | None = None) -> Tensor:
        if self.out_features % (ROWS * (len(starts) - 1)):
            return super().grouped(x, starts, order)
        if not runs_triton(x) or not x.is_cuda:
            return by_expert(self, x, starts, order)
        call = grouped_blocks.triton_grouped_blocks
        return call(x, self.arranged, self.block_type, self.out_features, starts, order, self.bias)

    def dense(self) -> Tensor:
        kind = UNITS[self.block_type]
        rows = dense(self.arranged, kind, self.out_features, self.in_features, self._dtype)
        return rows.unflatten(0, (-1, 2, ROWS)).transpose(0, 1).flatten(0, 2) if self.in_turns else rows

    @property
    def workspace(self) -> int:
        """Bytes of the matrix, which is rebuilt for many rows."""
        return self._dtype.itemsize * self.out_features * self.in_features

    @property
    def format(self) -> WeightFormat:
        return WeightFormat(self.block_type, 8 * self.arranged.nbytes / (self.out_features * self.in_features))

    def product(self) -> Product:
        run, weight, name = self._products, self.arranged.contiguous(), self.block_type
        outputs, bias = self.out_features, self.bias
        if self.in_turns:
            return lambda x: run(x, weight, name, outputs).unflatten(-1, (-1, 2, ROWS)).transpose(1, 2).flatten(1)
        return lambda x: run(x, weight, name, outputs, bias)

    def gated_product(self) -> Product | None:
        if not self.in_turns:
            return None
        products, weight, name, outputs = self._products, self.arranged, self.block_type, self.out_features

        def gated(x: Tensor) -> Tensor:
            at_once = products.gated(x, weight, name, outputs)
            if at_once is not None:
                return at_once
            both = products(x, weight, name, outputs)
            if x.is_cuda:
                return gate_up.gate_halves(both, turns=ROWS, dependent_launch=products.dependent)
            turns = both.unflatten(-1, (-1, 2, ROWS))
            return swiglu.by_exp(turns[:, :, 0].flatten(1), turns[:, :, 1].flatten(1))

        return gated

    def stream_product(self, products: StreamProducts) -> BlockStream | None:
        row = self._products.row
        if row is None or not self._products.dependent or self.in_features % COLUMNS:
            return None
        matrix = (BlockPart(self.arranged.contiguous(), self.block_type, self.out_features),)
        if gguf_row.refusal(matrix) is not None:
            return None
        return BlockStream(row, self._products.chain, matrix, self.bias)

    def join_with(self, others: Sequence[Weight], *, gated: bool = False) -> GGUFBlocks | None:
        parts = [self]
        for other in others:
            if isinstance(other, GGUFBlocks) and other.block_type == self.block_type:
                parts.append(other)
        found = join_blocks(parts, ROWS, 0, gated=gated) if len(parts) > len(others) else None
        if found is None:
            return None
        whole, in_turns = found
        joined = self._over(whole, sum(part.out_features for part in parts), self.in_features)
        joined.in_turns = in_turns
        joined.add_bias(join_biases(parts))
        return joined

    def shard(self, dim: Dimension, rank: int, n: int) -> GGUFBlocks:
        if dim == "out":
            part = part_of(self.out_features, rank, n, ROWS, "units of rows")
            arranged = self.arranged[part.start // ROWS : part.stop // ROWS]
        else:
            part = part_of(self.in_features, rank, n, COLUMNS, "units of columns")
            arranged = self.arranged[:, part.start // COLUMNS : part.stop // COLUMNS]
        size = part.stop - part.start
        shape = (size, self.in_features) if dim == "out" else (self.out_features, size)
        cut = self._over(arranged.clone(memory_format=torch.contiguous_format), *shape)
        cut.add_bias(shard_bias(self.bias, dim, part, rank))
        return cut

    def training_part(self) -> TrainingPart:
        def fill(out: Tensor) -> None:
            out.copy_(self.dense())

        like = torch.empty(0, dtype=self._dtype, device=self.arranged.device)
        return TrainingPart(self.out_features, self.in_features, like, fill)

    def _over(self, arranged: Tensor, outputs: int, inputs: int) -> GGUFBlocks:
        made = GGUFBlocks(
            outputs, inputs, block_type=self.block_type, products=self._products, device="meta", dtype=self._dtype
        )
        made.arranged = arranged
        return made


class BlockHolder:
    """Blocks of GGUF files, see ``Holder``. Nothing is rounded to them here."""

    def __init__(self, site: WeightSite) -> None:
        self._site = site

    @cached_property
    def _products(self) -> gguf_matmul.Products:
        site = self._site
        return gguf_matmul.Products(site.device, dependent=site.dependent, chained=site.chained)

    def rounded(self, form: NumberFormat) -> WeightKind | None:
        return None

    def stored(self, layout: MatrixLayout) -> WeightKind | None:
        if not isinstance(layout, BlockLayout):
            return None
        return partial(GGUFBlocks, block_type=layout.units.name, products=self._products)


class BlockStream:
    """The products of a matrix in blocks on the residual stream (``ops/linear/stream_products.py``), of one row."""

    def __init__(
        self, kernel: gguf_row.GGUFRow, chain: gguf_chain.GGUFChain | None, matrix: Matrix, bias: Tensor | None
    ) -> None:
        self._kernel, self._chain, self._matrix, self._bias = kernel, chain, matrix, bias

    @property
    def biased(self) -> bool:
        """True if ``linear`` adds a bias; other products have none."""
        return self._bias is not None

    @property
    def leaves(self) -> object:
        """Norm's input and its sums of squares, in the dtype of the stream."""
        return BlockStream

    def takes(self, x: Tensor, sizes: Sequence[Size], wanted: int | None = None) -> bool:
        """Return True if the kernel runs a step on the stream x ``[M, D]`` with products of these sizes, and all tokens
        are wanted."""
        return wanted is None and gguf_row.takes(x, sizes)

    def add(self, x: Tensor, residual: Tensor, scale: Tensor, eps: float) -> ResidualStream:
        beside = Beside(residual=residual, scale=scale)
        total, scaled, squares = self._kernel(x, self._matrix, None, beside, dependent_launch=True)
        assert scaled is not None and squares is not None
        return ResidualStream(total, scaled, squares, eps)

    def linear(self, stream: ResidualStream) -> Tensor:
        beside = Beside(squares=stream.squares, eps=stream.eps)
        return self._kernel(stream.scaled, self._matrix, self._bias, beside, dependent_launch=True)[0]

    def plain(self, x: Tensor) -> Tensor:
        return self._kernel(x, self._matrix, dependent_launch=True)[0]

    def gated(self, stream: ResidualStream) -> Tensor:
        beside = Beside(squares=stream.squares, eps=stream.eps)
        return self._kernel(stream.scaled, self._matrix, None, beside, gated=True, dependent_launch=True)[0]

    def stack(self, below: Sequence[StreamProduct | None]) -> BlockStream | None:
        """Stack other matrices, of other block types, below this one."""
        parts = [self, *(each for each in below if isinstance(each, BlockStream))]
        biases = [part._bias for part in parts if part._bias is not None]
        matrix = tuple(block for part in parts for block in part._matrix)
        if len(parts) <= len(below) or len(biases) not in (0, len(parts)) or gguf_row.refusal(matrix) is not None:
            return None
        bias = torch.cat([each.detach() for each in biases]) if biases else None
        return BlockStream(self._kernel, self._chain, matrix, bias)

    def chain(self, after: Sequence[StreamProduct]) -> Chain | None:
        parts = [self, *(each for each in after if isinstance(each, BlockStream))]
        if len(parts) < 4:
            return None
        o, gate_up, down, qkv = parts
        matrices, bias, kernel = (o._matrix, gate_up._matrix, down._matrix, qkv._matrix), qkv._bias, self._chain
        if kernel is None or gguf_chain.sizes_refusal(matrices) is not None:
            return None

        def run(x: Tensor, residual: Tensor, norms: tuple[Tensor, Tensor], eps: tuple[float, float]) -> Any:
            return kernel(x, residual, ChainWeights(*matrices, norms, eps, bias), dependent_launch=True)

        return run
