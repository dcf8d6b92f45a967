"""int8: whole numbers from -127 to 127, with a scale for each row; in a KV cache for each head of a token."""

from __future__ import annotations

from .compressed_tensors import COMPRESSED_TENSORS, compressed
from .number_format import CacheUse, FileUse, NumberFormat, Rounding

INT8 = NumberFormat(
    name="int8",
    summary="8-bit integer, a scale for each row",
    accuracy="error up to 1/254 of the row's largest number; on Hopper activations of more than 16 rows are rounded "
    "too",
    bits=8.0,
    largest=127.0,
    methods=(COMPRESSED_TENSORS.name,),
    rounding=Rounding(words="int8", native_bits=10.0),
    cache=CacheUse(words="with a scale for each head of a token, too", dtype="int8", head_bits=32),
    file=FileUse(
        words="compressed-tensors, a scale for each row",
        read_by="transformers, vLLM",
        settings=lambda _: compressed("int-quantized", "int", 8),
        kv_scales=True,
    ),
)
