"""``scaled8_hopper.cu``: the product of 17 to 256 rows with a weight in fp8, both rounded, on Hopper.

The kernels are those of ``few_rows/hopper.py``, with numbers of one byte: a chunk has 128 k, and an instruction
multiplies 32 of them. So a product takes what one in bfloat16 with half as many k takes, and the same rule says which
tiling is quickest (``few_rows/rule.py``). Each sum is multiplied by the scales of its rows.

Shapes and arithmetic as in ``scaled8_tiles.py``, which runs what this does not: more rows, whole numbers, and scales of
blocks. Here the gate of an MLP is part of the product.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from ....lang import cuda
from ....lang.jit import multiprocessors
from ...few_rows import rule
from ...few_rows.hopper import FLAGS, MOST_ROWS, Compiled, HopperTiling

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


@cache
def choose_tiling(m: int, n: int, k: int, gated: bool, units: int, unsplit: bool = False) -> HopperTiling | None:
    """Return the tiling of least predicted time for m rows by a weight of n x k on a GPU of ``units`` multiprocessors;
    None if ``scaled8_tiles.py`` is as fast. ``unsplit``: of those that do not split K."""
    # Its tiles of 128 by 64 all run at once there, and none is long.
    if m > 224 and not gated and 2 * n <= 64 * units and k < 8192:
        return None
    columns = n // 2 if gated else n
    return rule.quickest_of(m, columns, k // 2, gated, units, rule.FP8, COMPILED, unsplit)


def refusal(a: Tensor, codes: Tensor, scale: Tensor) -> str | None:
    """Return the reason why the kernels do not take these arguments; None if they do. All are as of
    ``scaled8_tiles.Tiles8.product``, which has checked them."""
    if scale.ndim != 1:
        return "the scales are of blocks"
    if codes.shape[0] % 16 or a.shape[1] % 16:
        return "N and K must be multiples of 16"
    if not a.is_contiguous() or a.data_ptr() % 16:
        return "the rows must be contiguous, at an address that is a multiple of 16 bytes"
    return None if 0 < len(a) <= MOST_ROWS else f"it takes 1 to {MOST_ROWS} rows"


class HopperRows8:
    """``(a, x_scale, codes, scale, bias=None)`` by ``scaled8_hopper.cu``, on one device. Launches share counters, so
    those of one instance must be on one stream.

    Raises:
        Unavailable: not a Hopper GPU, or no nvcc to build the kernels with.
        RuntimeError: made inside a CUDA graph capture.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._launch = cuda.bind_on_hopper(
            "scaled8_hopper", "transect_scaled8_hopper", "p" * 8 + "i" * 14 + "p", device
        )
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
        """Multiply a, fp8 or int8 ``[M, K]`` with scales float32 ``[M]``, by codes ``[N, K]`` with scales ``[N]``.

        The result is bfloat16 ``[M, N]``; with ``gated`` ``silu(first half) * second half``, ``[M, N / 2]``, without
        bias.

        ``dependent_launch``: codes may be read before the kernel before this one on the stream has ended.

        Raises:
            ValueError: see ``refusal``; or the tiling does not take this number of rows, or a bias.
            RuntimeError: the launch failed.
        """
        (m, k), n = a.shape, codes.shape[0]
        reason = refusal(a, codes, scale)
        tiling = tiling or choose_tiling(m, n, k, gated, multiprocessors(a.device))
        columns = n // 2 if gated else n
        if tiling is None or bool(tiling.gated) != gated:
            reason = reason or "there is no tiling"
        else:
            reason = reason or tiling.refusal(m, columns, k // 2, bias is not None, COMPILED)
        if reason or tiling is None:
            raise ValueError(f"scaled8_hopper.cu: {reason}")
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
            raise RuntimeError(f"scaled8_hopper.cu: the launch of {tiling} for {m} x {k} by {n} x {k} returned {code}")
        return out
