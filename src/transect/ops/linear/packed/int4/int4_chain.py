r"""``int4_chain.cu``: the four products between the attention of a layer and that of the next, for one row and weights
of 4-bit codes in groups, in one launch on Hopper. ``chain.py`` has the arithmetic.

Weights: ``arrange`` of ``int4_packing.py`` (in groups of 32, 64 or 128, all four alike), gate and up alternating every
16 rows, as all kernels for few rows take them. Scales and zeros leave the sum of a group, so no weight is rounded. x is
taken as whole numbers in units of at most 2^-14 of the largest of 128 k, and its products are exact.

Bound by bytes: (1/2 + 4 / G) for each weight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import chain
from ..chain import TURNS, ChainWeights
from .int4_matmul import dense
from .int4_packing import CHUNK, group_of, is_arranged

STAGES = 3
"""Items of two sixteens of rows by 128 k that each of 16 warps has asked for at a time."""


class Matrix4(NamedTuple):
    """A weight of 4-bit codes: what ``arrange`` gives, and its outputs."""

    arranged: Tensor
    outputs: int

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs and inputs."""
        return self.outputs, self.arranged.shape[0] * CHUNK


def reference(attended: Tensor, residual: Tensor, weights: ChainWeights) -> tuple[Tensor, Tensor]:
    """Compute (y, u) in the dtype of the inputs, by torch in their dtype or float32, whichever is wider."""

    def values(matrix: Matrix4, dtype: torch.dtype) -> Tensor:
        return dense(matrix.arranged, matrix.outputs, dtype)

    return chain.reference(attended, residual, weights, values, chain.in_turns)


def refusal(weights: ChainWeights) -> str | None:
    """Return the reason why the kernel does not take these weights; None if it does."""
    matrices: tuple[Matrix4, ...] = weights.matrices
    reason = chain.sizes_refusal([matrix.shape for matrix in matrices])
    if reason is None and weights.gate_up.outputs % (2 * TURNS):
        reason = f"outputs with a gate must be a multiple of {2 * TURNS}"
    if reason is not None:
        return reason
    for matrix in matrices:
        if not is_arranged(matrix.arranged, *matrix.shape) or not matrix.arranged.is_contiguous():
            return "a weight must be what arrange of int4_packing.py gives, and contiguous"
        if matrix.arranged.data_ptr() % 16:
            return "codes must begin at an address that is a multiple of 16 bytes"
    if len({group_of(matrix.arranged) for matrix in matrices}) > 1:
        return "all four matrices must have groups of one size"
    return chain.vectors_refusal(weights)


class Int4Chain(chain.Chain):
    """``chain.Chain`` by ``int4_chain.cu``."""

    source, signature, stages, refusal = "int4_chain", "pi", STAGES, staticmethod(refusal)

    def describe(self, weights: ChainWeights, stages: int) -> tuple[list[Any], list[tuple[int, int]], int]:
        tiles = chain.addresses([matrix.arranged for matrix in weights.matrices])
        return [tiles, group_of(weights.o.arranged)], [matrix.shape for matrix in weights.matrices], stages
