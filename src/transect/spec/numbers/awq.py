"""AWQ checkpoints (Lin et al. 2023, arXiv:2306.00978): 4-bit codes in groups with zeros, eight outputs in a word."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..fields import Fields
from .gptq import check_four_bits
from .int4 import int4_format
from .number_format import FileUse, Method, NumberFormat


def _check(read: Fields, settings: Mapping[str, Any]) -> None:
    check_four_bits(read, _NAME)
    version = read.text("version", _VERSION)
    if version.lower() != _VERSION:
        raise ValueError(f"AWQ of version {version!r} (config.json) is not supported; only {_VERSION} is")


_NAME = "awq"
_VERSION = "gemm"
"""Order of codes that is read and written."""
AWQ_METHOD = Method(_NAME, _check)


def _settings(group: int | None) -> dict[str, Any]:
    return {
        "quant_method": _NAME,
        "bits": 4,
        "group_size": group,
        "zero_point": True,
        "version": _VERSION,
        "modules_to_not_convert": ["lm_head"],
    }


AWQ = NumberFormat(
    name=_NAME,
    summary="4-bit code, a scale and a zero for each group of a row, in the layout of AWQ",
    bits=int4_format().bits,
    accuracy="as int4, with zeros",
    methods=(AWQ_METHOD.name,),
    file=FileUse(
        words="safetensors in the layout of AWQ, with zeros", read_by="transformers, vLLM", settings=_settings,
        scale_dtype="float16", symmetric=False,
    ),
)  # fmt: skip
