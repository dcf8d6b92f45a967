"""``Scaled8``: 8-bit codes, whole numbers or fp8, with a scale for each output or, of fp8, for each block of 128
outputs by 128 inputs; rounded when a model is loaded, or as a checkpoint holds them.

Kernels of a product in bfloat16 on an NVIDIA GPU (``ops/linear/packed/eight_bit``): for up to 16 rows ``scaled8_rows``
streams the codes and does not round the input. For more rows ``scaled8_tiles`` rounds each row to 8 bits and multiplies
on tensor cores, if ``rounds_inputs`` allows it and the GPU multiplies fp8 (Ada and later). If ``Stream8`` is used, the
norm and the gate before a product do this rounding. Otherwise a Triton kernel decodes the codes (``scaled8``); without
Triton torch decodes some outputs at a time.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...hardware.device import target_of
from ...ops.activation import swiglu
from ...ops.lang.jit import runs_triton
from ...ops.linear import gate_up
from ...ops.linear.few_rows.cuda import Beside
from ...ops.linear.linear import invariant_linear
from ...ops.linear.packed.chain import ChainWeights
from ...ops.linear.packed.eight_bit import scaled8_chain, scaled8_hopper, scaled8_rounding, scaled8_rows, scaled8_tiles
from ...ops.linear.packed.eight_bit.scaled8 import triton_scaled8
from ...ops.linear.packed.eight_bit.scaled8_chain import Matrix8
from ...ops.linear.packed.eight_bit.scaled8_rounding import BLOCK, Rounded
from ...ops.linear.stream_products import ResidualStream, Size, StreamProducts
from ...ops.moe import grouped_scaled8
from ...ops.opset import OpSet
from ...ops.registry import Unavailable
from ...spec.numbers.fp8 import FP8
from ...spec.numbers.int8 import INT8
from ...spec.numbers.layouts import MatrixLayout, ScaledLayout
from ...spec.numbers.number_format import NumberFormat, WeightFormat
from ..quantized_layouts import to_fp8, to_int8
from ..staging import Staging, dense_values
from ..stored import Codes8
from .weight import (
    Chain,
    Dimension,
    Product,
    StreamProduct,
    Values,
    Weight,
    WeightKind,
    WeightSite,
    by_expert,
    part_of,
    shard_bias,
)

log = logging.getLogger(__name__)
OUTPUTS = 2048
"""Outputs whose codes torch decodes at a time."""


@dataclass(frozen=True, slots=True)
class Products8:
    """Kernels of a model's products in 8 bits, resolved once for a device. Without either the codes are decoded for
    each product."""

    few: scaled8_rows.CudaRows8 | None = None
    many: scaled8_tiles.Tiles8 | None = None
    dependent: bool = False
    """True if launches begin before the previous kernel ends."""
    chain: scaled8_chain.CudaChain | None = None
    """Kernel of a layer's last three products and the next layer's first in one launch, for one row."""
    batch_invariant: bool = False
    """True if rows do not depend on each other: any number of rows runs by ``many``, or with the codes decoded."""

    @classmethod
    def on(
        cls,
        device: torch.device | str,
        *,
        dependent: bool = False,
        fp8: bool = True,
        blocks: bool = False,
        batch_invariant: bool = False,
    ) -> Products8:
        """Return the fastest kernels for ``device``.

        Args:
            dependent: with dependent launch where the device has it.
            fp8: the weights are in fp8, else whole numbers.
            blocks: their scales are of blocks.
            batch_invariant: rows may not depend on each other.
        """
        device = torch.device(device)
        target = target_of(device)
        if batch_invariant:
            return cls(many=_invariant_tiles(device, dependent, fp8, blocks), dependent=dependent, batch_invariant=True)
        if target.capability < (8, 0):
            return cls()
        few = hopper = None
        dependent = dependent and target.dependent_launch
        try:
            few = scaled8_rows.CudaRows8(device)
            hopper = _hopper_rows(device, fp8, blocks)
        except Unavailable as reason:
            log.warning("products of few rows in 8 bits decode by a Triton kernel, which is slower: %s", reason)
        chain = scaled8_chain.CudaChain(device) if few is not None and (dependent or not target.hopper) else None
        many = scaled8_tiles.Tiles8(dependent_launch=dependent, hopper=hopper)
        return cls(few, many if target.fp8_products or not fp8 else None, dependent, chain)


def _hopper_rows(device: torch.device, fp8: bool, blocks: bool) -> scaled8_hopper.HopperRows8 | None:
    """Return the kernels for 17 to 256 rows; None if this GPU has none."""
    kind = scaled8_hopper.kind_of(fp8, blocks)
    return scaled8_hopper.HopperRows8(device, kind) if target_of(device).hopper else None


def _invariant_tiles(device: torch.device, dependent: bool, fp8: bool, blocks: bool) -> scaled8_tiles.Tiles8 | None:
    if not target_of(device).hopper:
        return None
    hopper = None
    try:
        hopper = _hopper_rows(device, fp8, blocks)
    except Unavailable as reason:
        log.warning("products of up to 256 rows in 8 bits run a Triton kernel, which is slower: %s", reason)
    return scaled8_tiles.Tiles8(dependent_launch=dependent, hopper=hopper, unsplit=True)


class Scaled8(Weight):
    """Buffers ``codes`` int8 ``[O, I]`` (of fp8 the bits) and ``scale`` float32, ``[O]`` or, with ``blocks``,
    ``[O / 128, I / 128]`` rounded up. ``dense`` has ``dtype``."""

    codes: Tensor
    scale: Tensor

    def __init__(
        self,
        out_features: int,
        in_features: int,
        bias: bool = False,
        *,
        fp8: bool = True,
        blocks: bool = False,
        rounds_inputs: bool = True,
        products: Products8 | None = None,
        ops: OpSet | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(out_features, in_features)
        self.fp8, self.blocks, self.rounds_inputs = fp8, blocks, rounds_inputs
        self.dtype = dtype or torch.get_default_dtype()
        self._products = products or Products8()
        scales = (-(-out_features // BLOCK), -(-in_features // BLOCK)) if blocks else (out_features,)
        self.register_buffer("codes", torch.empty(out_features, in_features, dtype=torch.int8, device=device))
        self.register_buffer("scale", torch.empty(scales, dtype=torch.float32, device=device))
        self.add_bias(bias, device, dtype)

    def load(self, values: Values | Codes8, staging: Staging) -> None:
        if isinstance(values, Codes8):
            staging.copy(values.codes, self.codes)
            staging.copy(values.scale, self.scale)
            return
        if self.blocks:
            raise ValueError("scales of blocks can only be read from a file, and the file holds plain numbers")
        codes, scale = (to_fp8 if self.fp8 else to_int8)(staging.bring(dense_values(values)))
        self.codes.copy_(codes.view(torch.int8))
        self.scale.copy_(scale[:, 0])

    def takes(self, layout: MatrixLayout) -> bool:
        return isinstance(layout, ScaledLayout) and (layout.fp8, layout.blocks) == (self.fp8, self.blocks)

    def forward(self, x_TI: Tensor) -> Tensor:
        few, many = self._products.few, self._products.many
        rows = len(x_TI)
        if few is not None and rows <= scaled8_rows.MOST_ROWS and self._few_takes(x_TI):
            return few(x_TI, self.codes, self.scale, self.bias, self.fp8, dependent_launch=self._products.dependent)
        if many is not None and self.rounds_inputs and x_TI.dtype == torch.bfloat16 and not self._tiles_refuse(x_TI):
            return many(x_TI, self.codes, self.scale, self.bias, self.fp8)
        if self.batch_invariant:
            return invariant_linear(x_TI, self.dense().to(x_TI.dtype), self.bias)
        if runs_triton(x_TI) and x_TI.is_cuda and not self.blocks:
            return triton_scaled8(x_TI, self.codes, self.scale, self.bias, self.fp8)
        return self._by_torch(x_TI)

    @property
    def batch_invariant(self) -> bool:  # type: ignore[override]
        """True if its kernels are."""
        return self._products.batch_invariant

    def _few_takes(self, x: Tensor) -> bool:
        return scaled8_rows.refusal(x, self.codes, self.scale, self.bias) is None

    def _tiles_refuse(self, x: Tensor) -> bool:
        return scaled8_tiles.refusal(x, self.codes, self.scale) is not None

    def _by_torch(self, x: Tensor) -> Tensor:
        parts = []
        for first in range(0, self.out_features, OUTPUTS):
            rows = slice(first, first + OUTPUTS)
            bias = None if self.bias is None else self.bias[rows].to(x.dtype)
            scale = self.scale[first // BLOCK : -(-(first + OUTPUTS) // BLOCK)] if self.blocks else self.scale[rows]
            parts.append(F.linear(x, scaled8_tiles.dense(self.codes[rows], scale, self.fp8).to(x.dtype), bias))
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)

    def product(self) -> Product:
        return lambda x: self.forward(x)

    def gated_product(self) -> Product | None:
        halves = self.out_features // 2
        whole = BLOCK if self.blocks else 8
        few, dependent, invariant = self._products.few, self._products.dependent, self._products.batch_invariant
        if self.bias is not None or (few is None and not invariant) or self.out_features % 2 or halves % whole:
            return None

        def gated(x: Tensor) -> Tensor:
            if few is not None and len(x) <= scaled8_rows.MOST_ROWS and self._few_takes(x):
                return few(x, self.codes, self.scale, fp8=self.fp8, gated=True, dependent_launch=dependent)
            both = self.forward(x)
            if x.is_cuda:
                return gate_up.gate_halves(both, dependent_launch=dependent)
            return swiglu.by_exp(*both.chunk(2, -1))

        return gated

    @property
    def chained(self) -> scaled8_chain.CudaChain | None:
        """Kernel of a layer's last three products and the next layer's first; None if there is none."""
        return self._products.chain

    def stream_product(self, products: StreamProducts) -> Stream8 | None:
        few, many = self._products.few, self._products.many
        return None if few is None else Stream8(few, many, self)

    def grouped(self, x: Tensor, starts: Tensor, order: Tensor | None = None) -> Tensor:
        whole = not self.blocks or self.out_features // (len(starts) - 1) % BLOCK == 0
        if not runs_triton(x) or not x.is_cuda:
            return by_expert(self, x, starts, order) if whole else super().grouped(x, starts, order)
        if whole:
            call = grouped_scaled8.triton_grouped_scaled8
            return call(x, self.codes, self.scale, starts, order, self.bias, self.fp8)
        return super().grouped(x, starts, order)

    def dense(self) -> Tensor:
        return scaled8_tiles.dense(self.codes, self.scale, self.fp8).to(self.dtype)

    @property
    def format(self) -> WeightFormat:
        name = (FP8 if self.fp8 else INT8).name + (", scales of blocks" if self.blocks else "")
        return WeightFormat(name, 8 * self.nbytes / (self.out_features * self.in_features))

    @property
    def workspace(self) -> int:
        """Bytes of the outputs that torch decodes at a time; 0 if a kernel runs."""
        if self._products.many is not None:
            return 0
        return 8 * (self.out_features if self.batch_invariant else min(OUTPUTS, self.out_features)) * self.in_features

    def shard(self, dim: Dimension, rank: int, n: int) -> Scaled8:
        step = BLOCK if self.blocks else 1
        part = part_of(self.shape[dim == "in"], rank, n, step, "blocks")
        codes = self.codes[part] if dim == "out" else self.codes[:, part]
        scale = self.scale
        if self.blocks:
            blocks = slice(part.start // BLOCK, part.stop // BLOCK)
            scale = scale[blocks] if dim == "out" else scale[:, blocks]
        elif dim == "out":
            scale = scale[part]
        cut = torch.contiguous_format
        return self._over(
            codes.clone(memory_format=cut), scale.clone(memory_format=cut), shard_bias(self.bias, dim, part, rank)
        )

    def join_with(self, others: Sequence[Weight], *, gated: bool = False) -> Scaled8 | None:
        alike = (self.fp8, self.blocks, self.rounds_inputs)
        parts = [self]
        for other in others:
            if isinstance(other, Scaled8) and (other.fp8, other.blocks, other.rounds_inputs) == alike:
                parts.append(other)
        biases = [part.bias for part in parts if part.bias is not None]
        if len(parts) <= len(others) or len(biases) not in (0, len(parts)):
            return None
        if self.blocks and any(part.out_features % BLOCK for part in parts[:-1]):
            return None
        bias = torch.cat([bias.detach() for bias in biases]) if biases else None
        joined = self._over(torch.cat([part.codes for part in parts]), torch.cat([part.scale for part in parts]), bias)
        sizes = [part.out_features for part in parts]
        scales = [len(part.scale) for part in parts]
        views = zip(joined.codes.split(sizes), joined.scale.split(scales), strict=True)
        for part, (codes, scale) in zip(parts, views, strict=True):
            part.codes, part.scale = codes, scale
        if bias is not None:
            for own, view in zip(biases, bias.split(sizes), strict=True):
                own.data = view
        return joined

    def _over(self, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Scaled8:
        made = Scaled8(codes.shape[0], codes.shape[1], fp8=self.fp8, blocks=self.blocks,
                       rounds_inputs=self.rounds_inputs, products=self._products, device="meta",
                       dtype=self.dtype)  # fmt: skip
        made.codes, made.scale = codes, scale
        made.add_bias(bias)
        return made


class Stream8:
    """The products of a matrix in 8 bits on the residual stream (``ops/linear/stream_products.py``).

    Up to 16 rows norms and gates are part of the products. With more, and with ``many``, a product ends as ``[T, O]``,
    and one kernel makes the next one's input of it: residual add, norm and rounding, or gate and rounding.
    """

    def __init__(self, few: scaled8_rows.CudaRows8, many: scaled8_tiles.Tiles8 | None, weight: Scaled8) -> None:
        self._few, self._many, self._weight = few, many if weight.rounds_inputs else None, weight
        self._rounding, self._dependent = (weight.fp8, weight.blocks), weight._products.dependent

    @property
    def biased(self) -> bool:
        """True if ``linear`` adds a bias; other products have none."""
        return self._weight.bias is not None

    @property
    def leaves(self) -> object:
        """Codes of its own kind, if it rounds its input."""
        return (Stream8, *self._rounding, self._many is None)

    def takes(self, x: Tensor, sizes: Sequence[Size], wanted: int | None = None) -> bool:
        """Return True if a step on the stream x ``[M, D]`` with products of these sizes runs here, up to its end for
        ``wanted`` rows."""
        if x.dtype != torch.bfloat16 or not len(x):
            return False
        if len(x) > scaled8_rows.MOST_ROWS:
            ends = not wanted or self.takes(x[:wanted], sizes)
            return ends and self._many is not None and all(k % 16 == 0 for _, k, _ in sizes)
        if wanted is not None:
            return False
        whole = 2 * BLOCK if self._weight.blocks else 16
        return all(k % 64 == 0 and n % (whole if gate else 16) == 0 for n, k, gate in sizes)

    def add(self, x: Tensor | Rounded, residual: Tensor, scale: Tensor, eps: float) -> ResidualStream:
        if len(residual) > scaled8_rows.MOST_ROWS:
            y = self._many_rows(x)
            total, rounded = scaled8_rounding.norm_rounded(
                y, residual, scale, eps, *self._rounding, dependent_launch=self._dependent
            )
            return ResidualStream(total, rounded.codes, None, eps, rounded.scale)
        total, scaled, squares = self._run(x, Beside(residual=residual, scale=scale))
        assert scaled is not None and squares is not None
        return ResidualStream(total, scaled, squares, eps)

    def linear(self, stream: ResidualStream) -> Tensor:
        if len(stream.total) > scaled8_rows.MOST_ROWS:
            return self._many_rows(_rows_of(stream), self._weight.bias)
        return self._run(stream.scaled, Beside(squares=stream.squares, eps=stream.eps), self._weight.bias)[0]

    def plain(self, x: Tensor | Rounded) -> Tensor:
        if isinstance(x, Rounded) or len(x) > scaled8_rows.MOST_ROWS:
            return self._many_rows(x)
        return self._run(x, Beside())[0]

    def gated(self, stream: ResidualStream) -> Tensor | Rounded:
        if len(stream.total) > scaled8_rows.MOST_ROWS:
            rows, weight = self._rounded(_rows_of(stream)), self._weight
            if self._many is not None and weight.dtype == torch.bfloat16:
                made = self._many.gated(*rows, weight.codes, weight.scale, weight.fp8)
                if made is not None:
                    return made
            both = self._many_rows(rows)
            return scaled8_rounding.gate_rounded(both, *self._rounding, dependent_launch=self._dependent)
        return self._run(stream.scaled, Beside(squares=stream.squares, eps=stream.eps), gated=True)[0]

    def chain(self, after: Sequence[StreamProduct]) -> Chain | None:
        call, parts = self._weight.chained, [self, *(each for each in after if isinstance(each, Stream8))]
        if call is None or len(parts) < 4:
            return None

        def weights(norms: tuple[Tensor, Tensor], eps: tuple[float, float]) -> ChainWeights:
            held = [part._weight for part in parts]
            o, gate_up, down, qkv = (Matrix8(each.codes, each.scale, each.fp8) for each in held)
            bias = held[-1].bias
            return ChainWeights(o, gate_up, down, qkv, norms, eps, bias)

        if scaled8_chain.refusal(weights((), ())):  # type: ignore[arg-type]
            return None
        return lambda x, residual, norms, eps: call(x, residual, weights(norms, eps), dependent_launch=True)

    def _run(
        self, x: Tensor | Rounded, norm: Beside, bias: Tensor | None = None, *, gated: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Compute the product of up to 16 rows, without rounding them."""
        assert isinstance(x, Tensor)
        weight = self._weight
        return self._few.beside(
            x, weight.codes, weight.scale, norm, bias, weight.fp8, gated=gated, dependent_launch=True
        )

    def _many_rows(self, x: Tensor | Rounded, bias: Tensor | None = None) -> Tensor:
        """Compute the product alone, of more than 16 rows."""
        assert self._many is not None
        weight = self._weight
        return self._many.product(*self._rounded(x), weight.codes, weight.scale, bias, weight.fp8, dtype=weight.dtype)

    def _rounded(self, x: Tensor | Rounded) -> Rounded:
        if isinstance(x, Rounded):
            return x
        return scaled8_rounding.triton_rounded(x, *self._rounding, dependent_launch=self._dependent)


def _rows_of(stream: ResidualStream) -> Tensor | Rounded:
    return stream.scaled if stream.row_scale is None else Rounded(stream.scaled, stream.row_scale)


class Holder8:
    """8 bits with scales of rows or blocks, see ``Holder``."""

    def __init__(self, site: WeightSite) -> None:
        self._site = site
        self._products: dict[tuple[bool, bool], Products8] = {}

    def rounded(self, form: NumberFormat) -> WeightKind | None:
        return self._of(form is FP8) if form in (FP8, INT8) else None

    def stored(self, layout: MatrixLayout) -> WeightKind | None:
        if not isinstance(layout, ScaledLayout):
            return None
        return partial(self._of(layout.fp8, layout.blocks), rounds_inputs=layout.rounds_inputs)

    def _of(self, fp8: bool, blocks: bool = False) -> Any:
        form = (fp8, blocks)
        if form not in self._products:
            site = self._site
            self._products[form] = Products8.on(
                site.device, dependent=site.dependent, fp8=fp8, blocks=blocks, batch_invariant=site.batch_invariant
            )
        return partial(Scaled8, fp8=fp8, blocks=blocks, products=self._products[form])
