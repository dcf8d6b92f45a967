"""``gguf_tiles.cu``: the product of up to ``block_tiles.MOST_ROWS`` rows with a weight in a block type of GGUF files,
on Hopper (``block_tiles.py``)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .....spec.numbers.gguf import UNITS
from .. import block_tiles
from ..block_tiles import BlockTiling, Tiles
from . import gguf_rows


def refusal(
    x: Tensor, arranged: Tensor, name: str, outputs: int, bias: Tensor | None = None, gated: bool = False
) -> str | None:
    """Return the reason why the kernels do not take these arguments; None if they do."""
    if (reason := block_tiles.refusal(outputs, bias, gated)) is not None:
        return reason
    return gguf_rows.refusal(x, arranged, name, outputs, bias)


class GGUFTiles(Tiles):
    """``(x, arranged, name, outputs, bias=None)`` by ``gguf_tiles.cu``; created like ``Tiles``, with the same
    errors."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__("gguf_tiles", device)

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
        tiling: BlockTiling | None = None,
    ) -> Tensor:
        """Multiply x ``[M, K]`` -> ``[M, N]``; ``gated``: groups of 16 rows of the weight are gate and up alternately,
        and the result is ``silu(gate) * up [M, N / 2]``.

        Raises:
            ValueError: see ``refusal``.
            RuntimeError: the launch failed.
        """
        reason = refusal(x, arranged, name, outputs, bias, gated)
        if reason:
            raise ValueError(f"gguf_tiles.cu: {reason}")
        how: Any = {"gated": gated, "dependent_launch": dependent_launch, "tiling": tiling}
        return self.run(x, arranged, UNITS[name].index, UNITS[name].unit, outputs, bias, **how)
