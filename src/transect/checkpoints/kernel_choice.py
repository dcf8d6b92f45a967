"""Choice of what computes a model: the C++ CPU kernels, or torch with the reason why; and the dtypes that follow."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..models.native import refusal
from ..ops.cpu import library as cpu_library
from ..ops.registry import Unavailable
from ..spec.model import ModelConfig
from ..spec.numbers import dense
from ..spec.numbers.registry import cache_format, cache_formats, listed, rounding

if TYPE_CHECKING:
    from .resolve import ModelSource

DTYPES: dict[str, torch.dtype] = {each.name: getattr(torch, each.name) for each in dense.DTYPES}
DTYPES |= {"float64": torch.float64}


def in_blocks(source: ModelSource) -> bool:
    """Return True if the weights are those of a GGUF file, without an adapter."""
    return source.kind == "gguf" and source.adapter is None


def lacks_layers(config: ModelConfig, block_size: int, quantization: str | None) -> bool:
    """Return True if the C++ kernels support the products of a model but not its layers."""
    return quantization is None and refusal(config, block_size) is not None


def kv_dtype(dtype: str) -> torch.dtype:
    """Return the data type of the KV cache for a model of this dtype: bfloat16 for ``auto``, else the same.

    Raises:
        ValueError: unknown dtype.
    """
    if dtype == "auto":
        return torch.bfloat16
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not known; choose auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def cache_dtype(dtype: str, kv_cache_dtype: str = "auto") -> torch.dtype:
    """Return the data type of the KV cache by ``EngineConfig``'s names: ``auto`` is ``kv_dtype``."""
    form = cache_format(kv_cache_dtype)
    if form is None or form.cache is None:
        return kv_dtype(dtype)
    found: torch.dtype = getattr(torch, form.cache.dtype)
    return found


def kernels(
    config: ModelConfig,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    native: bool | None = None,
    threads: int | None = None,
    block_size: int = 16,
    quantization: str | None = None,
    kv_cache_dtype: str = "auto",
    shared: bool = False,
    blocks: bool = False,
) -> tuple[cpu_library.Library | None, str]:
    """Return the C++ kernels if they are to run the model, and a sentence for the start-up line with the choice and the
    reason.

    Args:
        shared: it is one rank's part.
        blocks: its weights are those of a GGUF file: where the kernels do not have its layers, their products stay.

    Raises:
        ValueError: ``native`` insists on them and they cannot run; unknown dtype.
    """
    computed_in = kv_dtype(dtype)
    library = lacks = None
    if native is False:
        reason: str | None = "native=False"
    elif torch.device(device).type != "cpu":
        reason = f"the C++ kernels are for the CPU, not {device}"
    elif dtype not in ("auto", "float32", "bfloat16"):
        reason = f"the C++ kernels compute in float32 or bfloat16, not {dtype}"
    elif cache_dtype(dtype, kv_cache_dtype) not in cpu_library.KV_DTYPES:
        known = listed(name for name, form in cache_formats().items() if form.cache and form.cache.native)
        reason = f"the C++ kernels have no KV cache in {kv_cache_dtype}, only in {known}"
    elif cache_format(kv_cache_dtype) is not None and shared:
        reason = f"the C++ kernels have no KV cache in {kv_cache_dtype} where ranks share a model"
    elif config.moe is not None and shared:
        reason = "the C++ kernels do not have experts that ranks share"
    elif config.moe is not None and config.moe.clamp is not None and not blocks:  # gpt-oss, in MXFP4
        reason = "the C++ kernels read MXFP4 from GGUF files alone"
    elif blocks and lacks_layers(config, block_size, quantization):
        reason, lacks = None, refusal(config, block_size)
    else:
        reason = refusal(config, block_size, quantization)
    if reason is None:
        try:
            library = cpu_library.load(threads or torch.get_num_threads(), bfloat16=dtype == "bfloat16")
        except Unavailable as error:
            reason = str(error)
    form = rounding(quantization)
    bits = None if form is None or form.rounding is None else form.rounding.words
    if library is not None:
        kept = "weights as in the file" if bits is None else f"the layers' weights in {bits}"
        if dtype == "bfloat16":
            lacking = "inputs in float32: this processor has no AVX512-BF16"
            kept = f"{kept}, {'inputs of products in bfloat16' if library.bfloat16 else lacking}"
        if lacks is not None:
            kept = f"{kept}, layers operator by operator ({lacks})"
            return library, f"C++ products ({library.isa}, {library.threads} threads), {kept}"
        return library, f"C++ kernels ({library.isa}, {library.threads} threads), {kept}"
    if native:
        raise ValueError(f"native=True, but {reason}; leave native out to run on plain torch")
    rounded_to = "" if bits is None else f", the layers' weights rounded to {bits}"
    return None, f"plain torch in {str(computed_in).removeprefix('torch.')}{rounded_to} ({reason})"
