r"""``scaled8_chain.cu``: the four products between the attention of a layer and that of the next, for one row and
weights of 8 bits, in one launch on Hopper. ``chain.py`` has the arithmetic.

Weights: codes int8 ``[N, K]`` (of fp8 the bits), gate over up, scale float32 ``[N]`` or, of fp8, one for each block,
``[N / 128, K / 128]``; all sizes multiples of 128. Sums in float32; x is taken as float16 times a power of two, which
loses digits below 2^-39 of the largest of its part.

Bound by bytes: one for each weight.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import chain
from ..chain import ChainWeights
from .scaled8_rows import FP8, FP8_BLOCKS, WHOLE
from .scaled8_tiles import dense, scales_refusal

STAGES = 2
"""Items of 4 KiB that each of 16 warps has asked for at a time; more do not fit."""


class Matrix8(NamedTuple):
    """A weight of 8 bits: codes int8 ``[N, K]``, and a scale float32 for each row or each block."""

    codes: Tensor
    scale: Tensor
    fp8: bool = True

    @property
    def format(self) -> int:
        """The launcher's name of its kind of numbers and scales."""
        return FP8_BLOCKS if self.scale.ndim == 2 else FP8 if self.fp8 else WHOLE


def reference(attended: Tensor, residual: Tensor, weights: ChainWeights) -> tuple[Tensor, Tensor]:
    """Compute (y, u) in the dtype of the inputs, by torch in their dtype or float32, whichever is wider."""

    def halves(both: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = both.chunk(2, 1)
        return gate, up

    def values(matrix: Matrix8, dtype: torch.dtype) -> Tensor:
        return dense(matrix.codes, matrix.scale, matrix.fp8, dtype)

    return chain.reference(attended, residual, weights, values, halves)


def refusal(weights: ChainWeights) -> str | None:
    """Return the reason why the kernel does not take these weights; None if it does."""
    matrices: tuple[Matrix8, ...] = weights.matrices
    shapes = [(m.codes.shape[0], m.codes.shape[1]) for m in matrices]
    reason = chain.sizes_refusal(shapes)
    if reason is not None:
        return reason
    for (n, k), matrix in zip(shapes, matrices, strict=True):
        if n % 128:
            return f"sizes must be multiples of 128, not {n} x {k}"
        if why := scales_refusal(matrix.codes, matrix.scale):
            return why
        if matrix.format != matrices[0].format:
            return "the matrices must be of one kind of numbers and scales"
        if not matrix.codes.is_contiguous() or matrix.codes.data_ptr() % 16:
            return "the codes must be contiguous, at an address that is a multiple of 16 bytes"
    return chain.vectors_refusal(weights)


class CudaChain(chain.Chain):
    """``chain.Chain`` by ``scaled8_chain.cu``."""

    source, signature, stages, refusal = "scaled8_chain", "ppi", STAGES, staticmethod(refusal)

    def describe(self, weights: ChainWeights, stages: int) -> tuple[list[Any], list[tuple[int, int]], int]:
        codes, scales = (chain.addresses(each) for each in zip(*(m[:2] for m in weights.matrices), strict=True))
        shapes = [(m.codes.shape[0], m.codes.shape[1]) for m in weights.matrices]
        return [codes, scales, weights.o.format], shapes, stages
