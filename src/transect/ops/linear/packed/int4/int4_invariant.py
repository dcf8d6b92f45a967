"""The product of ``int4_matmul.py`` in one order of sums: a row's result does not depend on the number of rows.

Each weight is rounded to bfloat16 once, and products are added as ``few_rows/invariant.py`` says. Two ways do this,
with the same bits: ``int4_tiles.cu``, with a block for each part of a tile's k; and the weight rebuilt in the dtype of
x and multiplied by ``linear.invariant_linear``, which runs more rows, other dtypes and other devices.

Shapes as in ``int4_matmul.py``. Bound by bytes for few rows.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from .....hardware.device import target_of
from ....lang.jit import multiprocessors, runs_triton
from ....registry import Unavailable
from ...fixed_order import parts_of
from ...linear import invariant_linear
from .. import block_tiles
from . import int4_tiles
from .int4_matmul import dense
from .int4_packing import group_of
from .triton import rebuild

log = logging.getLogger(__name__)
UNIT = 256
"""k of a unit of ``int4_tiles.cu``, of which its blocks take whole ones."""


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
        parts = parts_of(x, n)
        parts = parts if x.shape[1] % (UNIT * parts) == 0 else 1
        few = self._tiles is not None and len(x) <= block_tiles.MOST_ROWS
        if few and self._tiles is not None and not int4_tiles.refusal(x, weight, n, bias):
            unit = int4_tiles.unit_of(group_of(weight))
            chosen = block_tiles.choose_tiling(unit, len(x), n, x.shape[1], multiprocessors(x.device))
            tiling = block_tiles.in_parts(chosen, len(x), n, parts)
            if tiling is not None:
                return self._tiles(x, weight, n, bias, tiling=tiling, dependent_launch=dependent_launch)
        if x.element_size() == 2 and runs_triton(x):
            return invariant_linear(x, rebuild(weight, n, x.dtype), bias, parts=parts)
        return invariant_linear(x, dense(weight, n, x.dtype), bias, parts=parts)
