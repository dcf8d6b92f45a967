"""All number formats: one file of this folder an entry, found by its records.

A file holds ``NumberFormat``s, and ``Method``s of checkpoints, as names of its module. Nothing else lists them: the
options that take a format, their help, the errors and the table of the docs ask here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import cache
from typing import Any

from ..fields import Fields
from ..records import records_in
from .dense import DTYPES
from .gguf import BLOCK_TYPES, MATRIX_TYPES
from .number_format import CacheUse, FileUse, Method, NumberFormat


@cache
def formats() -> Mapping[str, NumberFormat]:
    """Return all formats by name."""
    return records_in(__package__, NumberFormat, "number formats")


@cache
def methods() -> Mapping[str, Method]:
    """Return the quantization methods of checkpoints that can be read, by name."""
    return records_in(__package__, Method, "checkpoint methods")


@cache
def roundings() -> Mapping[str, NumberFormat]:
    """Return the formats for ``--quantization``, fewest bits first."""
    found = [(each.bits, name, each) for name, each in formats().items() if each.rounding is not None]
    return {name: each for _, name, each in sorted(found, key=lambda entry: entry[:2])}


@cache
def cache_formats() -> Mapping[str, NumberFormat]:
    """Return the formats for ``--kv-cache-dtype``."""
    return {name: each for name, each in sorted(formats().items()) if each.cache is not None}


def cache_uses() -> Mapping[str, CacheUse]:
    """Return the uses of ``cache_formats``."""
    return {name: each.cache for name, each in cache_formats().items() if each.cache is not None}


@cache
def base_formats() -> Mapping[str, NumberFormat]:
    """Return the formats for ``lora.base_format``."""
    return {name: each for name, each in sorted(formats().items()) if each.base is not None}


def file_uses() -> Mapping[str, FileUse]:
    """Return the uses of ``file_formats``."""
    return {name: each.file for name, each in file_formats().items() if each.file is not None}


@cache
def file_formats() -> Mapping[str, NumberFormat]:
    """Return the formats of ``transect quantize --format`` in safetensors: first those of ``roundings``, most bits
    first."""
    found = [each for each in formats().values() if each.file is not None]
    return {each.name: each for each in sorted(found, key=_order)}


def _order(form: NumberFormat) -> tuple[float, str]:
    return (math.inf if form.rounding is None else -form.bits, form.name)


def gguf_names() -> tuple[str, ...]:
    """List the GGUF types of ``transect quantize --format`` as users type them, most bits first; without plain
    floats."""
    packed = [name for name in MATRIX_TYPES if name not in BLOCK_TYPES or BLOCK_TYPES[name].packed]
    return tuple(name.lower() for name in sorted(packed, reverse=True))


def dtype_name(name: str) -> str:
    """Return the dtype that ``--dtype`` names, including by another of its names; ``auto`` is unchanged.

    Raises:
        ValueError: there is none; the message lists those that there are.
    """
    for each in DTYPES:
        if name in (each.name, *each.other_names):
            return each.name
    if name != AUTO:
        raise ValueError(f"dtype must be {listed((AUTO, *(each.name for each in DTYPES)))}, not {name!r}")
    return name


def rounding(name: str | None) -> NumberFormat | None:
    """Return the format that ``--quantization`` names; None without one.

    Raises:
        ValueError: there is no such format, or models are not rounded to it; the message lists those that there are.
    """
    if name is None:
        return None
    if name not in roundings():
        raise ValueError(f"quantization must be {listed(roundings())}, or left out, not {name!r}")
    return roundings()[name]


def cache_format(name: str) -> NumberFormat | None:
    """Return the format that ``--kv-cache-dtype`` names, including by another of its names; None for ``auto``.

    Raises:
        ValueError: there is no such format, or keys and values are not cached in it; the message lists those that
            there are.
    """
    if name == AUTO:
        return None
    for each in cache_formats().values():
        if name in (each.name, *each.other_names):
            return each
    raise ValueError(f"kv_cache_dtype must be {listed((AUTO, *cache_formats()))}, not {name!r}")


def takes_scales(kv_cache_dtype: str) -> bool:
    """Return True if a cache in that format stores keys and values divided by a checkpoint's scales."""
    form = cache_format(kv_cache_dtype)
    return form is not None and form.cache is not None and form.cache.scaled


def cache_bits(kv_cache_dtype: str, plain: float, head_dim: int) -> float:
    """Return the bits of a number in a KV cache, including scales; ``plain`` bits without a format."""
    form = cache_format(kv_cache_dtype)
    return plain if form is None or form.cache is None else form.bits + form.cache.head_bits / head_dim


def check_method(settings: Any) -> None:
    """Check that a ``quantization_config`` of config.json can be read.

    Raises:
        ValueError: it cannot; the message says what can.
    """
    told = settings if isinstance(settings, Mapping) else {}
    method = told.get("quant_method")
    if not isinstance(method, str) or method not in methods():
        raise ValueError(
            f"config.json has a quantization_config of method {method!r}, which is not supported; supported are: "
            f"{', '.join(methods())}. Take another, the unquantized model or a GGUF file"
        )
    methods()[method].check(Fields(told, "quantization_config of config.json"), told)


def listed(names: Iterable[str], last: str = "or") -> str:
    """Join names for a sentence: ``a, b or c``."""
    *first, end = names
    return f"{', '.join(first)} {last} {end}" if first else end


AUTO = "auto"
"""Name for no format: the model's own choice."""
