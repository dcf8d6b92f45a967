"""``int4_portable.cu`` for Python: its tilings, and the call. bfloat16, since Ampere.

Where Hopper's ``int4_matmul.cu`` does not run. Bound by the bytes of the weight; the head of the source says what a
block does. The rule is a guess: as even shares as possible, then as many bytes on their way as fit.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import product

import torch
from torch import Tensor

from .....hardware.device import target_of
from ....lang.cuda import bind_since_ampere
from ....lang.jit import multiprocessors
from ...few_rows.triton import Counters
from .int4_packing import CHUNK, group_of
from .int4_rows import cuda_refusal

MOST_ROWS = 128
"""More rows read the weight more often than it takes to dequantize it once."""
ALONE_ROWS = 8
"""Up to this many rows every warp may have a ring of its own (see ``shares_rows``)."""
TILE_COLUMNS, TILE_SIXTEENS = 256, 16
"""Rows of W in a tile."""
COLUMNS = (1, 2, 3, 4)
"""The compiled numbers of sixteens of W for a warp at a time."""
ENOUGH = 24
"""Spans of 128 k (1 KiB of codes) that a block must have in flight to keep memory busy: a guess."""


@dataclass(frozen=True, slots=True)
class PortableTiling:
    """The tiling of ``int4_portable.cu``; the fields are arguments of its launcher, in this order."""

    columns: int
    """Groups of 16 rows of W for a warp at a time."""
    tiles: int
    """Groups of 8 rows of X at a time, 1 or 2."""
    per: int
    """Groups of 16 rows of W for a block."""
    warps: int
    """Warps of a block, which share K."""
    stages: int
    """Buffers of a warp's ring, 2 to 4."""


def shared_bytes(tiling: PortableTiling, m: int, group: int) -> int:
    """Return the shared memory of a block for ``m`` rows of X."""
    rows = 8 * tiling.tiles
    stage = tiling.columns * (1024 + CHUNK // group * 64) + min(m, rows) * 272
    return tiling.warps * (tiling.stages * stage + 4 * rows * (16 * tiling.columns + 4))


@cache
def choose_tiling(m: int, n: int, k: int, group: int, units: int, shared: int, gated: bool = False) -> PortableTiling:
    """Return the tiling for ``m`` rows of X, ``units`` multiprocessors and ``shared`` bytes of a block."""
    sixteens, chunks, tiles = -(-n // 16), k // CHUNK, 1 if m <= 8 else 2
    row_tiles = -(-m // (8 * tiles))
    per = max(1, -(-sixteens * row_tiles // units))
    per += gated and per % 2
    best: tuple[float, PortableTiling] | None = None
    for columns, warps, stages in product(COLUMNS, (8, 4, 2, 1), (4, 3, 2)):
        tiling = PortableTiling(columns, tiles, per, warps, stages)
        fits = columns <= per and not (gated and columns % 2) and warps <= max(1, chunks)
        if not fits or shared_bytes(tiling, m, group) > shared:
            continue
        # Spans that a block's warps read, those of rows that are not there included; X comes from the L2 cache, at half
        # the cost of a byte of W; fewer spans on their way than ``ENOUGH`` leave memory idle.
        spans = -(-per // columns) * columns * -(-chunks // warps) * warps
        beside = min(m, 8 * tiles) * 64 / (columns * 1088)
        time = spans * (1 + beside) / min(1, warps * (stages - 1) * columns / ENOUGH)
        if best is None or time < best[0]:
            best = time, tiling
    if best is None:
        raise ValueError(f"no tiling of int4_portable.cu fits {shared} bytes of shared memory")
    return best[1]


@dataclass(frozen=True, slots=True)
class TilesTiling:
    """The tiling for more rows; the fields are arguments of its launcher, in this order."""

    tiles: int
    """Groups of 8 rows of X in a tile: 1, 2, 4 or 8."""
    split: int
    """Blocks that share K."""
    stages: int


def tiles_bytes(tiling: TilesTiling, group: int) -> int:
    """Return the shared memory of a block, with the word that says which block was last."""
    rows = 8 * tiling.tiles
    stage = TILE_SIXTEENS * (1024 + CHUNK // group * 64) + rows * 272
    return tiling.stages * stage + 128


@cache
def choose_tiles(m: int, n: int, k: int, group: int, units: int, shared: int) -> TilesTiling:
    """Return the tiling for ``m`` rows of X: as few reads of W as possible, then one block for each multiprocessor, if
    each has 3 spans of K. A narrow W is read by 32 rows of X at a time, from the L2 cache the second time, rather than
    in more parts. On an H200 that acts as an Ada card those were the quickest."""
    tiles = next((tiles for tiles in (1, 2, 4) if m <= 8 * tiles), 8 if n >= 16384 else 4)
    blocks = -(-n // TILE_COLUMNS) * -(-m // (8 * tiles))
    split = max(1, min(k // CHUNK // 3, units // blocks))
    for stages in (4, 3, 2):
        tiling = TilesTiling(tiles, split, stages)
        if tiles_bytes(tiling, group) <= shared:
            return tiling
    raise ValueError(f"no tiling of int4_portable.cu fits {shared} bytes of shared memory")


def shares_rows(m: int, n: int, k: int) -> bool:
    """Return True if the warps of a block share the rows of X; with up to 8 rows that was quicker for wide and for deep
    weights."""
    return m > ALONE_ROWS or n >= 16384 or k >= 8192


class PortableCodes:
    """``int4_matmul`` by ``int4_portable.cu``, with counters of its own: its launches must be on one stream.

    Raises:
        Unavailable: no NVIDIA GPU since Ampere, or no nvcc to build the kernels with.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._target = target_of(device)
        self._counters = Counters()
        if device is not None and device.type == "cuda":
            self._counters.get(device, 1)  # not in a capture
        self._launch, self._launch_tiles = (
            bind_since_ampere("int4_portable", f"transect_int4_portable{name}", signature, device)
            for name, signature in (("", "ppppiiiil" + "iiiii" + "iip"), ("_tiles", "ppppppiiiil" + "iii" + "iip"))
        )

    def __call__(
        self, x: Tensor, weight: Tensor, n: int, bias: Tensor | None = None, *, gated: bool = False,
        dependent_launch: bool = False, tiling: PortableTiling | TilesTiling | None = None,
    ) -> Tensor:  # fmt: skip
        """Compute ``int4_matmul.reference``; ``gated``: groups of 16 rows of W are gate and up in turn, and the result
        is ``silu(gate) * up [M, N / 2]``.

        Raises:
            ValueError: see ``cuda_refusal``; with a gate N must be a multiple of 32, without bias.
            RuntimeError: the launch failed.
        """
        reason = cuda_refusal(x, weight, n, bias)
        if gated and (n % 32 or bias is not None):
            reason = reason or "with a gate N must be a multiple of 32, and there is no bias"
        if reason:
            raise ValueError(f"int4_portable.cu: {reason}")
        (m, k), group = x.shape, group_of(weight)
        out = x.new_empty((m, n // 2 if gated else n))
        if not out.numel():
            return out
        units, room = multiprocessors(x.device), self._target.block_bytes
        if tiling is None and not shares_rows(m, n, k):
            tiling = choose_tiling(m, n, k, group, units, room, gated)
        tiling = tiling or choose_tiles(m, n, k, group, units, room)
        early = (2 if dependent_launch else 1) if self._target.dependent_launch else 0
        pointers = (x.data_ptr(), weight.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr())
        sizes = (m, n, k, group, x.stride(0))
        last = (int(gated), early, torch.cuda.current_stream(x.device).cuda_stream)
        if isinstance(tiling, PortableTiling):
            code = self._launch(
                *pointers, *sizes, tiling.columns, tiling.tiles, tiling.per, tiling.warps, tiling.stages, *last
            )
        else:
            parts, counters = 0, 0
            if tiling.split > 1:
                blocks = -(-n // TILE_COLUMNS) * -(-m // (8 * tiling.tiles))
                held = x.new_empty((blocks, tiling.split, 8 * tiling.tiles * TILE_COLUMNS), dtype=torch.float32)
                parts, counters = held.data_ptr(), self._counters.get(x.device, blocks).data_ptr()
            code = self._launch_tiles(
                *pointers, parts, counters, *sizes, tiling.tiles, tiling.split, tiling.stages, *last
            )
        if code:
            raise RuntimeError(f"int4_portable.cu: the launch of {tiling} for {m} x {k} by {n} x {k} returned {code}")
        return out
