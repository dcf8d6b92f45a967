"""NF4: 4-bit NormalFloat with double quantization (Dettmers et al. 2023, arXiv:2305.14314), as bitsandbytes stores it.

A matrix is read row by row in blocks of 64 numbers:

    number = CODES[code] * scale          scale = map[code of the scale] * nested scale + offset

Two codes share a byte, the first in its upper half. The scale of a block, its largest magnitude, is itself 8 bits: one
of 256 numbers of a map with many small ones (Dettmers 2015, arXiv:1511.04561), in nested blocks of 256 scales, after
their mean, the offset, was taken off. That is 4 + 8 / 64 + 32 / (64 * 256) = 4.127 bits a number.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..fields import Fields
from .number_format import FrozenBase, Method, NumberFormat, WeightFormat

BLOCK = 64
"""Numbers that share a scale."""
NESTED_BLOCK = 256
"""Scales that share a nested scale."""
BITS = 4 + 8 / BLOCK + 32 / (BLOCK * NESTED_BLOCK)

CODES = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
"""Values of the codes 0 to 15: quantiles of a normal distribution, scaled to [-1, 1] (appendix E of the paper)."""


def _check(read: Fields, settings: Mapping[str, Any]) -> None:
    if read.flag("load_in_8bit", False):
        raise ValueError("bitsandbytes with 8 bits is not supported; only 4 (nf4, fp4) is. Take the unquantized model")


BITSANDBYTES = Method("bitsandbytes", _check)
"""Method of bitsandbytes, whose files contain the values of the codes, so fp4 is read like nf4."""


def nf4_format() -> WeightFormat:
    """Build the format of 4-bit NormalFloat with double quantization."""
    return WeightFormat("nf4, double quantization", BITS)


NF4 = NumberFormat(
    name="nf4",
    summary="4-bit NormalFloat, a scale of 8 bits for 64 numbers",
    bits=BITS,
    accuracy="dequantized when the files are read; also fp4 of bitsandbytes",
    methods=(BITSANDBYTES.name,),
    base=FrozenBase(words="in NF4", weight=lambda group, scale_bits: nf4_format(), grouped=False),
)
