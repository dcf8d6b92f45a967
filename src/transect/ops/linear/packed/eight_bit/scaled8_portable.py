"""``scaled8_portable.cu``: the product of 9 to 64 rows with a weight in fp8 on GPUs since Ampere other than Hopper.

A tile decodes its codes once in registers, and x stays bfloat16 (W8A16), because products of so few rows are bound by
the bytes of W. Tensor cores multiply fp8 where there are more rows (``scaled8_tiles.py``). A Hopper GPU that acts as an
older one has no such instruction for single warps: the compiler converts both operands of every product to float16.
Shapes as in ``scaled8_tiles.py``; scales of rows. Sums in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .....hardware.device import target_of
from ....lang.cuda import bind_since_ampere
from ....lang.jit import multiprocessors
from ...few_rows.triton import Counters
from ..portable_tiles import COLUMNS, TilesTiling, WeightSpan, choose_tiles, parts_of
from . import scaled8_rows

LEAST_ROWS, MOST_ROWS = 9, 64
SPAN = WeightSpan(64, COLUMNS * 64)


def refusal(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None) -> str | None:
    """Return the reason why the kernel does not take these arguments; None if it does."""
    if codes.shape[1] % SPAN.inputs or not codes.is_contiguous() or scale.ndim != 1:
        return f"the codes must be contiguous, K a multiple of {SPAN.inputs}, and the scales of rows"
    return scaled8_rows.refusal(x, codes, scale, bias)


class PortableRows8:
    """``(x, codes, scale, bias=None)`` of fp8 by ``scaled8_portable.cu``, with counters of its own: its launches must
    be on one stream.

    Raises:
        Unavailable: no NVIDIA GPU since Ampere, or no nvcc to build the kernels with.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._target = target_of(device)
        self._counters = Counters()
        if device is not None and device.type == "cuda":
            self._counters.get(device, 1)  # not in a capture
        signature = "pppppppiiil" + "iii" + "iip"
        self._launch = bind_since_ampere("scaled8_portable", "transect_scaled8_portable", signature, device)

    def __call__(
        self,
        x: Tensor,
        codes: Tensor,
        scale: Tensor,
        bias: Tensor | None = None,
        *,
        gated: bool = False,
        dependent_launch: bool = False,
        tiling: TilesTiling | None = None,
    ) -> Tensor:
        """Multiply x ``[M, K]`` -> ``[M, N]``; ``gated``: ``silu(first half) * second half``, ``[M, N / 2]``.

        ``dependent_launch``: begin while the previous kernel still runs, if the device has that.

        Raises:
            ValueError: see ``refusal``; with a gate N must be a multiple of 32, without bias.
            RuntimeError: the launch failed.
        """
        (m, k), n = x.shape, codes.shape[0]
        reason = refusal(x, codes, scale, bias)
        if gated and (n % 32 or bias is not None):
            reason = reason or "with a gate N must be a multiple of 32, and there is no bias"
        if reason:
            raise ValueError(f"scaled8_portable.cu: {reason}")
        out = x.new_empty((m, n // 2 if gated else n))
        if not out.numel():
            return out
        tiling = tiling or choose_tiles(m, n, k, SPAN, multiprocessors(x.device), self._target.block_bytes)
        held = parts_of(tiling, x, n, self._counters)
        code = self._launch(
            x.data_ptr(), codes.data_ptr(), scale.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
            *(t.data_ptr() for t in held), m, n, k, x.stride(0), tiling.tiles,
            tiling.blocks, tiling.stages, int(gated), int(dependent_launch and self._target.dependent_launch),
            torch.cuda.current_stream(x.device).cuda_stream,
        )  # fmt: skip
        if code:
            raise RuntimeError(
                f"scaled8_portable.cu: the launch of {tiling} for {m} x {k} by {n} x {k} returned {code}"
            )
        return out
