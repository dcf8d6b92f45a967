"""Conversion of a model's weights and configuration to llama.cpp's format: the inverse of ``gguf.py`` and
``spec/gguf.py``.

Norms, biases, routers and learned positions stay in float32, experts that are in MXFP4 (gpt-oss) in that. Matrices take
the type that is asked for where their rows are whole blocks of it, else one of blocks of 32 with about as many bits, as
llama.cpp chooses it, else F16. With a type below 8
bits embedding and head have more (Q8_0, of the K types Q6_K): there rounding hurts most. So have, in the mixtures
Q4_K_M and Q5_K_M, half of the value and down matrices.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..formats.ggml_blocks import QuantizedTensor
from ..formats.ggml_quantize import quantize
from ..formats.gguf_write import PlannedTensor
from ..models.rope import frequencies, half_rotation_rows
from ..models.staging import dense_values
from ..models.stored import ALL, BlockCodes, Stored, StoredWeights
from ..spec.gguf import to_gguf
from ..spec.gguf_places import GGUFPlace, places
from ..spec.model import ModelConfig, RopeConfig
from ..spec.numbers.gguf import MATRIX_TYPES, MIXTURES, UNITS, block_type
from ..spec.numbers.layouts import BlockLayout
from ..spec.weights import weight_shapes

_MXFP4 = BlockLayout(UNITS["MXFP4"])
_FINER = ("attention.v", "mlp.down", "mlp.experts_down")


def gguf_type(name: str) -> str:
    """Return the GGUF type of that name, in any case.

    Raises:
        ValueError: it is none that is written.
    """
    found = name.upper()
    if found not in MATRIX_TYPES:
        known = ", ".join(each.lower() for each in MATRIX_TYPES)
        raise ValueError(f"--type {name} cannot be written; choose one of {known}")
    return found


def gguf_metadata(config: ModelConfig, type_name: str, name: str) -> dict[str, Any]:
    """Make the metadata of a GGUF file; ``type_name`` is that of most matrices.

    Raises:
        ValueError: llama.cpp has no such model, or not under a name that is known here.
    """
    return to_gguf(config) | {
        "general.type": "model",
        "general.name": name,
        "general.file_type": (MIXTURES.get(type_name) or block_type(type_name)).file_type,
        "general.quantization_version": 2,
    }


def gguf_tensors(
    weights: StoredWeights, config: ModelConfig, type_name: str, importance: Mapping[str, np.ndarray] | None = None
) -> Iterator[PlannedTensor]:
    """Plan the tensors of a GGUF file. They read ``weights`` when they are written: keep it open until then.

    Args:
        importance: of the columns of matrices by name (``layers.0.attention.q``), as ``ggml_quantize.quantize`` takes
            it; None if there is none.

    Raises:
        ValueError: numbers that the type cannot hold (when a tensor is made).
    """
    shapes = weight_shapes(config)
    stored = dict(islice(weights, len(shapes)))  # not one step further: that would close the files
    if config.rope.scaling in ("llama3", "factors") and config.position == "rope":
        plain = frequencies(RopeConfig(config.rope.theta), config.head_dim)
        factors = (plain / frequencies(config.rope, config.head_dim)).numpy()
        yield PlannedTensor("rope_freqs.weight", factors.shape, "F32", lambda: quantize(factors, "F32"))
    parts: dict[str, list[tuple[str, GGUFPlace]]] = {}
    for name, place in places(config).items():
        parts.setdefault(place.tensor, []).append((name, place))
    for tensor, found in parts.items():
        found.sort(key=lambda each: each[1].first)
        name, place = found[0]
        module = name.rsplit(".", 1)[0]
        chosen = _type_of(module, place.stored, type_name, config.n_layers)
        own = [(stored[each], where, shapes[each]) for each, where in found]
        if own[0][0].layout == _MXFP4 and ".experts_" in module:
            chosen = _MXFP4.units.name
        counts = None if importance is None else importance.get(module)
        yield PlannedTensor(tensor, place.stored, chosen, partial(_made, own, chosen, config.head_dim, counts))


def _type_of(module: str, shape: tuple[int, ...], wanted: str, layers: int) -> str:
    if len(shape) == 1 or module.endswith(("position_embed", "router")) or (len(shape) == 2 and ".experts_" in module):
        return "F32"
    mixture = MIXTURES.get(wanted)
    kind = block_type(wanted if mixture is None else mixture.most)
    if module in ("embed", "head"):
        kind = block_type(kind.tables or kind.name)
    elif mixture is not None and module.endswith(_FINER) and _finer(int(module.split(".")[1]), layers):
        kind = block_type(mixture.finer)
    if shape[-1] % kind.block:
        kind = block_type(kind.smaller)
    return kind.name if shape[-1] % kind.block == 0 else "F16"


def _finer(layer: int, layers: int) -> bool:
    """Return True for layers whose value and down matrices have more bits in a mixture, as in llama.cpp: the first and
    last eighth, and every third between."""
    eighth = layers // 8
    return layer < eighth or layer >= 7 * layers // 8 or (layer - eighth) % 3 == 2


def _made(
    parts: list[tuple[Stored, GGUFPlace, tuple[int, ...]]], type_name: str, head_dim: int, importance: np.ndarray | None
) -> QuantizedTensor:
    place = parts[0][1]
    if type_name == _MXFP4.units.name:
        assert len(parts) == 1
        codes = parts[0][0].codes
        assert codes is not None
        packed = codes(ALL, ALL)
        assert isinstance(packed, BlockCodes)
        return QuantizedTensor(type_name, place.stored, packed.blocks.numpy())
    values = [stored.read() for stored, _, _ in parts]
    orders = [np.argsort(half_rotation_rows(shape[0] // head_dim, head_dim)) if where.paired else None
              for _, where, shape in parts]  # fmt: skip
    first = values[0]
    if isinstance(first, QuantizedTensor) and first.type_name == type_name and len(parts) == 1:
        # In this type already: no second rounding.
        kept = first if orders[0] is None else first.rows(orders[0])
        return QuantizedTensor(type_name, place.stored, kept.blocks)
    numbers = [dense_values(value).to(torch.float32) for value in values]
    ordered = [each if order is None else each[order] for each, order in zip(numbers, orders, strict=True)]
    whole: Tensor = torch.cat(ordered) + place.added
    return quantize(whole.reshape(place.stored).numpy(), type_name, importance)
