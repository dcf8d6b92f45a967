"""NF4: 4-bit NormalFloat with double quantization (Dettmers et al. 2023, arXiv:2305.14314), as bitsandbytes stores it.

A matrix is read row by row in blocks of 64 numbers:

    number = CODES[code] * scale          scale = MAP[code of the scale] * nested scale + offset

Two codes share a byte, the first in its upper half. The scale of a block, its largest magnitude, is itself 8 bits: one
of 256 numbers of a map with many small ones (Dettmers 2015, arXiv:1511.04561), in nested blocks of 256 scales, after
their mean, the offset, was taken off. That is 4 + 8 / 64 + 32 / (64 * 256) = 4.127 bits a number.
"""

from __future__ import annotations

import numpy as np

BLOCK = 64
"""Numbers that share a scale."""
NESTED_BLOCK = 256
"""Scales that share a nested scale."""
BITS = 4 + 8 / BLOCK + 32 / (BLOCK * NESTED_BLOCK)

CODES = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
"""What the codes 0 to 15 stand for: quantiles of a normal distribution, scaled to [-1, 1] (appendix E of the paper)."""


def dynamic_map() -> np.ndarray:
    """The 256 numbers that a scale's code may stand for, float32, ascending.

    With each exponent from 1e-6 to 1 the number of steps doubles: 1, 2, 4, ... 64 midpoints of equal parts of [0.1, 1],
    of both signs; and 0 and 1.
    """
    found = [0.0, 1.0]
    low, high = np.float32(0.1), np.float32(1)
    for exponent in range(7):
        parts = 2**exponent
        step = (high - low) / np.float32(parts)
        at = np.arange(parts + 1)
        # Each half from its own end, rounded to float32 once: values are to be those of bitsandbytes, to the bit.
        edges = np.where(
            at < (parts + 1) // 2,
            np.float64(low) + np.float64(step) * at,
            np.float64(high) - np.float64(step) * (parts - at),
        ).astype(np.float32)
        middles = (edges[:-1] + edges[1:]) / np.float32(2)
        steps = np.float32(10.0 ** (exponent - 6)) * middles
        found += [*steps.tolist(), *(-steps).tolist()]
    return np.array(sorted(found), np.float32)
