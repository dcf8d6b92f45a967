"""Layouts of the matrices of a model's checkpoint, known before a weight is read."""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from contextlib import closing
from dataclasses import replace
from typing import Any

from ..costs.storage import Layouts, Storage, storage_for, storage_held
from ..spec.numbers.layouts import MatrixLayout
from .resolve import ModelSource


def held_layouts(source: ModelSource, *, gguf: bool = True) -> Layouts:
    """Find the layouts of a source's matrices that kinds of weight can hold; plain matrices have none.

    ``gguf``: look into a GGUF file too.

    Raises:
        ValueError: files that are damaged or do not fit the configuration.
    """
    from .gguf import stored_gguf  # they read tensors; who counts bytes alone needs no torch
    from .hf import stored_hf

    base = source if source.adapter is None else source.adapter.base
    if base.kind == "shape" or (base.kind == "gguf" and not gguf):
        return ()
    found: dict[str, Counter[MatrixLayout | None]] = defaultdict(Counter)
    weights: Any = stored_gguf(base.gguf, base.config) if base.kind == "gguf" else stored_hf(base.path, base.config)
    with closing(weights):
        for name, stored in weights:
            if name.startswith("layers.") and name.endswith(".weight") and len(stored.shape) == 2:
                found[name.split(".", 2)[2].removesuffix(".weight")][stored.layout] += 1
            elif base.kind == "gguf" and name == f"{'embed' if base.config.tied_embeddings else 'head'}.weight":
                found["head"][stored.layout] += 1
    most = {name: counts.most_common(1)[0][0] for name, counts in found.items()}
    return tuple((name, layout) for name, layout in most.items() if layout is not None)


def storage_of(source: ModelSource, dtype: str, *, keeps_quantized: bool, quantization: str | None = None) -> Storage:
    """Return the bits of a number of the weights and of the KV cache, in an engine of this ``dtype``.

    Args:
        keeps_quantized: the C++ kernels run, which keep a GGUF file's matrices in their own formats. Other weights are
            bfloat16, or float32 if ``dtype`` says so.
        quantization: format of the layers' matrices, as in ``EngineConfig``.
    """
    dense = 32.0 if dtype == "float32" else 16.0
    if source.kind != "gguf" or not keeps_quantized:
        storage = storage_for(int(dense) // 8, quantization, native=keeps_quantized)
        if quantization is None and not keeps_quantized and dtype != "float32":
            storage = storage_held(storage, held_layouts(source, gguf=False))
        return replace(storage, norm=16, activation=dense)
    sizes = {"head": [0, 0], "linear": [0, 0]}
    head = "token_embd.weight" if source.config.tied_embeddings else "output.weight"
    for name, tensor in source.gguf.tensors.items():
        kind = "head" if name == head else "linear" if name.startswith("blk.") and len(tensor.shape) == 2 else None
        if kind is not None:
            sizes[kind][0] += tensor.blocks.nbytes
            sizes[kind][1] += math.prod(tensor.shape)
    bits = {kind: 8 * size / count for kind, (size, count) in sizes.items()}
    if quantization is not None:
        bits["linear"] = storage_for(2, quantization, native=True).linear
    return Storage(linear=bits["linear"], embed=bits["head"], head=bits["head"], kv=dense, activation=32)
