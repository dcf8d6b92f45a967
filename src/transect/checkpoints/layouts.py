"""How a model's checkpoint packs its matrices, and what they take so; known before anything is read."""

from __future__ import annotations

from collections import Counter, defaultdict
from contextlib import closing
from dataclasses import replace
from typing import Any

from ..models.storage import Layout, Layouts, Storage, int4_format
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
    found: dict[str, Counter[Layout | None]] = defaultdict(Counter)
    weights: Any = stored_gguf(base.gguf, base.config) if base.kind == "gguf" else stored_hf(base.path, base.config)
    with closing(weights):
        for name, stored in weights:
            if name.startswith("layers.") and name.endswith(".weight") and len(stored.shape) == 2:
                found[name.split(".", 2)[2].removesuffix(".weight")][stored.layout] += 1
            elif base.kind == "gguf" and name == f"{'embed' if base.config.tied_embeddings else 'head'}.weight":
                found["head"][stored.layout] += 1
    most = {name: counts.most_common(1)[0][0] for name, counts in found.items()}
    return tuple((name, layout) for name, layout in most.items() if layout is not None)


def bits_of(layout: Layout) -> float:
    """Bits of a number, scales included; those of 8 bits are a rounding error."""
    if layout.format == "gguf":
        return layout.bits
    return int4_format(layout.group).bits if layout.format == "int4" else 8.0


def storage_held(storage: Storage, layouts: Layouts) -> Storage:
    """``storage`` where matrices stay as the checkpoint packs them."""
    bits = {name: bits_of(layout) for name, layout in layouts}
    head = bits.pop("head", None)
    if head is not None:
        storage = replace(storage, head=head, head_copied=True)
    return replace(storage, matrices=tuple(bits.items())) if bits else storage
