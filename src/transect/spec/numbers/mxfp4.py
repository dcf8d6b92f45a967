"""MXFP4 checkpoints (OCP Microscaling Formats 1.0), as gpt-oss has its experts: e2m1 codes in blocks of 32."""

from __future__ import annotations

from .gguf import UNITS
from .number_format import Method, NumberFormat

MXFP4_METHOD = Method("mxfp4")

MXFP4 = NumberFormat(
    name="mxfp4",
    summary="4-bit float (e2m1), a power of two for each 32 numbers of a row",
    bits=UNITS["MXFP4"].bits,
    accuracy="models are trained in it; stored as in GGUF files",
    methods=(MXFP4_METHOD.name,),
)
