"""``quantization_config`` of a Hugging Face ``config.json``: which methods can be read (no torch)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .fields import Fields

_COMPRESSED = (
    "dense", "naive-quantized", "float-quantized", "int-quantized", "pack-quantized", "mixed-precision",
)  # fmt: skip
"""Layouts of compressed-tensors that can be read."""
METHODS = ("fp8", "compressed-tensors", "gptq", "awq", "mxfp4", "bitsandbytes")


def check_method(settings: Any) -> None:
    """Whether a ``quantization_config`` can be read.

    Raises:
        ValueError: it cannot; the message says what can.
    """
    method = settings.get("quant_method") if isinstance(settings, Mapping) else None
    read = Fields(settings if isinstance(settings, Mapping) else {}, "quantization_config of config.json")
    if method not in METHODS:
        raise ValueError(
            f"config.json has a quantization_config of method {method!r}, which is not supported; supported are: "
            f"{', '.join(METHODS)}. Take another, the unquantized model or a GGUF file"
        )
    if method == "compressed-tensors":
        _check_compressed(settings)
    if method in ("gptq", "awq") and read.integer("bits", 4) != 4:
        raise ValueError(f"{method} with {read.integer('bits')} bits (config.json) is not supported; only 4 is")
    if method == "bitsandbytes" and read.flag("load_in_8bit", False):
        raise ValueError("bitsandbytes with 8 bits is not supported; only 4 (nf4, fp4) is. Take the unquantized model")
    if method == "awq" and read.text("version", "gemm").lower() != "gemm":
        raise ValueError(f"AWQ of version {read.text('version')!r} (config.json) is not supported; only gemm is")


def _check_compressed(settings: Mapping[str, Any]) -> None:
    groups = settings.get("config_groups")
    each = list(groups.values()) if isinstance(groups, Mapping) else []
    for found in (settings, *(group for group in each if isinstance(group, Mapping))):
        layout = found.get("format")
        if layout is not None and layout not in _COMPRESSED:
            raise ValueError(
                f"config.json has compressed-tensors of format {layout!r}, which is not supported; supported are: "
                f"{', '.join(_COMPRESSED)}. Take another, the unquantized model or a GGUF file"
            )
