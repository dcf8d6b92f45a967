"""The weights of a GGUF file by canonical name, packed as in the file. ``spec/gguf_places.py`` has their locations and
forms."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..formats.ggml_blocks import QuantizedTensor
from ..formats.gguf_file import GGUFFile
from ..models.rope import half_rotation_rows
from ..models.stored import ALL, BlockCodes, Stored, StoredWeights, Values, is_whole, within
from ..spec.gguf_places import GGUFPlace, places
from ..spec.model import ModelConfig
from ..spec.numbers.gguf import UNITS
from ..spec.numbers.layouts import BlockLayout
from ..spec.weights import weight_shapes

_NOT_WEIGHTS = re.compile(r"rope_freqs\.weight|blk\.\d+\.attn_rot_embd\.weight")
"""Frequencies of rotary embedding, which the configuration has."""
_DENSE = {"F32": (np.float32, torch.float32), "F16": (np.float16, torch.float16), "BF16": (np.int16, torch.bfloat16)}


@dataclass(frozen=True)
class _Found:
    """A weight ``[O, I]`` or ``[O]`` of a file, with its tensor, which may have more dimensions.

    ``rows`` are its rows of the tensor, None if it has all; ``added`` is the number that the file adds to each.
    """

    name: str
    tensor: QuantizedTensor
    rows: slice | np.ndarray | None
    added: float


def stored_gguf(file: GGUFFile, config: ModelConfig) -> StoredWeights:
    """Yield every weight of ``weight_shapes(config)`` once.

    Packed matrices are read as ``QuantizedTensor`` (views of the file, or copies where rows were reordered), all else
    as torch tensors of the file's dtype.

    Raises:
        ValueError: a tensor is missing, superfluous, of the wrong shape, or holds numbers that are not finite; the
            message names the file and the tensor. All but the last are found before the first weight is handed out.
    """
    shapes = weight_shapes(config)
    found = _find(file, config, shapes)
    return ((name, _stored(file, each, shapes[name])) for name, each in found.items())


def _stored(file: GGUFFile, found: _Found, shape: tuple[int, ...]) -> Stored:
    """Return a weight, which may be read in its blocks if it is packed."""
    read, kind = partial(_read, file, found), found.tensor.block_type
    if len(shape) != 2 or not kind.packed:
        return Stored(shape, read)
    layout = BlockLayout(UNITS[kind.name])

    def codes(rows: slice, columns: slice) -> BlockCodes:
        tensor = _read(file, found, rows, columns)
        assert isinstance(tensor, QuantizedTensor)
        return BlockCodes(layout, torch.from_numpy(np.array(tensor.blocks)))

    return Stored(shape, read, layout, codes)


def _find(file: GGUFFile, config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, _Found]:
    if config.n_layers > len(file.tensors):  # before a list of billions of names is made
        raise ValueError(
            f"{file.path}: {len(file.tensors)} tensors cannot be the {config.n_layers} layers that the metadata names; "
            "fetch or convert the file again"
        )
    planned = places(config, file.tensors)
    found = {}
    for name, place in planned.items():
        _check(file, place.tensor, place.stored, shapes[name])
        found[name] = _found(config, file.tensors[place.tensor], place, shapes[name])
    used = {place.tensor for place in planned.values()}
    extra = [name for name in file.tensors if name not in used and not _NOT_WEIGHTS.fullmatch(name)]
    if extra:
        raise ValueError(
            f"{file.path}: a {config.architecture} model has no use for {len(extra)} of the tensors ({_few(extra)}); "
            "the file is of another model family, or was converted wrongly"
        )
    return found


def _found(config: ModelConfig, tensor: QuantizedTensor, place: GGUFPlace, shape: tuple[int, ...]) -> _Found:
    if len(place.stored) != len(shape):  # all experts in one tensor, or one row as a vector
        whole = shape if len(shape) == 2 else (math.prod(tensor.shape),)
        tensor = QuantizedTensor(tensor.type_name, whole, tensor.blocks.reshape(math.prod(whole[:-1]), -1))
    rows: slice | np.ndarray | None = None
    if place.paired:
        rows = place.first + half_rotation_rows(shape[0] // config.head_dim, config.head_dim)
    elif tensor.shape[0] != shape[0]:
        rows = slice(place.first, place.first + shape[0])
    return _Found(place.tensor, tensor, rows, place.added)


def _check(file: GGUFFile, tensor: str, shape: tuple[int, ...], matrix: tuple[int, ...]) -> None:
    """Check that a tensor has llama.cpp's ``shape``, or ``matrix``, which its converter writes for one row if it
    quantizes nothing."""
    found = file.tensors.get(tensor)
    if found is None:
        raise ValueError(
            f"{file.path}: the tensor {tensor!r} (shape {list(shape)}) is missing; fetch or convert the file again"
        )
    if found.shape != shape and (len(shape) > 1 or found.shape != matrix):
        raise ValueError(
            f"{file.path}: the tensor {tensor!r} should have shape {list(shape)} and has {list(found.shape)}; the "
            "file's metadata and tensors do not belong together, fetch or convert it again"
        )


def _read(file: GGUFFile, found: _Found, rows: slice, columns: slice) -> Values:
    tensor = found.tensor
    if isinstance(found.rows, np.ndarray):
        taken: slice | np.ndarray = found.rows[rows]
    else:  # of the rows that the weight is, some
        first, last = within(tensor.shape[0], ALL if found.rows is None else found.rows).indices(tensor.shape[0])[:2]
        part = within(last - first, rows)
        taken = slice(first + part.start, first + part.stop)
    if len(tensor.shape) == 2:
        tensor = _columns(file, found.name, tensor, columns)
        whole = isinstance(taken, slice) and is_whole(tensor.shape[0], taken)
        tensor = tensor if whole else tensor.rows(taken)
        taken = ALL
    if tensor.has_nonfinite_scale():
        raise ValueError(
            f"{file.path}: the tensor {found.name!r} holds infinite or NaN numbers; the file is damaged, fetch it again"
        )
    if tensor.is_packed and len(tensor.shape) == 2:
        return tensor
    return _dense(tensor)[taken] if not found.added else _dense(tensor)[taken].float() - found.added


def _columns(file: GGUFFile, name: str, tensor: QuantizedTensor, columns: slice) -> QuantizedTensor:
    """Select some columns of a matrix, in whole blocks."""
    if is_whole(tensor.shape[1], columns):
        return tensor
    part = within(tensor.shape[1], columns)
    block = tensor.block_type
    if part.start % block.block or part.stop % block.block:
        raise ValueError(
            f"{file.path}: the tensor {name!r} packs {block.block} numbers of a row together, and a cut at "
            f"columns {part.start} and {part.stop} would split them; take fewer parts or a file of another type"
        )
    width = (tensor.shape[0], part.stop - part.start)
    blocks = tensor.blocks[:, block.row_bytes(part.start) if part.start else 0 : block.row_bytes(part.stop)]
    return QuantizedTensor(tensor.type_name, width, blocks)


def _dense(tensor: QuantizedTensor) -> Tensor:
    """Return a copy in memory, in the file's own dtype (packed vectors, which no file is known to have, become
    float32)."""
    if tensor.is_packed:
        return torch.from_numpy(tensor.dequantize())
    stored, dtype = _DENSE[tensor.type_name]
    return torch.from_numpy(np.ascontiguousarray(tensor.blocks).view(stored).reshape(tensor.shape).copy()).view(dtype)


def _few(names: list[str]) -> str:
    named = (name if name.isprintable() else repr(name) for name in names[:3])
    return ", ".join(named) + (", ..." if len(names) > 3 else "")
