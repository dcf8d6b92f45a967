r"""``ServingInt4``: a matrix of 4-bit codes in groups that is multiplied as it is, for inference
(``ops/linear/packed/int4/int4_matmul.py``).

It is quantized when it is loaded, to the nearest code, on the device, in groups of 128 along a row with a scale and a
zero in bfloat16: 4.25 bits a number. Rows whose length is not a multiple of 128 are filled up with their last number,
and inputs with zeros.

The same rounding on other ways to compute: ``rounded`` gives the values that the codes stand for, and ``affine_groups``
the codes for the C++ CPU kernels, which have a scale for each 32 numbers, here four times the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import torch
import torch.nn.functional as F
from torch import Tensor

from ...formats.affine import AffineGroups
from ...hardware.device import target_of
from ...ops.activation import swiglu
from ...ops.lang.jit import has_dependent_launch, runs_triton
from ...ops.linear import gate_up
from ...ops.linear.few_rows.cuda import Beside
from ...ops.linear.packed.chain import ChainWeights
from ...ops.linear.packed.int4 import int4_chain, int4_matmul, int4_rows
from ...ops.linear.packed.int4.int4_chain import Matrix4
from ...ops.linear.packed.int4.int4_invariant import InvariantCodes
from ...ops.linear.packed.int4.int4_packing import CHUNK, arrange_codes
from ...ops.linear.stream_products import ResidualStream, Size, StreamProducts
from ...ops.moe.grouped_blocks import GROUPS_OF_4, triton_grouped_blocks
from ...ops.norm.add_rms_norm import triton_add_rms_norm
from ...ops.opset import OpSet
from ...ops.registry import Unavailable
from ...spec.numbers.int4 import INT4, NATIVE_GROUP, SERVING_GROUP, int4_format
from ...spec.numbers.layouts import GroupLayout, MatrixLayout
from ...spec.numbers.number_format import NumberFormat, WeightFormat
from ..staging import Staging, dense_values
from ..stored import Codes4
from .in_blocks import join_blocks
from .int4 import codes_of
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

SCALES = torch.bfloat16
PANEL = NATIVE_GROUP
"""Numbers that share a scale in the C++ CPU kernels."""
BLOCK = 16
"""Rows that are stored together."""


@dataclass(frozen=True, slots=True)
class Int4Products:
    """Kernels of a model's products in 4 bits, resolved once for a device."""

    product: Callable[..., Tensor]
    """Kernel ``(x, arranged weight, outputs, bias)``, as ``int4_matmul.reference``."""
    gated: Callable[[Tensor, Tensor, int], Tensor]
    """Kernel ``(x, arranged weight, outputs)`` -> ``silu(gate) * up [T, O / 2]``; blocks of rows alternate between gate
    and up."""
    rows: int4_rows.CudaCodes | None = None
    """Kernel that can include norms in its product."""
    chain: int4_chain.Int4Chain | None = None
    """Kernel of a layer's last three products and the next layer's first in one launch, for one row."""
    batch_invariant: bool = False
    """True if rows do not depend on each other."""

    @classmethod
    def on(cls, device: torch.device | str, *, dependent: bool = False, batch_invariant: bool = False) -> Int4Products:
        """Return the fastest kernels for ``device``; ``dependent``: with dependent launch if the device has it."""
        if batch_invariant:
            return cls._invariant(torch.device(device), dependent and has_dependent_launch(torch.device(device)))
        if not runs_triton(torch.empty(0, device=device)):
            return cls(int4_matmul.reference, _gated_by_torch)
        dependent = dependent and has_dependent_launch(torch.device(device))
        product = partial(int4_matmul.best_launcher(), dependent_launch=dependent)
        at_once = int4_matmul.gated_launcher()

        def gated(x: Tensor, weight: Tensor, outputs: int) -> Tensor:
            y = at_once(x, weight, outputs, dependent_launch=dependent)
            if y is not None:
                return y
            return gate_up.gate_halves(product(x, weight, outputs), turns=BLOCK, dependent_launch=dependent)

        rows = int4_matmul.rows_kernel(torch.device(device)) if dependent else None
        return cls(product, gated, rows, _chain_on(torch.device(device), dependent))

    @classmethod
    def _invariant(cls, device: torch.device, dependent: bool) -> Int4Products:
        product = partial(InvariantCodes(device), dependent_launch=dependent)

        def gated(x: Tensor, weight: Tensor, outputs: int) -> Tensor:
            both = product(x, weight, outputs)
            if runs_triton(x):
                return gate_up.gate_halves(both, turns=BLOCK, dependent_launch=dependent)
            return _gated_by_turns(both)

        return cls(product, gated, batch_invariant=True)


def _chain_on(device: torch.device, dependent: bool) -> int4_chain.Int4Chain | None:
    """Return the kernel of four products in one launch, where the device has it and is used as it is."""
    target = target_of(device)
    if not dependent and (target.hopper or not target.nvidia):
        return None
    try:
        return int4_chain.Int4Chain(device)
    except Unavailable:  # said by the kernels of the products
        return None


class Int4Stream:
    """The products of a matrix in 4 bits on the residual stream (``ops/linear/stream_products.py``)."""

    def __init__(self, weight: ServingInt4, kernel: int4_rows.CudaCodes) -> None:
        self._weight, self._kernel = weight, kernel

    @property
    def biased(self) -> bool:
        """True if ``linear`` adds a bias; other products have none."""
        return self._weight.bias is not None

    @property
    def leaves(self) -> object:
        """Norm's input and its sums of squares, in the dtype of the stream."""
        return Int4Stream

    def takes(self, x: Tensor, sizes: Sequence[Size], wanted: int | None = None) -> bool:
        """Return True if the kernel runs a step on the stream x ``[M, D]`` with products of these sizes, and all tokens
        are wanted."""
        if wanted is not None or x.dtype != torch.bfloat16 or not 0 < len(x) <= int4_rows.ROWS[0]:
            return False
        gated = [(n, k) for n, k, gate in sizes if gate]
        return all(self._kernel.gates(len(x), n, k, self._weight.group, x.device) is not None for n, k in gated)

    def add(self, x: Tensor, residual: Tensor, scale: Tensor, eps: float) -> ResidualStream:
        total, scaled, squares = self._run(x, Beside(residual=residual, scale=scale))
        assert scaled is not None and squares is not None
        return ResidualStream(total, scaled, squares, eps)

    def linear(self, stream: ResidualStream) -> Tensor:
        return self._run(stream.scaled, Beside(squares=stream.squares, eps=stream.eps), self._weight.bias)[0]

    def chain(self, after: Sequence[StreamProduct]) -> Chain | None:
        call, parts = self._weight.chained, [self, *(each for each in after if isinstance(each, Int4Stream))]
        if call is None or len(parts) < 4 or [part._weight.in_turns for part in parts] != [False, True, False, False]:
            return None

        def weights(norms: tuple[Tensor, Tensor], eps: tuple[float, float]) -> ChainWeights:
            o, gate_up, down, qkv = (Matrix4(part._weight.arranged, part._weight.out_features) for part in parts)
            bias = parts[-1]._weight.bias
            return ChainWeights(o, gate_up, down, qkv, norms, eps, bias)

        if int4_chain.refusal(weights((), ())):  # type: ignore[arg-type]
            return None
        return lambda x, residual, norms, eps: call(x, residual, weights(norms, eps), dependent_launch=True)

    def plain(self, x: Tensor) -> Tensor:
        return self._run(x, Beside())[0]

    def gated(self, stream: ResidualStream) -> Tensor:
        return self._run(stream.scaled, Beside(squares=stream.squares, eps=stream.eps), gated=True)[0]

    def _run(
        self, x: Tensor, norm: Beside, bias: Tensor | None = None, *, gated: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        weight = self._weight
        return self._kernel.beside(
            x, weight.arranged, weight.out_features, norm, bias, gated=gated, dependent_launch=True
        )


class ChainedInt4Stream(Int4Stream):
    """The same for one row where no kernel includes norms in its product: between layers the chain does."""

    def __init__(self, weight: ServingInt4) -> None:
        self._weight = weight

    def takes(self, x: Tensor, sizes: Sequence[Size], wanted: int | None = None) -> bool:
        """Return True for a step of one row whose tokens are all wanted."""
        return wanted is None and x.dtype == torch.bfloat16 and len(x) == 1

    def add(self, x: Tensor, residual: Tensor, scale: Tensor, eps: float) -> ResidualStream:
        normed, total = triton_add_rms_norm(self.plain(x), residual, scale, eps)
        return ResidualStream(total, normed, None, eps)

    def _run(
        self, x: Tensor, norm: Beside, bias: Tensor | None = None, *, gated: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        weight, products = self._weight, self._weight._products
        if gated:
            return products.gated(x, weight.arranged, weight.out_features), None, None
        return products.product(x, weight.arranged, weight.out_features, bias), None, None


def _gated_by_torch(x: Tensor, weight: Tensor, outputs: int) -> Tensor:
    return _gated_by_turns(int4_matmul.reference(x, weight, outputs))


def _gated_by_turns(both: Tensor) -> Tensor:
    both = both.unflatten(-1, (-1, 2, BLOCK))
    return swiglu.by_exp(both[:, :, 0].flatten(1), both[:, :, 1].flatten(1))


class ServingInt4(Weight):
    """Buffer ``arranged``: int32 ``[I / 128, O / 16, 256 + 16]`` as ``int4_packing.arrange`` gives it; joined with
    others, a view along its second dimension."""

    arranged: Tensor
    order: Tensor | None
    """Input of each column, if a checkpoint's groups are not of neighbours (act-order)."""

    def __init__(
        self,
        out_features: int,
        in_features: int,
        bias: bool = False,
        *,
        products: Int4Products,
        group: int = SERVING_GROUP,
        ordered: bool = False,
        ops: OpSet | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(out_features, in_features)
        self._products, self._dtype = products, dtype or torch.get_default_dtype()
        self.group, self.in_turns = group, False
        shape = (-(-in_features // CHUNK), -(-out_features // BLOCK), 256 + BLOCK * CHUNK // group)
        self.register_buffer("arranged", torch.empty(shape, dtype=torch.int32, device=device))
        order = torch.empty(in_features, dtype=torch.int64, device=device) if ordered else None
        self.register_buffer("order", order)
        self.add_bias(bias, device, dtype)

    @property
    def batch_invariant(self) -> bool:  # type: ignore[override]
        """True if its kernels are."""
        return self._products.batch_invariant

    def takes(self, layout: MatrixLayout) -> bool:
        return layout == GroupLayout(self.group, self.order is not None)

    def load(self, values: Values | Codes4, staging: Staging) -> None:
        if isinstance(values, Codes4):
            codes, *numbers = (staging.bring(t) for t in (values.codes, values.scale, values.zero))
            scale, zero = (F.pad(t, (0, self._spare // self.group)) for t in numbers)
            self.arranged.copy_(arrange_codes(F.pad(codes, (0, self._spare)), scale, zero))
            if self.order is not None and values.order is not None:
                self.order.copy_(values.order)
            return
        if self.group != SERVING_GROUP or self.order is not None:
            raise ValueError(
                "groups of another size than 128 can only be read from a file, and the file holds plain numbers"
            )
        codes, scale, zero = served_codes(staging.bring(dense_values(values)))
        self.arranged.copy_(arrange_codes(codes, scale, zero))

    def forward(self, x_TI: Tensor) -> Tensor:
        return self.product()(x_TI)

    def grouped(self, x: Tensor, starts: Tensor, order: Tensor | None = None) -> Tensor:
        if self.out_features % (BLOCK * (len(starts) - 1)):
            return super().grouped(x, starts, order)
        if not runs_triton(x) or not x.is_cuda:
            return by_expert(self, x, starts, order)
        x = self._filled(x if self.order is None else x.index_select(1, self.order))
        return triton_grouped_blocks(x, self.arranged, GROUPS_OF_4, self.out_features, starts, order, self.bias)

    def dense(self) -> Tensor:
        rows = int4_matmul.dense(self.arranged, self.out_features, self._dtype)[:, : self.in_features]
        if self.order is not None:
            return torch.empty_like(rows).index_copy_(1, self.order, rows)
        return rows.unflatten(0, (-1, 2, BLOCK)).transpose(0, 1).flatten(0, 2) if self.in_turns else rows

    @property
    def workspace(self) -> int:
        """Bytes of the matrix, which is rebuilt for many rows."""
        return self._dtype.itemsize * self.out_features * self.arranged.shape[0] * CHUNK

    @property
    def format(self) -> WeightFormat:
        return int4_format(self.group)

    def product(self) -> Product:
        if self.order is not None:
            order, plain = self.order, self._product()
            return lambda x: plain(x.index_select(1, order))
        return self._product()

    def _product(self) -> Product:
        run, weight, outputs, bias = self._products.product, self.arranged.contiguous(), self.out_features, self.bias
        if self.in_turns:
            return lambda x: (
                run(self._filled(x), weight, outputs).unflatten(-1, (-1, 2, BLOCK)).transpose(1, 2).flatten(1)
            )
        if self._spare:
            return lambda x: run(self._filled(x), weight, outputs, bias)
        return lambda x: run(x, weight, outputs, bias)

    def gated_product(self) -> Product | None:
        if not self.in_turns:
            return None
        run, weight, outputs = self._products.gated, self.arranged, self.out_features
        return lambda x: run(self._filled(x), weight, outputs)

    @property
    def chained(self) -> int4_chain.Int4Chain | None:
        """Kernel of a layer's last three products and the next layer's first; None if there is none."""
        return self._products.chain

    def stream_product(self, products: StreamProducts) -> Int4Stream | None:
        kernel = self._products.rows
        if self._spare or self.order is not None:  # the norm has no columns of padding
            return None
        if kernel is not None:
            return Int4Stream(self, kernel)
        return ChainedInt4Stream(self) if self.chained is not None else None

    @property
    def _spare(self) -> int:
        """Columns of padding in the last group."""
        return -self.in_features % CHUNK

    def _filled(self, x: Tensor) -> Tensor:
        return F.pad(x, (0, self._spare)) if self._spare else x

    def join_with(self, others: Sequence[Weight], *, gated: bool = False) -> ServingInt4 | None:
        parts = [self, *(other for other in others if isinstance(other, ServingInt4))]
        alike = all(part.order is None and part.group == self.group for part in parts)
        found = join_blocks(parts, BLOCK, 1, gated=gated) if alike and len(parts) > len(others) else None
        if found is None:
            return None
        whole, in_turns = found
        outputs = sum(part.out_features for part in parts)
        joined = ServingInt4(outputs, self.in_features, products=self._products, group=self.group,
                             device="meta", dtype=self._dtype)  # fmt: skip
        joined.arranged, joined.in_turns = whole, in_turns
        joined.add_bias(join_biases(parts))
        return joined

    def shard(self, dim: Dimension, rank: int, n: int) -> ServingInt4:
        if self.order is not None and n > 1 and dim == "in":
            raise ValueError(
                "a matrix in 4 bits with act-order has no shards of inputs: its groups are not of neighbours"
            )
        if dim == "out":
            part = part_of(self.out_features, rank, n, BLOCK, "blocks of rows")
            arranged = self.arranged[:, part.start // BLOCK : part.stop // BLOCK]
        else:
            part = part_of(self.in_features, rank, n, CHUNK, "spans of columns")
            arranged = self.arranged[part.start // CHUNK : part.stop // CHUNK]
        size = part.stop - part.start
        shape = (size, self.in_features) if dim == "out" else (self.out_features, size)
        cut = ServingInt4(*shape, products=self._products, group=self.group, device="meta", dtype=self._dtype)
        cut.arranged = arranged.clone(memory_format=torch.contiguous_format)
        if self.order is not None:
            cut.order = self.order
        cut.add_bias(shard_bias(self.bias, dim, part, rank))
        return cut

    def training_part(self) -> TrainingPart:
        def fill(out: Tensor) -> None:
            out.copy_(self.dense())

        like = torch.empty(0, dtype=self._dtype, device=self.arranged.device)
        return TrainingPart(self.out_features, self.in_features, like, fill)


class Int4Holder:
    """4 bits in groups, see ``Holder``."""

    def __init__(self, site: WeightSite) -> None:
        self._site = site

    @cached_property
    def _products(self) -> Int4Products:
        site = self._site
        return Int4Products.on(site.device, dependent=site.dependent, batch_invariant=site.batch_invariant)

    def rounded(self, form: NumberFormat) -> WeightKind | None:
        return partial(ServingInt4, products=self._products) if form is INT4 else None

    def stored(self, layout: MatrixLayout) -> WeightKind | None:
        if not isinstance(layout, GroupLayout):
            return None
        return partial(ServingInt4, products=self._products, group=layout.group, ordered=layout.ordered)


def served_codes(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a dense matrix ``[N, K]`` for serving: codes uint8 ``[N, K']``, scales and zeros bfloat16 ``[N, K' /
    128]``, on its device; K' is K rounded up to whole groups."""
    spare = -weight.shape[1] % SERVING_GROUP
    whole = torch.cat((weight, weight[:, -1:].expand(-1, spare)), 1) if spare else weight
    return codes_of(whole, SERVING_GROUP, SCALES)


def rounded(weight: Tensor) -> Tensor:
    """Return the values of a dense matrix after quantization to 4 bits for serving, ``[N, K]`` float32."""
    codes, scale, zero = served_codes(weight)
    groups = codes.view(*scale.shape, -1).float()
    return torch.addcmul(zero.float()[..., None], scale.float()[..., None], groups).flatten(1)[:, : weight.shape[1]]


def affine_groups(weight: Tensor) -> AffineGroups:
    """Return the same quantization for the C++ CPU kernels.

    Raises:
        ValueError: K is not a multiple of 32.
    """
    k = weight.shape[1]
    if k % PANEL:
        raise ValueError(f"the C++ kernels take rows in 4 bits whose length is a multiple of {PANEL}, not {k}")
    codes, *numbers = served_codes(weight)
    scale, zero = (t.float().repeat_interleave(SERVING_GROUP // PANEL, 1)[:, : k // PANEL].numpy() for t in numbers)
    return AffineGroups(codes[:, :k].contiguous().numpy(), scale, zero, PANEL, 4, half_exact=True)
