"""int4: 4-bit codes in groups of a row, each group with a scale and a zero: ``number = scale * code + zero``."""

from __future__ import annotations

from .compressed_tensors import COMPRESSED_TENSORS, compressed
from .number_format import FileUse, FrozenBase, NumberFormat, Rounding, WeightFormat

SCALE_BITS = 16
"""Bits of a group's scale, and of its zero, in a model served in 4 bits."""
SERVING_GROUP = 128
"""Numbers of a row that share a scale and a zero, in a model served in 4 bits."""
NATIVE_GROUP = 32
"""Numbers of a row that share a scale and a zero in the C++ kernels."""
GROUPS = (32, 64, 128)
"""Numbers of a row that may share a scale and a zero, in checkpoints and in kernels of a GPU."""


def int4_format(group: int = SERVING_GROUP, scale_bits: float = SCALE_BITS) -> WeightFormat:
    """Build the format of 4-bit codes, with a scale and a zero of ``scale_bits`` for each ``group`` of them."""
    return WeightFormat(f"int4, groups of {group}", 4 + 2 * scale_bits / group)


INT4 = NumberFormat(
    name="int4",
    summary="4-bit code, a scale and a zero for each group of 128 numbers of a row",
    bits=int4_format().bits,
    accuracy="slightly worse predictions; calibrate for better ones",
    methods=(COMPRESSED_TENSORS.name, "gptq", "awq"),
    rounding=Rounding(words="4 bits", native_bits=int4_format(NATIVE_GROUP).bits, kept_on_cpu=False),
    base=FrozenBase(words="in 4 bits with scale and zero for each {group}", weight=int4_format, grouped=True),
    file=FileUse(
        words="compressed-tensors, a scale for each group of 128, 64 or 32 numbers",
        read_by="transformers, vLLM",
        settings=lambda group: compressed("pack-quantized", "int", 4, group),
        scale_dtype="bfloat16",
        kv_scales=True,
    ),
)
