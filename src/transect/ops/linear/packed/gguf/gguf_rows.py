"""``gguf_rows.cu``: the product of a few rows with a weight in a block type of GGUF files: the blocks are
streamed once, in their own bits, and decoded in registers.

Shapes as in ``gguf_matmul.py``; x bfloat16 below 2^63, whose digits below 2^-57 are lost. Sums in float32. Bound by the
bytes of the weight for the fewest rows, by instructions that decode for more.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from .....hardware.device import target_of
from .....spec.numbers.gguf import UNITS
from ....lang import cuda
from ....lang.jit import multiprocessors
from ...few_rows.cuda import SHARED
from .gguf_layout import ROWS, arranged_shape, units_of

MOST_ROWS = 8
"""For more rows tiles of tensor-core products are quicker (``gguf_tiles.py``)."""
X_BYTES = 2 * 256 + 16
"""Bytes of a row of x in a buffer."""
GROUP_END = {False: 1.0, True: 0.3}
"""Cost of the end of a group of sixteens, where all warps of a block wait, in steps of a warp. The key is True for more
than two rows, which teams that are in step ask for at the same time."""


@dataclass(frozen=True, slots=True)
class GGUFTiling:
    """Tiling of a product: the fields are arguments of the launcher."""

    columns: int
    """Groups of 16 rows of the weight for a warp at a time, 1 or 2."""
    per: int
    """Sixteens for a block of threads."""
    warps: int
    """Warps of a block: 4, 8, 12 or 16."""
    teams: int
    """Teams of warps have sixteens of their own; the warps of a team share K."""
    stages: int
    """Buffers of a warp's ring, 2 to 4."""


def shared_bytes(tiling: GGUFTiling, unit: int, m: int) -> int:
    """Return the shared memory of a block, in bytes, for ``m`` rows of x and units of ``unit`` bytes."""
    sums = 4 * MOST_ROWS * (16 * tiling.columns + 4)
    return tiling.warps * (tiling.stages * (tiling.columns * unit + min(m, MOST_ROWS) * X_BYTES) + sums)


def tiling_of(
    m: int, n: int, k: int, unit: int, units: int, columns: int, warps: int, *, resident: int = 1, gated: bool = False,
    teams: int | None = None, shared: int = SHARED,
) -> GGUFTiling | None:  # fmt: skip
    """Choose a tiling in which blocks share the rows of W evenly, ``resident`` on each of ``units`` multiprocessors.

    Warps form the number of teams with the least waiting (or ``teams``), with rings as deep as fit. None if not even
    two buffers fit.
    """
    across = units_of(n, k)[1]
    per = -(-n // (ROWS * units * resident))
    per += gated and per % 2

    def steps(teams: int) -> float:
        groups = -(-per // (teams * columns))
        return groups * (-(-across * teams // warps) * columns + GROUP_END[m > 2])

    possible = [t for t in range(1, warps + 1) if warps % t == 0 and not (gated and t * columns % 2)]
    teams = teams or min(possible, key=steps)
    for stages in (4, 3, 2):
        tiling = GGUFTiling(columns, per, warps, teams, stages)
        if shared_bytes(tiling, unit, m) <= shared // resident - 1024:
            return tiling
    return None


@cache
def choose_tiling(
    m: int, n: int, k: int, unit: int, units: int, gated: bool = False, shared: int = SHARED
) -> GGUFTiling:
    """Return the tiling of m rows: sixteen warps where their rings fit, which is for one or two rows."""
    for columns, warps in ((2, 16), (2, 8), (1, 8), (1, 4)):
        tiling = tiling_of(m, n, k, unit, units, columns, warps, gated=gated, shared=shared)
        if tiling is not None:
            return tiling
    raise ValueError(f"no tiling fits {m} rows of units of {unit} bytes")


def refusal(x: Tensor, arranged: Tensor, name: str, outputs: int, bias: Tensor | None = None) -> str | None:
    """Return the reason why the kernels do not take these arguments; None if they do."""
    if x.dtype != torch.bfloat16 or (bias is not None and bias.dtype != x.dtype):
        return "they compute in bfloat16"
    if x.dim() != 2 or x.stride(1) != 1 or x.shape[1] % 8 or x.stride(0) % 8 or x.data_ptr() % 16:
        return "they read 16 bytes of x at a time: K, the rows' stride and the address must be multiples of that"
    if tuple(arranged.shape) != arranged_shape(UNITS[name], outputs, x.shape[1]) or not arranged.is_contiguous():
        return f"the weight must be the contiguous units of {name} for [{outputs}, {x.shape[1]}]"
    return None


class GGUFRows:
    """``(x, arranged, name, outputs, bias=None)`` by ``gguf_rows.cu``.

    Raises:
        Unavailable: no NVIDIA GPU since Ampere, or no nvcc to build the kernels with.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._target = target_of(device)
        self._launch = cuda.bind_since_ampere("gguf_rows", "transect_gguf_rows", "ppppiiil" + "iiiiiiii" + "p", device)

    def _dependence(self, early: bool) -> int:
        """Return the launcher's number: 0 for an ordinary launch, 2 for one that asks for the weight early."""
        return (2 if early else 1) if self._target.dependent_launch else 0

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
        tiling: GGUFTiling | None = None,
    ) -> Tensor:
        """Multiply x ``[M, K]`` -> ``[M, N]``; ``gated``: groups of 16 rows are gate and up alternately, the result is
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
        (m, k), kind = x.shape, UNITS[name]
        out = x.new_empty(m, outputs // 2 if gated else outputs)
        if not out.numel():
            return out
        tiling = tiling or choose_tiling(
            min(m, 8), outputs, k, kind.unit, multiprocessors(x.device), gated, self._target.block_bytes
        )
        code = self._launch(
            x.data_ptr(), arranged.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(), m, outputs, k,
            x.stride(0), kind.index, tiling.columns, tiling.per, tiling.warps, tiling.teams,
            tiling.stages, int(gated), self._dependence(dependent_launch),
            torch.cuda.current_stream(x.device).cuda_stream,
        )  # fmt: skip
        if code:
            raise RuntimeError(f"gguf_rows.cu: the launch of {tiling} for {m} x {k} by {outputs} x {k} returned {code}")
        return out
