"""The product of ``int4_matmul.py`` in one order of sums: a row's result does not depend on the number of rows.

Each weight is rounded to bfloat16 once, and products are added in the order of k, in steps of 16, by Hopper's
tensor-core instruction. Two ways do this, with the same bits: ``int4_tiles.cu``, whose blocks take whole tiles here, so
that K is never split; and the weight rebuilt in the dtype of x and multiplied by ``linear.invariant_linear``, for more
rows, other dtypes and other devices.

Shapes as in ``int4_matmul.py``. Bound by bytes for few rows.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from .....hardware.device import target_of
from ....lang.jit import multiprocessors, runs_triton
from ....registry import Unavailable
from ...linear import invariant_linear
from .. import block_tiles
from ..block_tiles import BlockTiling
from . import int4_tiles
from .int4_matmul import dense
from .int4_packing import group_of
from .triton import rebuild

log = logging.getLogger(__name__)


class InvariantCodes:
    """``(x, weight, n, bias=None)``, see above, on one device."""

    def __init__(self, device: torch.device | str) -> None:
        device = torch.device(device)
        self._tiles: int4_tiles.Int4Tiles | None = None
        if not target_of(device).hopper:
            return
        try:
            self._tiles = int4_tiles.Int4Tiles(device)
        except Unavailable as reason:
            log.warning("products in 4 bits rebuild the matrix in each step, which is slower: %s", reason)

    def __call__(
        self, x: Tensor, weight: Tensor, n: int, bias: Tensor | None = None, *, dependent_launch: bool = False
    ) -> Tensor:
        """Multiply x ``[M, K]`` by a weight from ``arrange`` of n rows -> ``[M, n]``."""
        few = self._tiles is not None and len(x) <= block_tiles.MOST_ROWS
        if few and self._tiles is not None and not int4_tiles.refusal(x, weight, n, bias):
            tiling = whole_tiles(int4_tiles.unit_of(group_of(weight)), len(x), n, x.shape[1], multiprocessors(x.device))
            if tiling is not None:
                return self._tiles(x, weight, n, bias, tiling=tiling, dependent_launch=dependent_launch)
        if x.element_size() == 2 and runs_triton(x):
            return invariant_linear(x, rebuild(weight, n, x.dtype), bias)
        return invariant_linear(x, dense(weight, n, x.dtype), bias)


def whole_tiles(unit: int, m: int, n: int, k: int, units: int) -> BlockTiling | None:
    """Return the tiling of ``choose_tiling`` with as many blocks as tiles, so that none shares its k; None if there
    are too many."""
    return block_tiles.unsplit(block_tiles.choose_tiling(unit, m, n, k, units), m, n)
