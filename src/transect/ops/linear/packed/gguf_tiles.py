"""``gguf_tiles.cu``: the product of many rows with a weight in a block type of GGUF files, on Hopper: tiles of the
weight are decoded in registers, which Hopper's own tensor-core products (wgmma) read.

Shapes as in ``gguf_matmul.py``; x bfloat16. A weight is rounded to bfloat16, and so are its group's scale and minimum
before. Sums in float32. Bound by the bytes of the weight for the fewest rows, by the tensor cores from about 200 on.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from ...lang import cuda
from ...lang.jit import multiprocessors
from . import gguf_rows
from .gguf_layout import FORMATS, units_of

MOST_ROWS = 512
"""More rows are quicker with a weight that is rebuilt."""
CUTS = ((16, 2, 2), (32, 2, 2), (64, 2, 2), (128, 2, 1), (128, 3, 1))
"""(rows, groups, resident) that are compiled for every type; see ``Tiling``."""
SHARED = 225 * 1024
"""Bytes of shared memory for the rings of all blocks of a multiprocessor."""
MOST_STAGES = 16
FLAGS = 4096
"""Counters of a launcher: one for each block of a launch."""


@dataclass(frozen=True, slots=True)
class Tiling:
    """How a product is cut up; the fields are arguments of the launcher."""

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

    def shared(self, unit: int) -> int:
        """Bytes of shared memory of a block."""
        return self.x_stages * self.rows * 128 + self.w_stages * self.groups * 4 * unit + 1024


def tiling_of(cut: tuple[int, int, int], name: str, m: int, n: int, k: int, units: int) -> Tiling | None:
    """The tiling of one of the compiled cuts, with as deep rings as fit; None: they do not fit.
    ``units``: multiprocessors."""
    rows, groups, resident = cut
    down, across = units_of(n, k)
    tiles = -(-down // (4 * groups)) * -(-m // rows)
    blocks = min(units * resident, tiles * across)
    unit = FORMATS[name].unit
    left = SHARED // resident - 2048
    for w_stages in (4, 3, 2):
        x_stages = min(MOST_STAGES, 4 * w_stages, (left - w_stages * groups * 4 * unit) // (rows * 128))
        if x_stages >= (4 if w_stages > 2 else 2):
            return Tiling(rows, groups, resident, blocks, w_stages, x_stages)
    return None


@cache
def choose_tiling(name: str, m: int, n: int, k: int, units: int) -> Tiling:
    """The tiling of m rows: tiles as high as they need, or several of 128 rows."""
    cut = next((each for each in CUTS if m <= each[0]), CUTS[-1])
    tiling = tiling_of(cut, name, m, n, k, units)
    if tiling is None:
        raise ValueError(f"the rings of {cut} do not fit with units of {name}")
    return tiling


def refusal(x: Tensor, arranged: Tensor, name: str, outputs: int, bias: Tensor | None = None) -> str | None:
    """Why the kernels do not take these arguments, or None."""
    if outputs % 8:
        return "N must be a multiple of 8"
    return gguf_rows.refusal(x, arranged, name, outputs, bias)


class GGUFTiles:
    """``(x, arranged, name, outputs, bias=None)`` by ``gguf_tiles.cu``.

    Launches share counters, so those of one instance must be on one stream.

    Raises:
        Unavailable: not a Hopper GPU, or no nvcc to build the kernels with.
        RuntimeError: made inside a CUDA graph capture.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._launch = cuda.bind_on_hopper("gguf_tiles", "transect_gguf_tiles", "ppppppiiil" + "iiiiiiii" + "p", device)
        self._flags = torch.zeros(FLAGS, dtype=torch.int32, device=device or "cuda")

    def __call__(
        self,
        x: Tensor,
        arranged: Tensor,
        name: str,
        outputs: int,
        bias: Tensor | None = None,
        *,
        dependent_launch: bool = False,
        tiling: Tiling | None = None,
    ) -> Tensor:
        """x ``[M, K]`` -> ``[M, N]``.

        Raises:
            ValueError: see ``refusal``.
            RuntimeError: the launch failed.
        """
        reason = refusal(x, arranged, name, outputs, bias)
        if reason:
            raise ValueError(f"gguf_tiles.cu: {reason}")
        m, k = x.shape
        out = x.new_empty(m, outputs)
        if not out.numel():
            return out
        tiling = tiling or choose_tiling(name, m, outputs, k, multiprocessors(x.device))
        parts = x.new_empty(tiling.blocks * tiling.rows * tiling.groups * 64, dtype=torch.float32)
        code = self._launch(
            x.data_ptr(), arranged.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
            parts.data_ptr(), self._flags.data_ptr(), m, outputs, k, x.stride(0), FORMATS[name].index, tiling.rows,
            tiling.groups, tiling.resident, tiling.blocks, tiling.w_stages, tiling.x_stages,
            2 if dependent_launch else 1, torch.cuda.current_stream(x.device).cuda_stream,
        )  # fmt: skip
        if code:
            raise RuntimeError(
                f"gguf_tiles.cu: the launch of {tiling} for {m} x {k} by {outputs} x {k} returned {code}"
            )
        return out
