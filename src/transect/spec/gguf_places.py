"""Locations of weights in GGUF files: names of tensors, and their forms (no torch).

Files differ from the names and shapes of ``weights.py`` in five things:

* Of the families whose rotary embedding llama.cpp turns in neighbouring pairs (``gguf_paired``) row ``2j + s`` of a
  head of q and k is row ``s * half + j`` in the half-rotation order used here.
* q, k and v of some families are one matrix, and so are gate and up (``joined``).
* All experts of a layer are one tensor ``[E, rows, columns]``, their biases one ``[E, rows]``.
* Gemma's norms have their offset of 1 added.
* The router of Qwen2-MoE's shared experts is a vector; a file that was converted and not quantized has a row.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from .families.family import Family
from .families.names import GGUF_NAMES
from .families.registry import family
from .model import ModelConfig
from .weights import weight_shapes, within_joined

_JOINED = {"attention": "attn_qkv", "mlp": "ffn_up"}
"""Name of joined matrices, by the block of the layer."""


@dataclass(frozen=True, slots=True)
class GGUFPlace:
    """Place of a weight: its rows from ``first`` on of ``tensor``, whose shape in the file is ``stored``. ``paired``:
    in the order that rotates neighbouring pairs; ``added``: number added to the values in the file."""

    tensor: str
    stored: tuple[int, ...]
    first: int = 0
    paired: bool = False
    added: float = 0.0


def places(config: ModelConfig, tensors: Collection[str] = ()) -> dict[str, GGUFPlace]:
    """Map canonical names to places, for every weight of ``weight_shapes(config)``. ``tensors``: the names of a file,
    which may have q, k and v as one matrix in any family."""
    record = family(config.architecture)
    joined = record.joined
    if "blk.0.attn_qkv.weight" in tensors and "qkv" not in joined:
        joined = (*joined, "qkv")
    return {name: _place(config, record, joined, name, shape) for name, shape in weight_shapes(config).items()}


def _place(
    config: ModelConfig, record: Family, joined: tuple[str, ...], name: str, shape: tuple[int, ...]
) -> GGUFPlace:
    names = GGUF_NAMES | record.gguf_names
    module, kind = name.rsplit(".", 1)
    added = config.norm_offset if module.endswith("norm") else 0.0
    if not module.startswith("layers."):
        return GGUFPlace(f"{names[module]}.{kind}", shape, added=added)
    _, layer, inner = module.split(".", 2)
    block = f"blk.{layer}"
    if kind == "sinks":
        return GGUFPlace(f"{block}.attn_sinks.weight", shape)
    if kind == "score_bias":
        return GGUFPlace(f"{block}.exp_probs_b.bias", shape)
    moe = config.layer_moe(int(layer))
    if inner.startswith("mlp.experts_") and moe is not None:
        return GGUFPlace(f"{block}.{names[inner]}.{kind}", (moe.held, shape[0] // moe.held, *shape[1:]))
    if inner == "mlp.shared_router":
        return GGUFPlace(f"{block}.{names[inner]}.{kind}", shape[1:])
    paired = record.gguf_paired and inner in ("attention.q", "attention.k")
    first, rows = within_joined(config, inner, shape[0], joined, int(layer))
    tensor = names[inner] if rows == shape[0] else _JOINED[inner.rpartition(".")[0]]
    return GGUFPlace(f"{block}.{tensor}.{kind}", (rows, *shape[1:]), first, paired, added)
