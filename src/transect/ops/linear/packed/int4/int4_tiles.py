"""``int4_tiles.cu``: ``int4_matmul`` for up to ``block_tiles.MOST_ROWS`` rows on Hopper (``block_tiles.py``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import block_tiles
from ..block_tiles import BlockTiling, Tiles
from . import int4_rows
from .int4_packing import CHUNK, GROUPS, group_of


def refusal(x: Tensor, weight: Tensor, n: int, bias: Tensor | None = None, gated: bool = False) -> str | None:
    """Return the reason why the kernels do not take these arguments; None if they do."""
    return block_tiles.refusal(n, bias, gated) or int4_rows.cuda_refusal(x, weight, n, bias)


def unit_of(group: int) -> int:
    """Return the bytes of 16 rows by 256 columns of a weight from ``int4_packing.arrange``."""
    return 8 * (256 + 16 * CHUNK // group)


class Int4Tiles(Tiles):
    """``int4_matmul`` by ``int4_tiles.cu``; created like ``Tiles``, with the same errors."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__("int4_tiles", device)

    def __call__(
        self,
        x: Tensor,
        weight: Tensor,
        n: int,
        bias: Tensor | None = None,
        *,
        gated: bool = False,
        dependent_launch: bool = False,
        tiling: BlockTiling | None = None,
    ) -> Tensor:
        """Compute ``int4_matmul.reference``; ``gated``: groups of 16 rows of the weight are gate and up alternately,
        and the result is ``silu(gate) * up [M, N / 2]``.

        Raises:
            ValueError: see ``refusal``.
            RuntimeError: the launch failed.
        """
        reason = refusal(x, weight, n, bias, gated)
        if reason:
            raise ValueError(f"int4_tiles.cu: {reason}")
        group = group_of(weight)
        how: Any = {"gated": gated, "dependent_launch": dependent_launch, "tiling": tiling}
        return self.run(x, weight, GROUPS[::-1].index(group), unit_of(group), n, bias, **how)
