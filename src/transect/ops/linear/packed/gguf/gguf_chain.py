r"""``gguf_chain.cu``: the four products between the attention of a layer and that of the next, for one row and weights
in block types of GGUF files, in one launch on Hopper. ``chain.py`` has the arithmetic, ``gguf_row.py`` the weights.
Those of q, k and v may be of a type each.

Each of 16 warps has a sixteenth of the columns, in units of 256, so it turns only its own part of x into whole numbers
and waits only for that. Bound by bytes: 0.33 to 1.06 for each weight.
"""

from __future__ import annotations

import ctypes
from typing import Any

from torch import Tensor

from .....spec.numbers.gguf import UNITS
from ...few_rows.cuda import SHARED
from .. import chain
from ..chain import ChainWeights
from .gguf_layout import COLUMNS
from .gguf_row import MOST_PARTS, SPAN, Matrix, described, refusal, size_of, values

WARPS = 16
MOST_INPUTS = 8 * WARPS * COLUMNS
STAGES = 5
"""Units that each warp has asked for at a time, at most."""


def fitting(matrices: tuple[Matrix, ...], wanted: int = STAGES) -> int:
    """Return the number of stages that fit, ``wanted`` at most."""
    slot = max(UNITS[part.name].unit for matrix in matrices for part in matrix)
    steps = -(-max(size_of(matrix)[1] for matrix in matrices) // (WARPS * COLUMNS))
    left = SHARED - 1024 - 4096 - WARPS * (steps * SPAN + 12 * 8 + 64)
    return min(wanted, left // (WARPS * slot))


def reference(attended: Tensor, residual: Tensor, weights: ChainWeights) -> tuple[Tensor, Tensor]:
    """Compute (y, u) in the dtype of the inputs, by torch in their dtype or float32, whichever is wider. Each of
    ``weights`` is a ``Matrix``."""
    return chain.reference(attended, residual, weights, values, chain.in_turns)


def sizes_refusal(matrices: tuple[Matrix, ...]) -> str | None:
    """Return the reason why four matrices in the order of ``ChainWeights`` are not a chain for the kernel; None if they
    are."""
    o, gate_up, down, qkv = (size_of(matrix) for matrix in matrices)
    if o[0] != gate_up[1] or gate_up[0] != 2 * down[1] or down[0] != o[0] or qkv[1] != o[0]:
        return "the sizes of the products do not follow each other"
    if len(matrices[1]) > 1:
        return "gate and up must be one part, with sixteens of rows in turns"
    if max(size_of(matrix)[1] for matrix in matrices) > MOST_INPUTS:
        return f"it takes at most {MOST_INPUTS} columns"
    return None if fitting(matrices) >= 2 else "units and x do not fit into shared memory"


def chain_refusal(weights: ChainWeights) -> str | None:
    """Return the reason why the kernel does not do these products in one launch; None if it does."""
    reason = next((said for matrix in weights.matrices if (said := refusal(matrix))), None)
    return reason or chain.vectors_refusal(weights) or sizes_refusal(weights.matrices)


class GGUFChain(chain.Chain):
    """``chain.Chain`` by ``gguf_chain.cu``."""

    source, signature, stages, refusal = "gguf_chain", "pp", STAGES, staticmethod(chain_refusal)

    def describe(self, weights: ChainWeights, stages: int) -> tuple[list[Any], list[tuple[int, int]], int]:
        parts = [described(matrix) for matrix in weights.matrices]
        units = chain.addresses([unit for own, _ in parts for unit in own])
        numbers = (ctypes.c_int * (8 * MOST_PARTS))(*(number for _, own in parts for number in own))
        return [units, numbers], [size_of(matrix) for matrix in weights.matrices], fitting(weights.matrices, stages)
