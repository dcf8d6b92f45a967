"""``block_tiles.cuh``: the product of many rows with a packed weight on Hopper. Tiles of the weight are decoded in
registers, which Hopper's own tensor-core products (wgmma) read. How a product is cut, and the call.

Shapes as in ``gguf/gguf_matmul.py`` and ``int4/int4_matmul.py``; x bfloat16. A weight is rounded to bfloat16, and so
are its group's scale and minimum before. Sums in float32. Bound by the bytes of the weight for the fewest rows, by the
tensor cores from about 200 on.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from ...lang import cuda
from ...lang.jit import multiprocessors
from .gguf.gguf_layout import units_of

MOST_ROWS = 512
"""Most rows; for more it is faster to dequantize the weight first."""
CUTS = ((16, 2, 2), (32, 2, 2), (64, 2, 2), (128, 2, 1), (128, 3, 1), (256, 2, 1))
"""(rows, groups, resident) that are compiled for every type; see ``BlockTiling``."""
SHARED = 225 * 1024
"""Bytes of shared memory for the rings of all blocks of a multiprocessor."""
MOST_STAGES = 16
MOST_BLOCKS = 4096
"""Blocks of a launch; a launcher has a flag and a counter for each."""
MANY_SHARERS = 6
"""From this number of blocks to a tile on they add its parts together."""
LONG = 12
"""From this number of units to a block on tiles of 256 rows are quicker."""
SIGNATURE = "ppppppiiil" + "iiiiiiiiii" + "p"
"""Types of a launcher's arguments, as letters of ``cuda.bind``."""


@dataclass(frozen=True, slots=True)
class BlockTiling:
    """Tiling of a product; the fields are arguments of the launcher."""

    rows: int
    """Rows of x in a tile."""
    groups: int
    """Warpgroups that multiply, with 64 rows of the weight each."""
    resident: int
    """Blocks that fit on a multiprocessor."""
    blocks: int
    """Blocks of the launch, which share the units of all tiles evenly."""
    w_stages: int
    """Units of each row of the weight that a ring holds."""
    x_stages: int
    """Spans of 64 columns of x that a ring holds."""
    together: bool = False
    """True if all blocks of a tile add its parts; if not, the block with its first columns does."""

    @property
    def sums(self) -> int:
        """Numbers in float32 that blocks leave for each other."""
        return self.blocks * self.rows * self.groups * 64 * (1 + self.together)

    def shared(self, unit: int) -> int:
        """Return the bytes of shared memory of a block."""
        return self.x_stages * self.rows * 128 + self.w_stages * self.groups * 4 * unit + 1024


def tiling_of(
    cut: tuple[int, int, int],
    unit: int,
    m: int,
    n: int,
    k: int,
    units: int,
    together: bool | None = None,
) -> BlockTiling | None:
    """Return the tiling of one of the compiled cuts, with as deep rings as fit; None if they do not fit.

    ``unit``: bytes of 16 rows by 256 columns of the weight; ``units``: multiprocessors; ``together``: None leaves it to
    ``MANY_SHARERS``.
    """
    rows, groups, resident = cut
    team = 2 if rows == 256 else 1  # blocks of a cluster, which fetch x for each other
    down, across = units_of(n, k)
    tiles = -(-down // (4 * groups * team)) * -(-m // rows)
    teams = min(units * resident // team, tiles * across)
    if together is None:
        together = teams >= MANY_SHARERS * tiles
    left = SHARED // resident - 2048
    for w_stages in (4, 3, 2):
        x_stages = min(MOST_STAGES, 4 * w_stages, (left - w_stages * groups * 4 * unit) // (rows * 128))
        if x_stages >= (4 if w_stages > 2 else 2):
            return BlockTiling(rows, groups, resident, teams * team, w_stages, x_stages, together)
    return None


@cache
def choose_tiling(unit: int, m: int, n: int, k: int, units: int) -> BlockTiling:
    """Return the quickest tiling of m rows on an H200.

    Tiles have as many rows as it takes, up to 128; for more they follow one another, or have 256 where every block has
    much to do. A weight is decoded once for each tile of rows.
    """
    down, across = units_of(n, k)
    cut = next((each for each in CUTS if m <= each[0] <= 128), (128, 3, 1))
    if cut == (128, 2, 1) and down >= 12 * units:
        cut = (128, 3, 1)
    if -(-m // 128) % 2 == 0 and -(-down // 8) * -(-m // 256) * across >= LONG * units:
        cut = (256, 2, 1)
    tiling = tiling_of(cut, unit, m, n, k, units)
    if tiling is None:
        raise ValueError(f"the rings of {cut} do not fit with units of {unit} bytes")
    return tiling


def in_parts(tiling: BlockTiling, m: int, n: int, parts: int) -> BlockTiling | None:
    """Return the same tiling with a block for each of ``parts`` of each tile's k, so that the order of sums does not
    depend on m; None if those are too many."""
    team = 2 if tiling.rows == 256 else 1
    tiles = -(-units_of(n, 1)[0] // (4 * tiling.groups * team)) * -(-m // tiling.rows)
    blocks = tiles * team * parts
    return None if blocks > MOST_BLOCKS else replace(tiling, blocks=blocks, together=False)


def refusal(outputs: int, bias: Tensor | None, gated: bool) -> str | None:
    """Return the reason why the kernel cannot produce this result; None if it can."""
    if outputs % 8:
        return "N must be a multiple of 8"
    if gated and (outputs % 32 or bias is not None):
        return "with a gate N must be a multiple of 32, and there is no bias"
    return None


class Tiles:
    """A launcher of ``block_tiles.cuh``. Launches of one instance share counters, so they must be on one stream.

    Raises:
        Unavailable: not a Hopper GPU, or no nvcc to build the kernels with.
        RuntimeError: made inside a CUDA graph capture.
    """

    def __init__(self, source: str, device: torch.device | None = None) -> None:
        self._source = f"{source}.cu"
        self._launch = cuda.bind_on_hopper(source, f"transect_{source}", SIGNATURE, device)
        self._flags = torch.zeros(2 * MOST_BLOCKS, dtype=torch.int32, device=device or "cuda")

    def run(
        self,
        x: Tensor,
        arranged: Tensor,
        index: int,
        unit: int,
        outputs: int,
        bias: Tensor | None,
        *,
        gated: bool,
        dependent_launch: bool,
        tiling: BlockTiling | None,
    ) -> Tensor:
        """Multiply x ``[M, K]`` -> ``[M, N]``, or ``[M, N / 2]`` with ``gated``. ``index``: the source's number for the
        weight's layout; ``unit``: bytes of 16 rows by 256 columns.

        Raises:
            RuntimeError: the launch failed.
        """
        m, k = x.shape
        out = x.new_empty(m, outputs // 2 if gated else outputs)
        if not out.numel():
            return out
        tiling = tiling or choose_tiling(unit, m, outputs, k, multiprocessors(x.device))
        parts = x.new_empty(tiling.sums, dtype=torch.float32)
        code = self._launch(
            x.data_ptr(), arranged.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
            parts.data_ptr(), self._flags.data_ptr(), m, outputs, k, x.stride(0), index, tiling.rows, tiling.groups,
            tiling.resident, tiling.blocks, tiling.w_stages, tiling.x_stages, int(tiling.together),
            int(gated), 2 if dependent_launch else 1, torch.cuda.current_stream(x.device).cuda_stream,
        )  # fmt: skip
        if code:
            raise RuntimeError(f"{self._source}: the launch of {tiling} for {m} x {k} by {outputs} x {k} gave {code}")
        return out
