r"""``gguf_chain.cu``: products of one row with weights in block types of GGUF files on Hopper: any one, or the four
between the attention of a layer and that of the next in one launch.

    t = a O^T + r                          h = (t s / rms(t)) [G; U]^T
    u = (silu(h_G) h_U) W^T + t            y = (u s' / rms(u)) Q^T + b

where a is what attention gives, r the residual stream, s and s' the weights of the norms, O, [G; U] and W the layer's
matrices, and Q those of q, k and v of the next layer, which may be of a type each. The result is y and u. As with
``scaled8_chain.py``, every block asks for its share of all weights in one go, and only x waits until blocks have met.

Shapes: a ``[1, K]``, r ``[1, D]``, units uint8 (``gguf_layout.py``), norms ``[D]``; rows of a matrix multiples of 16,
columns of 256; all but units in bfloat16. Of every 256 columns x is taken as whole numbers of 15 bits, times a power of
two: digits below 2^-14 of the largest of them are lost (``gguf_bytes.cuh``). Those meet the codes in products of bytes,
whose sums over a group are exact; the others are in float32. Inference only.

Bound by bytes: 0.33 to 1.06 for each weight. Thread by thread it runs on a processor in the tests
(``tests/helpers/cuda_host``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .....spec.numbers.gguf import UNITS
from ....lang import cuda
from ....lang.jit import multiprocessors
from ...few_rows.cuda import SHARED, Beside
from .. import chain
from ..chain import ChainWeights
from .gguf_layout import COLUMNS, ROWS, arranged_shape, dense

COUNTERS = 96
MOST_PARTS = 3
MOST_STAGES = 8
MOST_ROWS = 1 << 20
WARPS = 8
MOST_BLOCKS = 160
SPAN = 592
"""Bytes of shared memory for 256 numbers of x."""


class BlockPart(NamedTuple):
    """Rows of a matrix in one block type: units uint8 ``arranged_shape``, the type's name, the number of rows."""

    arranged: Tensor
    name: str
    outputs: int


Matrix = tuple[BlockPart, ...]
"""Up to three parts, concatenated along their rows."""


def size_of(matrix: Matrix) -> tuple[int, int]:
    """Return rows, and columns filled up to whole units."""
    return sum(part.outputs for part in matrix), matrix[0].arranged.shape[1] * COLUMNS


def values(matrix: Matrix, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values of a matrix, ``[N, K]``."""
    k = size_of(matrix)[1]
    return torch.cat([dense(part.arranged, UNITS[part.name], part.outputs, k, dtype) for part in matrix])


def gate_turns(h: Tensor) -> Tensor:
    """Compute ``silu(gate) * up`` of ``[..., N]`` where groups of 16 of gate and up alternate."""
    gate, up = chain.in_turns(h)
    return F.silu(gate) * up


def reference(attended: Tensor, residual: Tensor, weights: ChainWeights) -> tuple[Tensor, Tensor]:
    """Compute (y, u) in the dtype of the inputs, by torch in their dtype or float32, whichever is wider. Each of
    ``weights`` is a ``Matrix``."""
    return chain.reference(attended, residual, weights, values, chain.in_turns)


def takes(x: Tensor, sizes: Sequence[tuple[int, int, bool]]) -> bool:
    """Check if it takes products of rows x with matrices of these sizes: rows, columns, True with a gate."""
    if len(x) != 1 or x.dtype != torch.bfloat16 or not x.is_contiguous() or x.data_ptr() % 16:
        return False
    return all(n % (2 * ROWS if gate else ROWS) == 0 and k % COLUMNS == 0 for n, k, gate in sizes)


def refusal(matrix: Matrix) -> str | None:
    """Return the reason why the kernel does not take this matrix; None if it does."""
    if not 1 <= len(matrix) <= MOST_PARTS:
        return f"it takes one to {MOST_PARTS} parts"
    if sum(part.outputs for part in matrix) >= MOST_ROWS:
        return f"it takes fewer than {MOST_ROWS} rows"
    for arranged, name, outputs in matrix:
        if outputs % ROWS or not outputs:
            return f"rows of a matrix must be multiples of {ROWS}, not {outputs}"
        if arranged.dtype != torch.uint8 or arranged.shape[1] != matrix[0].arranged.shape[1]:
            return "the units of all parts must be uint8, and go as far across"
        if tuple(arranged.shape) != arranged_shape(UNITS[name], outputs, arranged.shape[1] * COLUMNS):
            return f"these are not units of {name} for {outputs} rows"
        if not arranged.is_contiguous() or arranged.data_ptr() % 16:
            return "the units must be contiguous, at an address that is a multiple of 16 bytes"
    return None


def sizes_refusal(matrices: tuple[Matrix, ...]) -> str | None:
    """Return the reason why four matrices in the order of ``ChainWeights`` are not a chain; None if they are."""
    o, gate_up, down, qkv = (size_of(matrix) for matrix in matrices)
    if o[0] != gate_up[1] or gate_up[0] != 2 * down[1] or down[0] != o[0] or qkv[1] != o[0]:
        return "the sizes of the products do not follow each other"
    return None if len(matrices[1]) == 1 else "gate and up must be one part, with sixteens of rows in turns"


def chain_refusal(weights: ChainWeights) -> str | None:
    """Return the reason why the kernel does not do these products in one launch; None if it does."""
    reason = next((said for matrix in weights.matrices if (said := refusal(matrix))), None)
    vectors = [*weights.norms, *([] if weights.bias is None else [weights.bias])]
    if any(v.dtype != torch.bfloat16 or not v.is_contiguous() for v in vectors):
        reason = reason or "norms and bias must be bfloat16 and contiguous"
    return reason or sizes_refusal(weights.matrices)


class _ChainProduct(NamedTuple):
    """A product of a launch: its numbers are those of ``Product`` in the source."""

    matrix: Matrix
    x: Tensor
    out: Tensor
    gated: bool = False
    residual: Tensor | None = None
    norm: Tensor | None = None
    bias: Tensor | None = None
    x_squares: Tensor | None = None
    scaled: Tensor | None = None
    squares: Tensor | None = None
    eps: float = 0.0

    @property
    def tensors(self) -> list[Tensor | None]:
        units: list[Tensor | None] = [part.arranged for part in self.matrix]
        units += [None] * (MOST_PARTS - len(units))
        beside = (self.residual, self.norm, self.bias, self.x_squares)
        return [*units, self.x, *beside, self.out, self.scaled, self.squares]

    @property
    def sizes(self) -> list[int]:
        parts = [number for part in self.matrix for number in (UNITS[part.name].index, part.outputs // ROWS)]
        return [*parts, *[0] * (2 * MOST_PARTS - len(parts)), size_of(self.matrix)[1], int(self.gated)]

    def most_sixteens(self, blocks: int) -> int:
        """Return an upper bound of the groups of 16 rows in the largest share of a block."""
        units = [UNITS[part.name].unit for part in self.matrix]
        total = sum(unit * (part.outputs // ROWS) for unit, part in zip(units, self.matrix, strict=True))
        return -(-total // (blocks * min(units))) + 2 * len(units)


def fitting(wanted: int, slot: int, most_k: int, most_sixteens: int) -> int | None:
    """Return the number of stages that fit, ``wanted`` at most; None if not even two do.

    Args:
        wanted: units that a warp has asked for at a time, at most.
        slot: bytes of the largest unit.
        most_k: the most columns of a matrix.
        most_sixteens: the most sixteens of rows that a block has of one.
    """
    left = SHARED - 4096 - most_k // COLUMNS * SPAN - 64 * (most_sixteens + WARPS)
    stages = min(wanted, left // (WARPS * slot))
    return stages if stages >= 2 else None


class GGUFChain:
    """Products of one row by ``gguf_chain.cu``.

    Launches share counters, so those of one instance must be on one stream. All blocks of a chain must run at once: so
    two must never run beside each other on a GPU, as with ``scaled8_chain.CudaChain``.

    Raises:
        Unavailable: not a Hopper GPU, or no nvcc to build the kernel with.
        RuntimeError: made inside a CUDA graph capture.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._launch = cuda.bind_on_hopper("gguf_chain", "transect_gguf_chain", "pppp" + "iiiiiii" + "p", device)
        self._meetings = torch.zeros(COUNTERS, dtype=torch.int32, device=device or "cuda")

    def __call__(
        self,
        x: Tensor,
        matrix: Matrix,
        bias: Tensor | None = None,
        norm: Beside | None = None,
        *,
        gated: bool = False,
        dependent_launch: bool = False,
        stages: int = MOST_STAGES,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Multiply x ``[1, K]`` -> (result ``[1, N]``, scaled, squares) as of ``CudaRows.beside``; ``gated``: groups of
        16 rows are gate and up alternately, the result is ``silu(gate) * up [1, N / 2]``.

        Raises:
            ValueError: see ``refusal``; there is more than one row, or what is beside the product does not fit.
            RuntimeError: the launch failed.
        """
        norm, reason = norm or Beside(), refusal(matrix)
        n, k = (0, 0) if reason else size_of(matrix)
        reason = reason or self._refusal(x, k, bias) or norm.refusal(x, n)
        if gated and (len(matrix) > 1 or n % 32 or bias is not None or norm.residual is not None):
            reason = reason or "with a gate it takes one part of whole pairs of sixteens, no bias and no residual"
        if reason:
            raise ValueError(f"gguf_chain.cu: {reason}")
        out = x.new_empty(1, n // 2 if gated else n)
        scaled = squares = None
        if norm.residual is not None:
            scaled, squares = x.new_empty(1, n), x.new_empty(1, n // 16, dtype=torch.float32)
        product = _ChainProduct(
            matrix, x, out, gated, norm.residual, norm.scale, bias, norm.squares, scaled, squares, norm.eps
        )
        self._run([product], dependent_launch, stages)
        return out, scaled, squares

    def chain(
        self,
        attended: Tensor,
        residual: Tensor,
        weights: ChainWeights,
        *,
        dependent_launch: bool = False,
        stages: int = MOST_STAGES,
    ) -> tuple[Tensor, Tensor]:
        """Compute y ``[1, N]`` and u ``[1, D]``.

        ``dependent_launch``: the weights may be read before the kernel before this one on the stream has ended.

        Raises:
            ValueError: see ``chain_refusal``; or there is more than one row.
            RuntimeError: the launch failed.
        """
        reason = chain_refusal(weights)
        if reason is None:
            d, k = size_of(weights.o)
            reason = self._refusal(attended, k) or self._refusal(residual, d)
        if reason:
            raise ValueError(f"gguf_chain.cu: {reason}")
        first, second = ([residual.new_empty(1, d) for _ in range(2)] for _ in range(2))
        squares = [residual.new_empty(1, d // 16, dtype=torch.float32) for _ in range(2)]
        gated = residual.new_empty(1, size_of(weights.down)[1])
        out = residual.new_empty(1, size_of(weights.qkv)[0])
        norms, eps = weights.norms, weights.eps
        products = [
            _ChainProduct(weights.o, attended, first[0], residual=residual, norm=norms[0], scaled=first[1],
                     squares=squares[0]),
            _ChainProduct(weights.gate_up, first[1], gated, gated=True, x_squares=squares[0], eps=eps[0]),
            _ChainProduct(weights.down, gated, second[0], residual=first[0], norm=norms[1], scaled=second[1],
                     squares=squares[1]),
            _ChainProduct(weights.qkv, second[1], out, bias=weights.bias, x_squares=squares[1], eps=eps[1]),
        ]  # fmt: skip
        self._run(products, dependent_launch, stages)
        return out, second[0]

    @staticmethod
    def _refusal(x: Tensor, k: int, bias: Tensor | None = None) -> str | None:
        if x.shape != (1, k):
            return f"it takes one row of {k} numbers, not {list(x.shape)}"
        if x.dtype != torch.bfloat16 or x.data_ptr() % 16 or not x.is_contiguous():
            return "it computes in bfloat16, and reads whole rows on 16 bytes"
        if bias is not None and (bias.dtype != x.dtype or not bias.is_contiguous()):
            return "the bias must be bfloat16 and contiguous"
        return None

    def _run(self, products: Sequence[_ChainProduct], dependent: bool, wanted: int) -> None:
        x = products[0].x
        blocks = min(multiprocessors(x.device), MOST_BLOCKS)
        slot = max(UNITS[part.name].unit for product in products for part in product.matrix)
        most_k = max(size_of(product.matrix)[1] for product in products)
        most = max(product.most_sixteens(blocks) for product in products)
        stages = fitting(wanted, slot, most_k, most)
        if stages is None:
            raise ValueError(f"gguf_chain.cu: x of {most_k} columns and units of {slot} bytes do not fit")
        tensors = [tensor for product in products for tensor in product.tensors]
        sizes = [size for product in products for size in product.sizes]
        pointers = chain.addresses(tensors)
        numbers, eps = (ctypes.c_int * len(sizes))(*sizes), (ctypes.c_float * len(products))(*(p.eps for p in products))
        code = self._launch(
            ctypes.addressof(pointers), ctypes.addressof(numbers), ctypes.addressof(eps), self._meetings.data_ptr(),
            len(products), most_k, most, slot, blocks, stages, int(dependent),
            torch.cuda.current_stream(x.device).cuda_stream,
        )  # fmt: skip
        if code:
            shapes = ", ".join("{} x {}".format(*size_of(product.matrix)) for product in products)
            raise RuntimeError(f"gguf_chain.cu: the launch with {stages} stages for {shapes} returned {code}")
