r"""``gguf_four.cu``: the four products between the attention of a layer and that of the next, for one row and weights
in block types of GGUF files, in one launch on Hopper. ``chain.py`` has the arithmetic, ``gguf_chain.py`` the weights.

Each of 16 warps has a sixteenth of the columns, in units of 256, so it turns only its own part of x into whole numbers
and waits only for that. Bound by bytes: 0.33 to 1.06 for each weight.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .....spec.numbers.gguf import UNITS
from ...few_rows.cuda import SHARED
from .. import chain
from ..chain import ChainWeights
from .gguf_chain import MOST_PARTS, SPAN, Matrix, chain_refusal, size_of
from .gguf_layout import COLUMNS, ROWS

WARPS = 16
MOST_INPUTS = 8 * WARPS * COLUMNS
STAGES = 5
"""Units that each warp has asked for at a time, at most."""


def fitting(matrices: tuple[Matrix, ...], wanted: int = STAGES) -> int:
    """Return the number of stages that fit, ``wanted`` at most."""
    slot = max(UNITS[part.name].unit for matrix in matrices for part in matrix)
    steps = -(-max(size_of(matrix)[1] for matrix in matrices) // (WARPS * COLUMNS))
    left = SHARED - 1024 - 4096 - WARPS * ((steps + steps % 2) * SPAN + 12 * 8 + 64)
    return min(wanted, left // (WARPS * slot))


def refusal(weights: ChainWeights) -> str | None:
    """Return the reason why the kernel does not take these weights; None if it does."""
    return chain_refusal(weights) or room_refusal(weights.matrices)


def room_refusal(matrices: tuple[Matrix, ...]) -> str | None:
    """Return the reason why matrices do not fit into shared memory; None if they do."""
    if max(size_of(matrix)[1] for matrix in matrices) > MOST_INPUTS:
        return f"it takes at most {MOST_INPUTS} columns"
    return None if fitting(matrices) >= 2 else "units and x do not fit into shared memory"


class GGUFFour(chain.Chain):
    """``(attended, residual, weights) -> (y, u)`` by ``gguf_four.cu``; arguments and errors of ``chain.Chain``."""

    def __init__(self, device: torch.device | None = None) -> None:
        super().__init__("gguf_four", "pp", device)

    def __call__(
        self,
        attended: Tensor,
        residual: Tensor,
        weights: ChainWeights,
        *,
        dependent_launch: bool = False,
        stages: int = STAGES,
    ) -> tuple[Tensor, Tensor]:
        """Compute y ``[1, N]`` and u ``[1, D]``.

        ``dependent_launch``: the weights may be read before the kernel before this one on the stream has ended.

        Raises:
            ValueError: see ``refusal`` and ``Chain.run``.
            RuntimeError: the launch failed.
        """
        reason = refusal(weights)
        if reason:
            raise ValueError(f"gguf_four.cu: {reason}")
        units: list[Tensor | None] = []
        rows: list[int] = []
        for matrix in weights.matrices:
            units += [part.arranged for part in matrix] + [None] * (MOST_PARTS - len(matrix))
            rows += [number for part in matrix for number in (UNITS[part.name].index, part.outputs // ROWS)]
            rows += [0] * (2 * (MOST_PARTS - len(matrix)))
        pointers, numbers = chain.addresses(units), (ctypes.c_int * len(rows))(*rows)
        return self.run(
            [ctypes.addressof(pointers), ctypes.addressof(numbers)], attended, residual, weights,
            [size_of(matrix) for matrix in weights.matrices], fitting(weights.matrices, stages), dependent_launch,
        )  # fmt: skip
