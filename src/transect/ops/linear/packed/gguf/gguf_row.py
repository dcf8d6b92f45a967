r"""``gguf_row.cu``: a product of one row with a weight in block types of GGUF files on Hopper.

Shapes: x ``[1, K]``, units uint8 (``gguf_layout.py``); rows of a matrix multiples of 16, columns of 256; all but units
in bfloat16. Of every 256 columns x is taken as whole numbers of 15 bits, times a power of two: digits below 2^-14 of
the largest of them are lost (``gguf_bytes.cuh``). Those meet the codes in products of bytes, whose sums over a group
are exact; the others are in float32. Inference only.

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
from .gguf_layout import COLUMNS, ROWS, arranged_shape, dense

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


def described(matrix: Matrix) -> tuple[list[Tensor | None], list[int]]:
    """Return the units of all parts, None where there are fewer, and their types and sixteens of rows in turns."""
    missing = MOST_PARTS - len(matrix)
    numbers = [number for part in matrix for number in (UNITS[part.name].index, part.outputs // ROWS)]
    return [*(part.arranged for part in matrix), *[None] * missing], [*numbers, *[0] * (2 * missing)]


def most_sixteens(matrix: Matrix, blocks: int) -> int:
    """Return an upper bound of the groups of 16 rows in the largest share of a block."""
    units = [UNITS[part.name].unit for part in matrix]
    total = sum(unit * (part.outputs // ROWS) for unit, part in zip(units, matrix, strict=True))
    return -(-total // (blocks * min(units))) + 2 * len(units)


def fitting(wanted: int, slot: int, k: int, sixteens: int) -> int | None:
    """Return the number of stages that fit, ``wanted`` at most; None if not even two do.

    Args:
        wanted: units that a warp has asked for at a time, at most.
        slot: bytes of the largest unit.
        k: columns of the matrix.
        sixteens: the most sixteens of rows that a block has.
    """
    left = SHARED - 4096 - k // COLUMNS * SPAN - 64 * (sixteens + WARPS)
    stages = min(wanted, left // (WARPS * slot))
    return stages if stages >= 2 else None


def _row_refusal(x: Tensor, k: int, bias: Tensor | None = None) -> str | None:
    if x.shape != (1, k):
        return f"it takes one row of {k} numbers, not {list(x.shape)}"
    if x.dtype != torch.bfloat16 or x.data_ptr() % 16 or not x.is_contiguous():
        return "it computes in bfloat16, and reads whole rows on 16 bytes"
    if bias is not None and (bias.dtype != x.dtype or not bias.is_contiguous()):
        return "the bias must be bfloat16 and contiguous"
    return None


class GGUFRow:
    """Products of one row by ``gguf_row.cu``.

    Raises:
        Unavailable: not a Hopper GPU, or no nvcc to build the kernel with.
        RuntimeError: made inside a CUDA graph capture.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._launch = cuda.bind_on_hopper("gguf_row", "transect_gguf_row", "ppfiiiiip", device)

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
        reason = reason or _row_refusal(x, k, bias) or norm.refusal(x, n)
        if gated and (len(matrix) > 1 or n % 32 or bias is not None or norm.residual is not None):
            reason = reason or "with a gate it takes one part of whole pairs of sixteens, no bias and no residual"
        if reason:
            raise ValueError(f"gguf_row.cu: {reason}")
        out = x.new_empty(1, n // 2 if gated else n)
        scaled = squares = None
        if norm.residual is not None:
            scaled, squares = x.new_empty(1, n), x.new_empty(1, n // 16, dtype=torch.float32)
        units, sizes = described(matrix)
        tensors = [*units, x, norm.residual, norm.scale, bias, norm.squares, out, scaled, squares]
        blocks = min(multiprocessors(x.device), MOST_BLOCKS)
        slot, most = max(UNITS[part.name].unit for part in matrix), most_sixteens(matrix, blocks)
        fits = fitting(stages, slot, k, most)
        if fits is None:
            raise ValueError(f"gguf_row.cu: x of {k} columns and units of {slot} bytes do not fit")
        pointers, numbers = chain.addresses(tensors), (ctypes.c_int * (len(sizes) + 2))(*sizes, k, gated)
        code = self._launch(
            ctypes.addressof(pointers), ctypes.addressof(numbers), norm.eps, most, slot, blocks, fits,
            int(dependent_launch), torch.cuda.current_stream(x.device).cuda_stream,
        )  # fmt: skip
        if code:
            raise RuntimeError(f"gguf_row.cu: the launch with {fits} stages for {n} x {k} returned {code}")
        return out, scaled, squares
