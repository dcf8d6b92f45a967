"""Packed weights as integer codes with one scale and one zero for each group along a row.

``value[n, k] = scale[n, k // group] * code[n, k] + zero[n, k // group]``

Every packed type of ``ggml_blocks`` is of this form, so a kernel that can multiply by it can multiply by all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class AffineGroups:
    """A matrix of N rows and K columns in affine groups.

    Attributes:
        codes: uint8 [N, K], each below ``2 ** bits``.
        scale: float32 [N, K / group].
        zero: float32 [N, K / group], the value of code 0.
        group: columns that share a scale and a zero.
        bits: 4, 5, 6 or 8.
        half_exact: the file stores the scale as float16, and ``zero`` is either stored as float16 too (Q4_1, Q5_1) or
            is the scale times a constant (-8 for Q4_0, -16 for Q5_0, -128 for Q8_0): nothing is lost by keeping halves.

    The products ``scale * code`` are exact in float32 for all types of ``ggml_blocks`` (at most 24 significant bits),
    so a value has one rounding, whether or not multiply and add are fused.
    """

    codes: np.ndarray
    scale: np.ndarray
    zero: np.ndarray
    group: int
    bits: int
    half_exact: bool

    def __post_init__(self) -> None:
        n, k = self.codes.shape
        groups = (n, k // self.group)
        if k % self.group or self.scale.shape != groups or self.zero.shape != groups:
            raise ValueError(
                f"codes [{n}, {k}] in groups of {self.group} need scale and zero of shape [{n}, {k / self.group:g}], "
                f"got {list(self.scale.shape)} and {list(self.zero.shape)}"
            )

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns)."""
        return self.codes.shape[0], self.codes.shape[1]

    def values(self) -> np.ndarray:
        """Return the matrix in float32 [N, K]; equal to ``QuantizedTensor.dequantize`` (a zero may differ in its
        sign)."""
        n, k = self.shape
        out = self.codes.astype(np.float32).reshape(n, k // self.group, self.group)
        out *= self.scale[:, :, None]
        out += self.zero[:, :, None]
        return out.reshape(n, k)
