"""Tilings of ``portable_tiles.cuh``, which ``int4_portable.py`` and ``scaled8_portable.py`` share."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ..few_rows.triton import Counters

COLUMNS = 256
"""Rows of W in a tile."""


@dataclass(frozen=True, slots=True)
class TilesTiling:
    """The tiling of a product; the fields are arguments of the launchers, in this order."""

    tiles: int
    """Groups of 8 rows of X in a tile: 1, 2, 4 or 8."""
    blocks: int
    """Blocks of a launch, which share the spans of all tiles evenly."""
    stages: int
    """Buffers of a block's ring, 2 to 4."""


@dataclass(frozen=True, slots=True)
class WeightSpan:
    """Inputs that a block brings at a time."""

    inputs: int
    weight_bytes: int
    """Bytes of a tile's rows of W."""


def tiles_bytes(tiling: TilesTiling, span: WeightSpan) -> int:
    """Return the shared memory of a block."""
    return tiling.stages * (span.weight_bytes + 8 * tiling.tiles * span.inputs * 2)


@cache
def choose_tiles(m: int, n: int, k: int, span: WeightSpan, units: int, shared: int) -> TilesTiling:
    """Return the tiling for ``m`` rows of X, ``units`` multiprocessors and ``shared`` bytes of a block: as few reads of
    W as possible, and one block for each multiprocessor, if each has 384 inputs of a tile. A narrow W is read by 32
    rows of X at a time, from the L2 cache the second time, rather than in more parts. On an H200 that acts as an Ada
    card those were the quickest.

    Raises:
        ValueError: no tiling fits.
    """
    tiles = next((tiles for tiles in (1, 2, 4) if m <= 8 * tiles), 8 if n >= 16384 else 4)
    inputs = tiles_of(tiles, m, n) * k
    for stages in (4, 3, 2):
        tiling = TilesTiling(tiles, max(1, min(units, inputs // 384)), stages)
        if tiles_bytes(tiling, span) <= shared:
            return tiling
    raise ValueError(f"no tiling of portable_tiles.cuh fits {shared} bytes of shared memory")


def tiles_of(tiles: int, m: int, n: int) -> int:
    """Return the number of tiles of ``m`` rows of X by ``n`` of W."""
    return -(-n // COLUMNS) * -(-m // (8 * tiles))


def parts_of(tiling: TilesTiling, x: Tensor, n: int, counters: Counters) -> tuple[Tensor, Tensor]:
    """Return memory for the parts of sums, two tiles of each block, and a counter for each tile."""
    parts = x.new_empty((2 * tiling.blocks, 8 * tiling.tiles * COLUMNS), dtype=torch.float32)
    return parts, counters.get(x.device, tiles_of(tiling.tiles, len(x), n))
