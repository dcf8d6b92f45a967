"""A source to a ``Decoder`` that is ready to run on a device.

Two ways to compute: the C++ CPU kernels (``native.py``), which keep quantized weights quantized and compute in float32
from exactly what the file holds; and plain torch, for which quantized weights are dequantized when they are loaded.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator

import torch
from torch import Tensor

from ..formats.ggml_blocks import QuantizedTensor
from ..ops.cpu import library as cpu_library
from ..ops.opset import resolve_ops
from ..ops.registry import Unavailable
from .config import ModelConfig
from .decoder import Decoder
from .native import build_native, packed_path, unsuitable
from .resolve import ModelSource
from .weights_dummy import dummy_weights
from .weights_gguf import load_gguf
from .weights_hf import load_hf

log = logging.getLogger(__name__)

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "float64": torch.float64}


def load_weights(source: ModelSource, seed: int = 0) -> Iterator[tuple[str, Tensor | QuantizedTensor]]:
    """Every weight of the model by canonical name, as its files hold it; see ``load_gguf`` and ``load_hf``. A source
    that is only a shape gets random weights of ``seed``, in bfloat16.

    Raises:
        ValueError: files that are damaged or do not fit the configuration.
    """
    if source.kind == "gguf":
        return load_gguf(source.gguf, source.config)
    if source.kind == "shape":
        return dummy_weights(source.config, seed=seed)
    return iter(load_hf(source.path, source.config))


def load_model(
    source: ModelSource,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    native: bool | None = None,
    threads: int | None = None,
    block_size: int = 16,
    seed: int = 0,
    deterministic: bool = False,
) -> Decoder:
    """Build the model and fill it, for inference (``requires_grad`` is off; turn it on to train).

    Args:
        source: from ``resolve``.
        dtype: of weights and activations: ``auto``, ``float32``, ``bfloat16``, ``float16`` or ``float64``. ``auto`` is
            bfloat16 where weights must be dense, and the file's own formats on the C++ kernels. ``float32`` is exact:
            the dequantized values of the file.
        device: where to; the C++ kernels run on ``cpu`` only.
        native: use the C++ kernels: True insists, False forbids, None uses them if they can run. ``kernels`` decides,
            and what it decided is logged.
        threads: of the C++ kernels; by default torch's number.
        block_size: tokens of a KV block; the C++ kernels are set up for one size, and for a KV cache of
            ``kv_dtype(dtype)``.
        seed: of the random weights that a source without weights gets.
        deterministic: a token's hidden state is the same to the bit in any batch. The C++ kernels and ``float32`` are
            so always.

    Raises:
        ValueError: files that are damaged or do not fit the configuration, an unknown dtype, or ``native=True`` where
            the kernels cannot run.
    """
    library, why = kernels(
        source.config, dtype=dtype, device=device, native=native, threads=threads, block_size=block_size
    )
    log.info("%s: %s", source.name, why)
    if library is None:
        return _load_torch(source, dtype, torch.device(device), seed, deterministic)
    weights = load_weights(source, seed)
    if dtype == "auto":
        weights = ((name, _half_matrix(weight)) for name, weight in weights)
    packed_file = packed_path(source.path, dtype) if source.kind == "gguf" else None
    return build_native(
        source.config,
        weights,
        library,
        kv_dtype=kv_dtype(dtype),
        block_size=block_size,
        packed_file=packed_file,
    )


def kv_dtype(dtype: str) -> torch.dtype:
    """What the KV cache of a model of this dtype holds: bfloat16 for ``auto``, else the same.

    Raises:
        ValueError: unknown dtype.
    """
    if dtype == "auto":
        return torch.bfloat16
    if dtype not in DTYPES:
        raise ValueError(f"dtype {dtype!r} is not known; choose auto, {', '.join(DTYPES)}")
    return DTYPES[dtype]


def kernels(
    config: ModelConfig,
    *,
    dtype: str = "auto",
    device: torch.device | str = "cpu",
    native: bool | None = None,
    threads: int | None = None,
    block_size: int = 16,
) -> tuple[cpu_library.Library | None, str]:
    """The C++ kernels if they are to run the model, and a sentence for the start-up line: which way runs, and why.

    Raises:
        ValueError: ``native`` insists on them and they cannot run; unknown dtype.
    """
    computed_in = kv_dtype(dtype)
    library = None
    if native is False:
        reason: str | None = "native=False"
    elif torch.device(device).type != "cpu":
        reason = f"the C++ kernels are for the CPU, not {device}"
    elif dtype not in ("auto", "float32"):
        reason = f"the C++ kernels compute in float32, not {dtype}"
    else:
        reason = unsuitable(config, block_size)
    if reason is None:
        try:
            library = cpu_library.load(threads or torch.get_num_threads())
        except Unavailable as error:
            reason = str(error)
    if library is not None:
        return library, f"C++ kernels ({library.isa}, {library.threads} threads), weights as in the file"
    if native:
        raise ValueError(f"native=True, but {reason}; leave native out to run on plain torch")
    return None, f"plain torch in {str(computed_in).removeprefix('torch.')} ({reason})"


def _load_torch(source: ModelSource, dtype: str, device: torch.device, seed: int, deterministic: bool) -> Decoder:
    config = source.config
    number_type = kv_dtype(dtype)
    # float32 is the mode in which a request gives the same tokens alone and in any batch
    ops = resolve_ops(device, batch_invariant=deterministic or number_type is torch.float32)
    model = Decoder(config, device="meta", dtype=number_type, ops=ops)
    state = {name: _dense(weight, number_type, device) for name, weight in load_weights(source, seed)}
    if config.tied_embeddings:
        state["head.weight"] = state["embed.weight"]
    model.load_state_dict(state, assign=True)
    model.tie_weights()
    return model.requires_grad_(False)


def _dense(weight: Tensor | QuantizedTensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Contiguous and in memory of its own (a dense weight may be a view of the mapped file)."""
    if isinstance(weight, QuantizedTensor):
        return torch.from_numpy(weight.dequantize()).to(device=device, dtype=dtype)
    return weight.to(device=device, dtype=dtype, copy=True, memory_format=torch.contiguous_format)


def _half_matrix(weight: Tensor | QuantizedTensor) -> Tensor | QuantizedTensor:
    """Dense matrices in bfloat16, the rest as it is."""
    if isinstance(weight, QuantizedTensor) or weight.ndim != 2:
        return weight
    return weight.to(torch.bfloat16)
