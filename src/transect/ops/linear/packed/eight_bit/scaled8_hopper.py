"""``scaled8_hopper.cu``: the product of 17 to 256 rows with a weight of 8 bits, both rounded, on Hopper.

The kernels are those of ``few_rows/hopper.py``, with numbers of one byte: a chunk has 128 k, and an instruction
multiplies 32 of them. So a product takes what one in bfloat16 with half as many k takes, and the same rule says which
tiling is quickest (``few_rows/rule.py``). Each sum is multiplied by the scales of its rows. Sums of whole numbers
(``scaled8_hopper_int8.cu``) are exact. With scales of blocks (``scaled8_hopper_blocks.cu``) a chunk is as long as a
block: its products are summed apart, and added times their scales.

Shapes and arithmetic as in ``scaled8_tiles.py``, which runs more rows. Here the gate of an MLP is part of the product.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from ....lang import cuda
from ....lang.jit import multiprocessors
from ...few_rows import rule
from ...few_rows.hopper import FLAGS, MOST_ROWS, Compiled, HopperTiling
from .scaled8_rounding import BLOCK

LEAST_ROWS = 17
"""Fewer are bound by the weight's bytes alone: ``scaled8_rows.py`` is faster, but sums in another order."""

COMPILED: tuple[Compiled, ...] = (
    (1, 0, 32, 1, 1, 1, 2),
    (1, 0, 64, 1, 1, 1, 2),
    (1, 0, 96, 1, 1, 1, 2),
    (1, 0, 128, 1, 1, 1, 2),
    (1, 0, 128, 2, 1, 1, 1),
    (1, 0, 160, 2, 1, 1, 1),
    (1, 0, 192, 1, 1, 1, 2),
    (1, 0, 192, 2, 1, 1, 1),
    (1, 0, 224, 1, 1, 1, 1),
    (1, 0, 256, 1, 1, 1, 1),
    (0, 0, 96, 1, 1, 1, 2),
    (0, 0, 112, 1, 1, 1, 2),
    (0, 0, 128, 1, 1, 1, 2),
    (0, 0, 192, 2, 1, 2, 1),
    (0, 0, 224, 2, 1, 1, 1),
    (1, 1, 64, 1, 1, 1, 2),
    (1, 1, 128, 2, 1, 1, 1),
    (1, 1, 160, 2, 1, 1, 1),
    (1, 1, 208, 2, 1, 2, 1),
    (1, 1, 256, 2, 1, 2, 1),
    (0, 1, 112, 1, 1, 1, 2),
    (0, 1, 224, 2, 1, 1, 1),
    (0, 1, 224, 2, 1, 2, 1),
)
"""Compiled tilings, as of ``few_rows/hopper.py``: of 43 that were timed at 30 sizes
those that any of them needs, without one that has too few registers."""


COMPILED_BLOCKS: tuple[Compiled, ...] = (
    (0, 0, 64, 1, 1, 1, 2),
    (0, 0, 96, 1, 1, 1, 2),
    (0, 0, 112, 1, 1, 1, 2),
    (0, 0, 128, 1, 1, 1, 2),
    (0, 0, 64, 2, 1, 1, 1),
    (0, 0, 96, 2, 1, 1, 1),
    (0, 0, 112, 2, 1, 1, 1),
    (0, 0, 128, 2, 1, 1, 1),
    (0, 0, 128, 1, 1, 2, 2),
    (0, 0, 64, 2, 1, 2, 1),
    (0, 0, 96, 2, 1, 2, 1),
    (0, 0, 128, 2, 1, 2, 1),
    (0, 1, 64, 1, 1, 1, 2),
    (0, 1, 112, 1, 1, 1, 2),
    (0, 1, 128, 1, 1, 1, 2),
    (0, 1, 112, 2, 1, 1, 1),
    (0, 1, 128, 2, 1, 1, 1),
)
"""The same with scales of blocks, whose kernels need twice the registers for sums, and X as the left operand."""


class Kernels8(NamedTuple):
    """Kernels for one kind of numbers and scales."""

    name: str
    source: str
    """Name of the source and, after ``transect_``, of its launcher."""
    kernels: tuple[Compiled, ...]
    costs: rule.Costs


FP8 = Kernels8("fp8", "scaled8_hopper", COMPILED, rule.FP8)
WHOLE = Kernels8("int8", "scaled8_hopper_int8", COMPILED, rule.FP8)
BLOCKS = Kernels8("fp8 with scales of blocks", "scaled8_hopper_blocks", COMPILED_BLOCKS, rule.FP8_BLOCKS)


def kind_of(fp8: bool, blocks: bool) -> Kernels8:
    """Return the kernels for codes in fp8 or whole numbers, with scales of rows or, of fp8, of blocks."""
    return BLOCKS if blocks else FP8 if fp8 else WHOLE


@cache
def choose_tiling(
    m: int, n: int, k: int, gated: bool, units: int, unsplit: bool = False, kind: Kernels8 = FP8
) -> HopperTiling | None:
    """Return the tiling of least predicted time for m rows by a weight of n x k on a GPU of ``units`` multiprocessors;
    None if ``scaled8_tiles.py`` is as fast. ``unsplit``: of those that do not split K."""
    # Its tiles of 128 by 64 all run at once there, and none is long.
    if kind is FP8 and m > 224 and not gated and 2 * n <= 64 * units and k < 8192:
        return None
    columns = n // 2 if gated else n
    if gated and kind is BLOCKS and columns % BLOCK:
        return None
    return rule.quickest_of(m, columns, k // 2, gated, units, kind.costs, kind.kernels, unsplit)


def refusal(a: Tensor, codes: Tensor, scale: Tensor, kind: Kernels8 = FP8) -> str | None:
    """Return the reason why the kernels do not take these arguments; None if they do. All are as of
    ``scaled8_tiles.Tiles8.product``, which has checked them."""
    if (scale.ndim == 2) != (kind is BLOCKS):
        return f"the scales are of {'blocks' if scale.ndim == 2 else 'rows'}"
    if codes.shape[0] % 16 or a.shape[1] % 16:
        return "N and K must be multiples of 16"
    if not a.is_contiguous() or a.data_ptr() % 16:
        return "the rows must be contiguous, at an address that is a multiple of 16 bytes"
    return None if 0 < len(a) <= MOST_ROWS else f"it takes 1 to {MOST_ROWS} rows"


class HopperRows8:
    """``(a, x_scale, codes, scale, bias=None)`` by the kernels of one ``kind``, on one device. Launches share counters,
    so those of one instance must be on one stream.

    Raises:
        Unavailable: not a Hopper GPU, or no nvcc to build the kernels with.
        RuntimeError: made inside a CUDA graph capture.
    """

    def __init__(self, device: torch.device | None = None, kind: Kernels8 = FP8) -> None:
        self.kind = kind
        self._launch = cuda.bind_on_hopper(kind.source, f"transect_{kind.source}", "p" * 8 + "i" * 14 + "p", device)
        self._flags = torch.zeros(FLAGS, dtype=torch.int32, device=device or "cuda")

    def __call__(
        self,
        a: Tensor,
        x_scale: Tensor,
        codes: Tensor,
        scale: Tensor,
        bias: Tensor | None = None,
        *,
        tiling: HopperTiling | None = None,
        gated: bool = False,
        dependent_launch: bool = False,
    ) -> Tensor:
        """Multiply a, fp8 or int8 ``[M, K]`` with scales float32 ``[M]``, by codes ``[N, K]`` with scales ``[N]``; or
        with scales of blocks, ``[M, K / 128]`` and ``[N / 128, K / 128]`` rounded up.

        The result is bfloat16 ``[M, N]``; with ``gated`` ``silu(first half) * second half``, ``[M, N / 2]``, without
        bias.

        ``dependent_launch``: codes may be read before the kernel before this one on the stream has ended.

        Raises:
            ValueError: see ``refusal``; or the tiling does not take this number of rows, or a bias; or a gate has a
                part of a block of scales.
            RuntimeError: the launch failed.
        """
        (m, k), n = a.shape, codes.shape[0]
        reason = refusal(a, codes, scale, self.kind)
        tiling = tiling or choose_tiling(m, n, k, gated, multiprocessors(a.device), kind=self.kind)
        columns = n // 2 if gated else n
        if gated and self.kind is BLOCKS and columns % BLOCK:
            reason = reason or f"with a gate the outputs must be whole blocks of {BLOCK}"
        if tiling is None or bool(tiling.gated) != gated:
            reason = reason or "there is no tiling"
        else:
            reason = reason or tiling.refusal(m, columns, k // 2, bias is not None, self.kind.kernels)
        if reason or tiling is None:
            raise ValueError(f"{self.kind.source}.cu: {reason}")
        out = a.new_empty((m, columns), dtype=torch.bfloat16)
        floats = tiling.parts(columns)
        parts = a.new_empty(floats, dtype=torch.float32) if floats else None
        code = self._launch(
            a.data_ptr(), codes.data_ptr(), x_scale.data_ptr(), scale.data_ptr(),
            0 if bias is None else bias.data_ptr(), out.data_ptr(), 0 if parts is None else parts.data_ptr(),
            self._flags.data_ptr(), m, columns, k, tiling.swap, tiling.gated, tiling.right, tiling.groups,
            tiling.repeats, tiling.pair, tiling.blocks, tiling.ranks, tiling.clusters, tiling.stages,
            2 if dependent_launch else 1, torch.cuda.current_stream(a.device).cuda_stream,
        )  # fmt: skip
        if code:
            raise RuntimeError(
                f"{self.kind.source}.cu: the launch of {tiling} for {m} x {k} by {n} x {k} returned {code}"
            )
        return out
