"""How a model's checkpoint packs its matrices, known before a weight is read."""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import closing
from typing import Any

from ..models.storage import Layouts
from ..spec.numbers.layouts import MatrixLayout
from .resolve import ModelSource


def held_layouts(source: ModelSource, *, gguf: bool = True) -> Layouts:
    """How the matrices of a source are packed, where kinds of weight hold them so; none for what is not packed.
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
