"""Numbers of a float type, nothing packed."""

from __future__ import annotations

from .number_format import NumberFormat, WeightFormat

FLOAT32 = NumberFormat(
    name="float32",
    summary="24 significant bits",
    bits=32,
    accuracy="exactly the values of the files",
    other_names=("float",),
)
BFLOAT16 = NumberFormat(
    name="bfloat16",
    summary="8 significant bits and the range of float32",
    bits=16,
    accuracy="the format of most checkpoints",
)
FLOAT16 = NumberFormat(
    name="float16",
    summary="11 significant bits, at most 65504",
    bits=16,
    accuracy="refuses numbers that are too large",
    other_names=("half",),
)
DTYPES = (FLOAT32, BFLOAT16, FLOAT16)
"""Formats of ``--dtype``; ``auto`` is the other choice."""


def dense_format(bits: int) -> WeightFormat:
    """Build the format of numbers of this many bits, not packed."""
    return WeightFormat(f"dense {bits}-bit", bits)
