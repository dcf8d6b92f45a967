"""The weights of a GGUF file by canonical name, packed as they are in the file.

Two things differ from the names and shapes of ``shapes.py``. Files of the llama architecture (Llama, SmolLM2,
Mistral) keep the rows of q and k in the order that rotates neighbouring pairs: row ``2j + s`` of a head is row
``s * half + j`` in the half-rotation order used here. And GPT-2's q, k and v are one matrix.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..formats.ggml_blocks import QuantizedTensor
from ..formats.gguf_file import GGUFFile
from ..ops.linear.packed.gguf_layout import FORMATS
from .config import ModelConfig
from .rope import half_rotation_rows
from .shapes import weight_shapes
from .storage import Layout
from .stored import ALL, Blocks, Stored, StoredWeights, Values, is_whole, within

OUTER = {
    "embed": "token_embd",
    "position_embed": "position_embd",
    "norm": "output_norm",
    "head": "output",
}
IN_LAYER = {
    "attention_norm": "attn_norm",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.o": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "mlp_norm": "ffn_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
}
FUSED = ("attention.q", "attention.k", "attention.v")
_NOT_WEIGHTS = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight")
"""Frequencies of rotary embedding; the configuration has them."""
_DENSE = {"F32": (np.float32, torch.float32), "F16": (np.float16, torch.float16), "BF16": (np.int16, torch.bfloat16)}


@dataclass(frozen=True)
class _Place:
    """Where a weight is: a tensor of the file, and the rows of it (None: all)."""

    tensor: str
    rows: slice | np.ndarray | None


def stored_gguf(file: GGUFFile, config: ModelConfig) -> StoredWeights:
    """Every weight of ``weight_shapes(config)`` once.

    Packed matrices are read as ``QuantizedTensor`` (views of the file, or copies where rows were reordered), all else
    as torch tensors of the file's dtype.

    Raises:
        ValueError: a tensor is missing, superfluous, of the wrong shape, or holds numbers that are not finite; the
            message names the file and the tensor. All but the last are found before the first weight is handed out.
    """
    places = _places(file, config)
    shapes = weight_shapes(config)
    return ((name, _stored(file, place, shapes[name])) for name, place in places.items())


def _stored(file: GGUFFile, place: _Place, shape: tuple[int, ...]) -> Stored:
    """A weight, which may be had in its blocks where it is packed."""
    read, kind = partial(_read, file, place), file.tensors[place.tensor].block_type
    if len(shape) != 2 or kind.unpack is None:
        return Stored(shape, read)
    layout = Layout("gguf", block_type=kind.name, bits=FORMATS[kind.name].bits)

    def codes(rows: slice, columns: slice) -> Blocks:
        tensor = _read(file, place, rows, columns)
        assert isinstance(tensor, QuantizedTensor)
        return Blocks(layout, torch.from_numpy(np.array(tensor.blocks)))

    return Stored(shape, read, layout, codes)


def _places(file: GGUFFile, config: ModelConfig) -> dict[str, _Place]:
    fused = config.architecture == "gpt2"
    interleaved = file.metadata.get("general.architecture") == "llama"
    if config.n_layers > len(file.tensors):  # before a list of billions of names is made
        raise ValueError(
            f"{file.path}: {len(file.tensors)} tensors cannot be the {config.n_layers} layers that the metadata names; "
            "fetch or convert the file again"
        )
    places: dict[str, _Place] = {}
    for name, shape in weight_shapes(config).items():
        module, kind = name.rsplit(".", 1)
        stored = shape
        part: int | None = None
        paired = False
        if module.startswith("layers."):
            _, layer, inner = module.split(".", 2)
            if fused and inner in FUSED:
                part = FUSED.index(inner)
                tensor = f"blk.{layer}.attn_qkv.{kind}"
                stored = (3 * config.q_dim, *shape[1:])
            else:
                tensor = f"blk.{layer}.{IN_LAYER[inner]}.{kind}"
                paired = interleaved and inner in ("attention.q", "attention.k")
        else:
            tensor = f"{OUTER[module]}.{kind}"
        _check(file, tensor, stored)
        rows: slice | np.ndarray | None = None
        if part is not None:
            rows = slice(part * config.q_dim, (part + 1) * config.q_dim)
        elif paired:
            rows = half_rotation_rows(shape[0] // config.head_dim, config.head_dim)
        places[name] = _Place(tensor, rows)
    used = {place.tensor for place in places.values()}
    extra = [name for name in file.tensors if name not in used and not _NOT_WEIGHTS.fullmatch(name)]
    if extra:
        raise ValueError(
            f"{file.path}: a {config.architecture} model has no use for {len(extra)} of the tensors ({_few(extra)}); "
            "the file is of another model family, or was converted wrongly"
        )
    return places


def _check(file: GGUFFile, tensor: str, shape: tuple[int, ...]) -> None:
    found = file.tensors.get(tensor)
    if found is None:
        raise ValueError(
            f"{file.path}: the tensor {tensor!r} (shape {list(shape)}) is missing; fetch or convert the file again"
        )
    if found.shape != shape:
        raise ValueError(
            f"{file.path}: the tensor {tensor!r} should have shape {list(shape)} and has {list(found.shape)}; the "
            "file's metadata and tensors do not belong together, fetch or convert it again"
        )


def _read(file: GGUFFile, place: _Place, rows: slice, columns: slice) -> Values:
    tensor = file.tensors[place.tensor]
    if isinstance(place.rows, np.ndarray):
        taken: slice | np.ndarray = place.rows[rows]
    else:  # of the rows that the place is, some
        first, last = within(tensor.shape[0], ALL if place.rows is None else place.rows).indices(tensor.shape[0])[:2]
        part = within(last - first, rows)
        taken = slice(first + part.start, first + part.stop)
    if len(tensor.shape) == 2:
        tensor = _columns(file, place, tensor, columns)
        whole = isinstance(taken, slice) and is_whole(tensor.shape[0], taken)
        tensor = tensor if whole else tensor.rows(taken)
        taken = ALL
    if tensor.has_nonfinite_scale():
        raise ValueError(
            f"{file.path}: the tensor {place.tensor!r} holds infinite or NaN numbers; the file is damaged, fetch it "
            "again"
        )
    return tensor if tensor.is_packed and len(tensor.shape) == 2 else _dense(tensor)[taken]


def _columns(file: GGUFFile, place: _Place, tensor: QuantizedTensor, columns: slice) -> QuantizedTensor:
    """Some columns of a matrix, whole blocks."""
    if is_whole(tensor.shape[1], columns):
        return tensor
    part = within(tensor.shape[1], columns)
    block = tensor.block_type
    if part.start % block.block or part.stop % block.block:
        raise ValueError(
            f"{file.path}: the tensor {place.tensor!r} packs {block.block} numbers of a row together, and a cut at "
            f"columns {part.start} and {part.stop} would part them; take fewer parts or a file of another type"
        )
    width = (tensor.shape[0], part.stop - part.start)
    blocks = tensor.blocks[:, block.row_bytes(part.start) if part.start else 0 : block.row_bytes(part.stop)]
    return QuantizedTensor(tensor.type_name, width, blocks)


def _dense(tensor: QuantizedTensor) -> Tensor:
    """A copy in memory, in the file's own dtype (packed vectors, which no file is known to have, become float32)."""
    if tensor.is_packed:
        return torch.from_numpy(tensor.dequantize())
    stored, dtype = _DENSE[tensor.type_name]
    return torch.from_numpy(np.ascontiguousarray(tensor.blocks).view(stored).reshape(tensor.shape).copy()).view(dtype)


def _few(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
