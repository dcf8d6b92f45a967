"""``scaled8.cu``: the product of 1 to 16 rows with a weight of 8 bits, fp8 or whole numbers: the weight is
streamed once, a byte a number, and decoded in registers. x stays bfloat16 (W8A16).

GPUs other than Hopper that convert fp8 in hardware multiply 9 to 16 rows by the Triton kernel of
``few_rows/triton.py``, whose tiles are quicker than deep rings of each warp where a block has 99 KiB.

The kernels are those of ``few_rows/small_matmul.cu`` (``few_rows/small_rows.cuh``), so a norm may stand on either side
(``stream_products.py``) and a gate behind. Shapes as in ``scaled8_tiles.py``; x bfloat16 below 2^64, whose digits below
2^-57 are lost. Sums in float32.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from .....hardware.device import target_of
from ....lang import cuda
from ....lang.jit import multiprocessors
from ...few_rows.cuda import SHARED, Beside, CudaTiling
from ...few_rows.triton import TritonRows, TritonTiling
from .scaled8_tiles import scales_refusal

MOST_ROWS = 16
LEAST_TILES = 9
"""Rows from which on the Triton kernel multiplies, see above."""
KERNELS = ((3, 3), (3, 4), (2, 3), (2, 4), (2, 6), (1, 4), (1, 8), (1, 3))
"""The compiled pairs (columns, stages)."""
SHALLOW = ((3, 2), (2, 2))
"""Further pairs, for 9 to 16 rows in 99 KiB: narrower groups read X, two bytes a number, more often than W."""
FP8, WHOLE, FP8_BLOCKS = 1, 2, 3
"""The launcher's names of the formats."""


def shared_bytes(tiling: CudaTiling, m: int) -> int:
    """Return the shared memory of a block for ``m`` rows of X: a chunk has 128 bytes of a row of W and 256 of one of
    X."""
    tile = 8 if m <= 8 else 16
    rows = min(m, tile)
    ring = tiling.warps * tiling.stages * (tiling.columns * 16 * 128 + rows * 256)
    turn = 32 * tiling.warps * tiling.ranks
    sent = -(-rows * tiling.per * 16 // turn) * turn if tiling.ranks > 1 else 0
    return ring + 4 * (tiling.warps * tile * (tiling.columns * 16 + 4) + sent + tile) + 8


@cache
def choose_tiling(m: int, n: int, k: int, units: int, gated: bool = False, shared: int = SHARED) -> CudaTiling:
    """Return the quickest of those tried on an H200 at the shapes of an 8B model, as a rule: blocks of ``shared`` bytes
    share the rows of W evenly (``units``: multiprocessors), and groups are wide. What does not fit becomes shallower,
    then narrower."""
    sixteens = -(-n // 16)
    per = -(-sixteens // units)
    small = shared < 163 * 1024
    columns = 3 if per % 3 == 0 or (per > 6 and (m <= 8 or small)) else min(2, per)
    warps, ranks, stages = 8, 1, 3
    if m == 1 and per == 2 and shared == SHARED:  # clusters are Hopper's
        stages = 6 if k >= 8192 else 4
        warps, ranks = (4, 2) if k >= 8192 and not gated else (8, 1)
    wanted = [CudaTiling(columns, stages, per, warps, ranks)]
    wanted += [CudaTiling(*kernel, per, warps) for warps in (8, 4) for kernel in KERNELS if kernel[0] == columns]
    wanted += [CudaTiling(*kernel, per, 4) for kernel in SHALLOW if kernel[0] == columns and m > 8 and small]
    wanted += [CudaTiling(*kernel, per, warps) for warps in (8, 4) for kernel in KERNELS if kernel[0] < columns]
    fitting = (t for t in wanted if (t.columns, t.stages) in KERNELS + SHALLOW and shared_bytes(t, m) <= shared)
    return next(fitting)


def portable_tiling(n: int, gated: bool, dependent_launch: bool) -> TritonTiling:
    """Return the quickest tiling of those tried with 16 rows on an H200 that acts as an Ada card."""
    return TritonTiling(
        16, 32 if gated else 64, 128, 1 if gated or n >= 16384 else 4, dependent_launch=dependent_launch, gated=gated
    )


def refusal(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> str | None:
    """Return the reason why the kernels do not take these arguments; None if they do."""
    if x.dtype != torch.bfloat16 or (bias is not None and bias.dtype != x.dtype):
        return "they compute in bfloat16"
    if x.dim() != 2 or codes.dim() != 2 or x.shape[1] != codes.shape[1]:
        return "x must be [M, K] and the codes [N, K]"
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        return "they read 16 bytes of x at a time: the rows' stride and the address must be multiples of 16 bytes"
    if codes.stride(1) != 1 or codes.stride(0) % 16 or codes.data_ptr() % 16 or x.shape[1] % 16 or not x.shape[1]:
        return "they read 16 codes at a time: K, the rows' stride and the address must be multiples of 16"
    return scales_refusal(codes, scale)


class CudaRows8:
    """``(x, codes, scale, bias=None, fp8=True)`` by ``scaled8.cu``: up to 16 rows at a time.

    Raises:
        Unavailable: no NVIDIA GPU since Ampere, or no nvcc to build the kernels with.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._target = target_of(device)
        self._by_triton = TritonRows()
        self._launch = cuda.bind_since_ampere(
            "scaled8", "transect_scaled8", "pppppiiill" + "i" * 7 + "pppppf" + "ip", device
        )

    def _tiled(self, rows: int, stream: int, plain_fp8: bool) -> bool:
        """Return True if the Triton kernel multiplies: by the size of the residual ``stream`` on one side, because it
        leaves squares of whole tiles, so that the products of a step are all by one kernel."""
        fits = self._target.fp8_products and not self._target.hopper and plain_fp8
        return fits and rows >= LEAST_TILES and stream % 64 == 0

    def __call__(
        self,
        x: Tensor,
        codes: Tensor,
        scale: Tensor,
        bias: Tensor | None = None,
        fp8: bool = True,
        *,
        gated: bool = False,
        dependent_launch: bool = False,
        tiling: CudaTiling | None = None,
    ) -> Tensor:
        """Multiply x ``[M, K]`` -> ``[M, N]``; ``gated``: ``silu(first half) * second half``, ``[M, N / 2]``."""
        return self.beside(
            x, codes, scale, Beside(), bias, fp8, gated=gated, dependent_launch=dependent_launch, tiling=tiling
        )[0]

    def beside(
        self,
        x: Tensor,
        codes: Tensor,
        scale: Tensor,
        norm: Beside,
        bias: Tensor | None = None,
        fp8: bool = True,
        *,
        gated: bool = False,
        dependent_launch: bool = False,
        tiling: CudaTiling | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return a product with a norm beside it: (result, scaled, squares), as of ``CudaRows.beside``.

        Raises:
            ValueError: see ``refusal`` and ``Beside.refusal``; with a gate N must be a multiple of 16 (with scales of
                blocks of 256), without bias and residual.
            RuntimeError: the launch failed.
        """
        (m, k), n = x.shape, codes.shape[0]
        blocks = scale.ndim == 2
        tiled = tiling is None and self._tiled(m, n if norm.residual is not None else k, fp8 and not blocks)
        reason = refusal(x, codes, scale, bias) or norm.refusal(x, n, sixteens=not tiled)
        if gated and (n % (256 if blocks else 16) or bias is not None or norm.residual is not None):
            reason = reason or "with a gate N must be whole blocks, and it takes no bias and no residual"
        if reason:
            raise ValueError(f"scaled8.cu: {reason}")
        if tiled:
            tiling_of_16 = portable_tiling(n, gated, self._target.dependent_launch)
            values = codes.view(torch.float8_e4m3fn)
            return self._by_triton.beside(x, values, bias, norm, tiling=tiling_of_16, weight_scale=scale)
        out = x.new_empty((m, n // 2 if gated else n))
        scaled = squares = None
        if norm.residual is not None:
            scaled, squares = x.new_empty((m, n)), x.new_empty((m, n // 16), dtype=torch.float32)
        if out.numel() == 0:
            return out, scaled, squares
        tiling = tiling or choose_tiling(m, n, k, multiprocessors(x.device), gated, self._target.block_bytes)
        norms = (norm.residual, norm.scale, scaled, squares, norm.squares)
        code = self._launch(
            x.data_ptr(), codes.data_ptr(), scale.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
            m, n, k, x.stride(0), codes.stride(0), FP8_BLOCKS if blocks else FP8 if fp8 else WHOLE, tiling.columns,
            tiling.stages, tiling.warps, tiling.per, tiling.ranks, int(gated),
            *(0 if t is None else t.data_ptr() for t in norms), norm.eps,
            (2 if dependent_launch else 1) if self._target.dependent_launch else 0,
            torch.cuda.current_stream(x.device).cuda_stream,
        )  # fmt: skip
        if code:
            raise RuntimeError(f"scaled8.cu: the launch of {tiling} for {m} x {k} by {n} x {k} returned {code}")
        return out, scaled, squares
