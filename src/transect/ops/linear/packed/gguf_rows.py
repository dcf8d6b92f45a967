"""``gguf_rows.cu``: the product of a few rows with a weight in a block type of GGUF files, on Hopper: the blocks are
streamed once, in their own bits, and decoded in registers.

Shapes as in ``gguf_matmul.py``; x bfloat16 below 2^63, whose digits below 2^-57 are lost. Sums in float32. Bound by the
bytes of the weight for the fewest rows, by instructions that decode for more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ...lang import cuda
from ...lang.jit import multiprocessors
from ..few_rows.cuda import SHARED
from .gguf_layout import FORMATS, ROWS, arranged_shape

MOST_ROWS = 48
"""More rows are quicker with a weight that is rebuilt, by what both ways take at 8, 64 and 256 rows on an H200."""
X_BYTES = 2 * 256 + 32
"""Bytes of a row of x in a buffer."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut up: ``columns`` sixteens of rows of the weight in a group, ``per`` in a block of threads."""

    columns: int
    per: int
    warps: int
    stages: int


def shared_bytes(tiling: Tiling, unit: int, m: int) -> int:
    """Shared memory of a block for ``m`` rows of x and units of so many bytes."""
    tile = 8 if m <= 8 else 16
    sums = 4 * tile * (16 * tiling.columns + 4)
    return tiling.warps * (tiling.stages * (tiling.columns * unit + min(m, tile) * X_BYTES) + sums)


@cache
def choose_tiling(m: int, n: int, unit: int, units: int, gated: bool = False) -> Tiling:
    """Blocks share the rows of W evenly (``units``: multiprocessors), in as wide groups and as deep rings as fit."""
    sixteens = -(-n // ROWS)
    per = -(-sixteens // units)
    columns = 2 if gated or per > 1 else 1
    per = -(-per // columns) * columns
    for warps, stages in ((8, 4), (8, 3), (8, 2), (4, 3), (4, 2)):
        tiling = Tiling(columns, per, warps, stages)
        if shared_bytes(tiling, unit, m) <= SHARED:
            return tiling
    raise ValueError(f"no tiling of {columns} columns fits {m} rows of units of {unit} bytes")


def refusal(x: Tensor, arranged: Tensor, name: str, outputs: int, bias: Tensor | None = None) -> str | None:
    """Why the kernels do not take these arguments, or None."""
    if x.dtype != torch.bfloat16 or (bias is not None and bias.dtype != x.dtype):
        return "they compute in bfloat16"
    if x.dim() != 2 or x.stride(1) != 1 or x.shape[1] % 8 or x.stride(0) % 8 or x.data_ptr() % 16:
        return "they read 16 bytes of x at a time: K, the rows' stride and the address must be multiples of that"
    if tuple(arranged.shape) != arranged_shape(FORMATS[name], outputs, x.shape[1]) or not arranged.is_contiguous():
        return f"the weight must be the contiguous units of {name} for [{outputs}, {x.shape[1]}]"
    return None


class GGUFRows:
    """``(x, arranged, name, outputs, bias=None)`` by ``gguf_rows.cu``.

    Raises:
        Unavailable: not a Hopper GPU, or no nvcc to build the kernels with.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._launch = cuda.bind_on_hopper("gguf_rows", "transect_gguf_rows", "ppppiiil" + "iiiiiii" + "p", device)

    def __call__(
        self,
        x: Tensor,
        arranged: Tensor,
        name: str,
        outputs: int,
        bias: Tensor | None = None,
        *,
        gated: bool = False,
        dependent_launch: bool = False,
        tiling: Tiling | None = None,
    ) -> Tensor:
        """x ``[M, K]`` -> ``[M, N]``; ``gated``: sixteens of rows are gate and up in turn, the result is
        ``silu(gate) * up [M, N / 2]``.

        Raises:
            ValueError: see ``refusal``; with a gate N must be a multiple of 32, without bias.
            RuntimeError: the launch failed.
        """
        reason = refusal(x, arranged, name, outputs, bias)
        if gated and (outputs % 32 or bias is not None):
            reason = reason or "with a gate N must be a multiple of 32, and there is no bias"
        if reason:
            raise ValueError(f"gguf_rows.cu: {reason}")
        (m, k), kind = x.shape, FORMATS[name]
        out = x.new_empty(m, outputs // 2 if gated else outputs)
        if not out.numel():
            return out
        tiling = tiling or choose_tiling(min(m, 16), outputs, kind.unit, multiprocessors(x.device), gated)
        code = self._launch(
            x.data_ptr(), arranged.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(), m, outputs, k,
            x.stride(0), kind.index, tiling.columns, tiling.per, tiling.warps, tiling.stages, int(gated),
            2 if dependent_launch else 1, torch.cuda.current_stream(x.device).cuda_stream,
        )  # fmt: skip
        if code:
            raise RuntimeError(f"gguf_rows.cu: the launch of {tiling} for {m} x {k} by {outputs} x {k} returned {code}")
        return out
