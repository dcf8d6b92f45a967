r"""The products of a decoder's layers on its residual stream, with no kernel for the norms between them.

Between two products of a decoder stand a residual add and an RMSNorm,

    t = X W^T + residual            Y = (t s / rms(t)) V^T + c,     rms(t) = sqrt(mean(t^2) + eps) of each row,

and rms(t) is one number for a row. So the second product can divide its sums by it instead of its input. The first
product adds to the stream and leaves t, t s and the sums of squares of every 16 elements of t (a ``ResidualStream``).
The second one multiplies t s, and adds up a row's squares while its weights arrive. ``few_rows/small_matmul.cu`` does
this for few rows, ``few_rows/triton.py`` and ``few_rows/gluon.py`` for more. t and t s are rounded to bfloat16, as
``norm/add_rms_norm.py`` rounds t and the norm. Squares are added in one order, so every run gives the same bits.

Shapes: x ``[M, K]``, weight ``[N, K]``, all bfloat16; a ``ResidualStream`` is ``[M, D]``, D a multiple of 64.

Bound by bytes, as the products are. The gain is latency: in a decode step of a small model each kernel waits for the
one before it. So it runs for the sizes where it was measured to be quicker: the choices in ``ops/tuned/small_matmul``
whose names end in ``stream``; and for one row of any model on Hopper. The measurements are in
``docs/lab-notes/few-row-products.md``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ..registry import Unavailable
from .few_rows import choices
from .few_rows.cuda import CUDA_ROWS, Beside, CudaRows, CudaTiling
from .few_rows.gluon import GluonRows, GluonTiling, device_refusal
from .few_rows.triton import TritonRows, TritonTiling

log = logging.getLogger(__name__)
Size = tuple[int, int, bool]
"""The size of a product: N, K, whether it has a gate."""


class ResidualStream(NamedTuple):
    """Rows of a residual stream, with the inputs of the product after the next norm."""

    total: Tensor
    """``[M, D]``: the stream."""
    scaled: Tensor
    """``[M, D]``: the stream times the weight of the next norm."""
    squares: Tensor | None
    """Float32: of every 16 elements ``[M, D / 16]``, or, by the Triton kernels, of every tile of columns. None where
    ``scaled`` is divided by its root mean square already."""
    eps: float
    """The eps of the next norm."""
    row_scale: Tensor | None = None
    """Where ``scaled`` holds codes of 8 bits of the norm: their scales (``packed/eight_bit/scaled8_rounding.py``)."""


class StreamProducts:
    """The products that begin and end at the residual stream, on one NVIDIA GPU.

    Every launch may read its weight before the kernel before it has ended, so that kernel must not write weights.

    Args:
        device: the GPU.
        choose: a function of (m, n, k, gated) that gives the tiling, for ``few_rows/small_matmul.cu``,
            ``few_rows/triton.py`` or ``few_rows/gluon.py``, or None for sizes that do not run here; by default the
            choices that are shipped for the device.

    The CUDA kernels are made at first use. If they cannot be (no nvcc), the log says so once, and no product runs on
    them.
    """

    def __init__(
        self,
        device: torch.device,
        choose: Callable[[int, int, int, bool], CudaTiling | TritonTiling | GluonTiling | None] | None = None,
    ) -> None:
        self._triton, self._gluon = TritonRows(), GluonRows()
        self._kernel: CudaRows | None = None
        self._unavailable = False
        self._choose = choose or partial(_shipped, device)

    def takes(self, x: Tensor, sizes: Iterable[Size]) -> bool:
        """Return True if the products of all these sizes in a step on the stream x ``[M, D]`` run here."""
        rows = len(x)
        if x.dtype != torch.bfloat16 or not 0 < rows <= choices.MOST_ROWS:
            return False
        kinds = {type(self._choose(rows, *size)) for size in sizes}  # they read each other's squares: all of one kind
        if kinds in ({TritonTiling}, {GluonTiling}, {TritonTiling, GluonTiling}):
            return GluonTiling not in kinds or not device_refusal(x.device)
        return kinds == {CudaTiling} and rows <= CUDA_ROWS and self._made() is not None

    def add(self, x: Tensor, weight: Tensor, residual: Tensor, scale: Tensor, eps: float) -> ResidualStream:
        """Compute ``x weight^T + residual``, and the inputs of the product after the norm (weight ``scale``,
        ``eps``)."""
        total, scaled, squares = self._run(x, weight, None, Beside(residual=residual, scale=scale))
        assert scaled is not None and squares is not None
        return ResidualStream(total, scaled, squares, eps)

    def linear(self, stream: ResidualStream, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Compute ``rms_norm(stream) weight^T + bias``."""
        return self._run(stream.scaled, weight, bias, Beside(squares=stream.squares, eps=stream.eps))[0]

    def product(self, x: Tensor, weight: Tensor) -> Tensor:
        """Compute ``x weight^T``, with no norm beside it."""
        return self._run(x, weight, None, Beside())[0]

    def gate_up(self, stream: ResidualStream, weight: Tensor) -> Tensor:
        """Compute ``gate_up`` (see ``gate_up.py``) of ``rms_norm(stream)``."""
        return self._run(stream.scaled, weight, None, Beside(squares=stream.squares, eps=stream.eps), gated=True)[0]

    def _run(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, norm: Beside, *, gated: bool = False
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        n, k = weight.shape
        tiling = self._choose(len(x), n, k, gated)
        if isinstance(tiling, TritonTiling):
            return self._triton.beside(x, weight, bias, norm, tiling=tiling)
        if isinstance(tiling, GluonTiling):
            return self._gluon.beside(x, weight, bias, norm, tiling=tiling)
        kernel = self._made()
        if tiling is None or kernel is None:
            raise ValueError(f"no kernel is chosen for {list(x.shape)} by {list(weight.shape)}: ask takes() first")
        return kernel.beside(x, weight, bias, norm, dependent_launch=True, tiling=tiling, gated=gated)

    def _made(self) -> CudaRows | None:
        if self._kernel is None and not self._unavailable:
            try:
                self._kernel = CudaRows()
            except Unavailable as reason:
                self._unavailable = True
                log.warning("the norms of a decode step are kernels of their own, which is slower: %s", reason)
        return self._kernel


def _shipped(
    device: torch.device, m: int, n: int, k: int, gated: bool
) -> CudaTiling | TritonTiling | GluonTiling | None:
    choice = choices.chosen(m, n, k, device, gated=gated, stream=True)
    return None if choice is None or choice.by == "hopper" else choice.tiling
