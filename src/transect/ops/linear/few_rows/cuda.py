"""``small_matmul.cu``: the product of 1 to 16 rows with a weight (32 of a small one), bfloat16, on NVIDIA GPUs.

This file has the tilings, by a rule or as measured, and the launcher. The arithmetic is in ``small_matmul.py``. With a
gate (``gate_up.py``) both halves of the product are in one launch. A norm may stand on either side
(``stream_products.py``).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ....hardware.device import target_of
from ...lang import cuda
from ...lang.jit import multiprocessors
from ...registry import Unavailable


@dataclass(frozen=True, slots=True)
class CudaTiling:
    """The tiling of ``small_matmul.cu``; the fields are the arguments of its launcher."""

    columns: int
    """Rows of W in a group, in sixteens."""
    stages: int
    per: int
    """Groups of 16 rows of W for a block."""
    warps: int = 8
    ranks: int = 1
    """Blocks of a cluster that share K; -p: one block, which adds p parts of K in order (``invariant.py``)."""
    wide: int = 1
    """Chunks of 64 k that a warp asks for at a time; more than one of parts in order alone."""

    def refusal(self, m: int, gated: bool = False) -> str | None:
        """Return the reason why the kernels do not take this tiling for m rows of X; None if they do."""
        if (self.columns, self.stages, self.wide) not in COMPILED:
            return f"no kernel of {self.columns} columns, {self.stages} stages and {self.wide} chunks is compiled"
        if self.wide > 1 and self.ranks > 0:
            return "only of parts in order a warp asks for several chunks at a time"
        if self.ranks < 0:
            if not 1 <= self.warps <= MOST_WARPS or self.warps % self.ranks or self.per < 1:
                return "of parts in order, warps must be a multiple, 1 to 8, and per at least 1"
        elif self.warps not in (4, 8) or not 1 <= self.ranks <= 8 or self.per < 1:
            return "warps must be 4 or 8, ranks 1 to 8, and per at least 1"
        if gated and self.ranks > 1:
            return "with a gate it takes one rank"
        taken = shared_bytes(self, m)
        return None if taken <= SHARED else f"it takes {taken} bytes of shared memory, of {SHARED} that there are"


@dataclass(frozen=True, slots=True)
class Beside:
    """The part of a norm that a product computes as well, see ``stream_products.py``."""

    residual: Tensor | None = None
    """``[M, N]``: the stream that the result is added to. ``scale`` is then the weight of the next norm ``[N]``."""
    scale: Tensor | None = None
    squares: Tensor | None = None
    """Float32 ``[M, K / 16]``: sums of squares of the stream, of which X is the product with its norm's weight. The
    result is divided by the rms. (The Triton kernels take ``[M, any number]`` and use the sum.)"""
    eps: float = 0.0
    """The eps of X's norm."""

    def refusal(self, x: Tensor, n: int, sixteens: bool = True) -> str | None:
        """Return the reason why the kernels do not do this beside a product of x ``[M, K]`` with N = n; None if they
        do. ``sixteens``: each square must cover 16 adjacent elements."""
        m, k = x.shape
        if self.residual is not None:
            if self.scale is None or n % 16:
                return "adding to a stream needs the next norm's weight, and N a multiple of 16"
            if self.residual.shape != (m, n) or self.scale.shape != (n,):
                return f"the stream must be [{m}, {n}] and the norm's weight [{n}]"
            if not (self.residual.is_contiguous() and self.scale.is_contiguous()):
                return "the stream and the norm's weight must be contiguous"
            if self.residual.dtype != x.dtype or self.scale.dtype != x.dtype:
                return "the stream and the norm's weight must have the dtype of X"
        squares = self.squares
        if squares is not None:
            if squares.shape[:-1] != (m,):
                return f"squares must be [{m}, ...]"
            if sixteens and (k % 64 or squares.shape[1] != k // 16):
                return f"squares must be [{m}, {k} / 16], and K a multiple of 64"
            if squares.dtype != torch.float32 or not squares.is_contiguous():
                return "squares must be float32 and contiguous"
        return None


CUDA_ROWS = 32
"""The most rows of X that one block of ``small_matmul.cu`` takes; for more it reads W again."""
SHARED = 227 * 1024
"""Bytes of shared memory of a block on Hopper."""


KERNELS = ((3, 4), (3, 3), (2, 6), (2, 4), (3, 2), (2, 2), (2, 3), (1, 8), (1, 4))
"""The compiled pairs (columns, stages), better ones first."""
MOST_WARPS = 8
DEEP = ((3, 8), (2, 12))
"""Pairs for blocks of few warps."""
WIDE = ((1, 12, 4), (2, 4, 2), (2, 6, 2))
"""Compiled (columns, stages, wide) of parts in order."""
COMPILED = (*((*pair, 1) for pair in KERNELS + DEEP), *WIDE)


@cache
def choose_tiling(m: int, n: int, multiprocessors: int, shared: int = SHARED) -> CudaTiling:
    """Return the best tiling whose blocks fit ``shared`` bytes of shared memory, by a rule from times on an H200 (no
    search).

    Blocks share the rows of W evenly, so a block's share depends on N alone. Of the possible groups, the widest that
    leaves little of the last one empty is best; narrow groups read X more often from the L2 cache.
    """
    sixteens = -(-n // 16)
    per = -(-sixteens // multiprocessors)
    # Warps share K: as many for any number of rows, for one order of sums.
    warps = 8 if shared_bytes(CudaTiling(1, 4, per), CUDA_ROWS) <= shared else 4
    tilings = [CudaTiling(columns, stages, per, warps) for columns, stages in KERNELS if columns <= per]
    fitting = [tiling for tiling in tilings if shared_bytes(tiling, m) <= shared]
    even = (tiling for tiling in fitting if (-(-per // tiling.columns) * tiling.columns - per) * 16 <= per)
    return next(even, fitting[0])


def shared_bytes(tiling: CudaTiling, m: int) -> int:
    """Return the shared memory of a block for ``m`` rows of X."""
    tile = 8 if m <= 8 else 16 if m <= 16 else CUDA_ROWS
    ring = tiling.warps * tiling.stages * (tiling.columns * 16 + min(m, tile)) * 128
    turn = 32 * tiling.warps * max(tiling.ranks, 1)
    sent = -(-min(m, tile) * tiling.per * 16 // turn) * turn if tiling.ranks > 1 else 0
    return ring + 4 * (tiling.warps * tile * (tiling.columns * 16 + 4) + sent + tile) + 8


def quicker(m: int, n: int, k: int, shared: int = SHARED) -> bool:
    """Return True if ``small_matmul.cu`` was faster than the Triton kernels at such a shape on an H200. Blocks of less
    than 163 KiB (``shared``) have room for up to 8 rows beside deep rings: an H200 that acted as such a card took 6.6
    ms for a step of 16 rows of an 8B model, which is longer than one of 64 rows by Triton.

    It was, always up to 16 rows, and up to 32 for small weights. Above, it reads X from the L2 cache about as often as
    W from memory.
    """
    if shared < 163 * 1024:
        return m <= 8
    return m <= 16 or (m <= CUDA_ROWS and n <= 8192 and k <= 8192)


def cuda_refusal(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> str | None:
    """Return the reason why the CUDA kernels do not take these arguments; None if they do."""
    if x.dtype != torch.bfloat16 or weight.dtype != torch.bfloat16 or (bias is not None and bias.dtype != x.dtype):
        return "they compute in bfloat16"
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        return "x must be [M, K] and weight [N, K]"
    if any(t.stride(1) != 1 or t.stride(0) % 8 or t.data_ptr() % 16 for t in (x, weight)) or x.shape[1] % 8:
        return "they read 16 bytes at a time: K, the rows' strides and the addresses must be multiples of 16 bytes"
    return None if x.shape[1] else "K is 0"


class CudaRows:
    """``small_matmul(x, weight, bias=None, *, dependent_launch=False, tiling=None)`` by ``small_matmul.cu``.

    A row's result is the same to the bit whatever the other rows are and however many: the order of its sum depends on
    the shape of the weight alone. Above 32 rows the kernel reads W again for every 32 of them, from the L2 cache if it
    fits there, and is slower than cuBLAS.

    Raises:
        Unavailable: no NVIDIA GPU since Ampere, or no nvcc to build with.
    """

    def __init__(self) -> None:
        self._launch = cuda.bind("small_matmul", "transect_small_matmul", "ppppiiill" + "i" * 7 + "pppppf" + "ip")
        target = target_of()
        if target.capability < (8, 0):
            raise Unavailable(f"small_matmul.cu is for compute capability 8.0 and later, not for {target.name}")
        self._shared = target.block_bytes
        self._dependent = target.dependent_launch

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        *,
        dependent_launch: bool = False,
        tiling: CudaTiling | None = None,
        gated: bool = False,
    ) -> Tensor:
        """Multiply x ``[M, K]``, weight ``[N, K]``, bias ``[N]`` -> ``[M, N]``; ``gated``: ``[M, N / 2]``, see
        ``gate_up.py``.

        ``dependent_launch``: W may be read before the kernel before this one on the stream has ended, so that one must
        not write W. (On Hopper a launch always begins before the last one ends; only with ``dependent_launch`` does it
        read anything then.)

        Raises:
            ValueError: see ``cuda_refusal`` and ``CudaTiling.refusal``; with a gate N must be a multiple of 16, and no
            bias. RuntimeError: the launch failed.
        """
        how = {"dependent_launch": dependent_launch, "tiling": tiling, "gated": gated}
        return self.beside(x, weight, bias, Beside(), **how)[0]  # type: ignore[arg-type]

    def beside(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm: Beside,
        *,
        dependent_launch: bool = False,
        tiling: CudaTiling | None = None,
        gated: bool = False,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return a product with a norm beside it: (result, scaled, squares). The last two are those of
        ``stream_products.Stream``, or None where the result is not added to a stream.

        Errors are those of ``__call__``, and ``ValueError`` where ``norm.refusal``.
        """
        (m, k), n = x.shape, weight.shape[0]
        if reason := norm.refusal(x, n):
            raise ValueError(f"small_matmul.cu: {reason}")
        out = x.new_empty((m, n // 2 if gated else n))
        scaled = squares = None
        if norm.residual is not None:
            scaled, squares = x.new_empty((m, n)), x.new_empty((m, n // 16), dtype=torch.float32)
        if out.numel() == 0:
            return out, scaled, squares
        tiling = tiling or choose_tiling(m, n, multiprocessors(x.device), self._shared)
        norms = (norm.residual, norm.scale, scaled, squares, norm.squares)
        code = self._launch(
            x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(), m, n, k,
            x.stride(0), weight.stride(0), tiling.columns, tiling.stages, tiling.wide, tiling.warps, tiling.per,
            tiling.ranks, int(gated), *(0 if t is None else t.data_ptr() for t in norms), norm.eps,
            (2 if dependent_launch else 1) if self._dependent else 0,
            torch.cuda.current_stream(x.device).cuda_stream,
        )  # fmt: skip
        if code:
            reason = cuda_refusal(x, weight, bias) or tiling.refusal(m, gated)
            if gated and (n % 16 or bias is not None or norm.residual is not None):
                reason = reason or "with a gate N must be a multiple of 16, and it takes no bias and no residual"
            if reason:
                raise ValueError(f"small_matmul.cu: {reason}")
            raise RuntimeError(f"small_matmul.cu: the launch of {tiling} for {m} x {k} by {n} x {k} returned {code}")
        return out, scaled, squares
