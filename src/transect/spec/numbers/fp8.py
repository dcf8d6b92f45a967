"""fp8: 8-bit floats (e4m3), with a scale for the tensor, for each row or for each block of 128 by 128."""

from __future__ import annotations

from .compressed_tensors import COMPRESSED_TENSORS, compressed
from .number_format import CacheUse, FileUse, Method, NumberFormat, Rounding

FP8_METHOD = Method("fp8")
"""Checkpoints with a scale for each tensor, or for blocks (DeepSeek)."""

FP8 = NumberFormat(
    name="fp8",
    summary="8-bit float (e4m3), a scale for each row",
    accuracy="error up to 1/16; on Hopper activations of more than 16 rows are rounded too",
    other_names=("fp8_e4m3",),
    bits=8.0,
    largest=448.0,
    methods=(FP8_METHOD.name, COMPRESSED_TENSORS.name),
    rounding=Rounding(words="fp8", native_bits=9.0),
    cache=CacheUse(
        words="keys and values at half the bytes of bfloat16",
        dtype="float8_e4m3fn",
        scaled=True,
        native=True,
    ),
    file=FileUse(
        words="compressed-tensors, a scale for each row",
        read_by="transformers, vLLM",
        settings=lambda _: compressed("float-quantized", "float", 8),
        kv_scales=True,
    ),
)
