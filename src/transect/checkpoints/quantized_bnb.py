"""Matrices that bitsandbytes packed in 4 bits (nf4 or fp4), as transformers saves them in safetensors.

A matrix ``M.weight`` is bytes ``[N / 2, 1]``, two codes in each, the first in the upper half. Its N numbers stand row
by row, in blocks of ``blocksize``. Beside it are

* ``M.weight.quant_map`` float32 ``[16]``: what the codes stand for
* ``M.weight.absmax`` float32: the scale of each block; or uint8, a code of ``M.weight.nested_quant_map`` ``[256]``,
  times ``M.weight.nested_absmax`` for each ``nested_blocksize`` of them, plus ``nested_offset`` (double quantization)
* ``M.weight.quant_state.bitsandbytes__nf4``: the bytes of a JSON object with the shape and the sizes of blocks

Source: Dettmers et al. 2023, arXiv:2305.14314. Values are made when they are read, float32.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .quantized_codes import all_of

SIDES = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
_STATE = "quant_state.bitsandbytes__"


class _State(NamedTuple):
    shape: tuple[int, int]
    block: int
    nested_block: int
    offset: float


def is_packed(found: Mapping[str, Any], name: str) -> bool:
    """Return True if the tensor ``name`` is such a matrix."""
    return name.endswith(".weight") and f"{name}.quant_map" in found


def is_side(name: str) -> bool:
    """Return True if a tensor belongs to such a matrix."""
    return ".weight." in name and (name.rpartition(".")[2] in SIDES or _STATE in name)


def matrix(found: Mapping[str, Any], name: str) -> tuple[tuple[int, ...], Callable[[slice], Tensor]]:
    """Return the shape of a matrix, and a function that computes some of its rows, float32.

    Raises:
        ValueError: tensors are missing or do not fit together; the message names one.
    """
    codes, state = found[name], _state(found, name)
    if codes.dtype != "U8":
        raise ValueError(
            f"{codes.path}: the codes {name!r} are stored as {codes.dtype}; only bytes (bnb_4bit_quant_storage uint8) "
            "can be read"
        )
    numbers, blocks = prod(state.shape), -(-prod(state.shape) // state.block)
    _expect(codes, -(-numbers // 2))
    absmax = _side(found, name, "absmax", blocks)
    nested = absmax.dtype == "U8"
    table = _side(found, name, "quant_map", 16)
    if nested:
        scales = _side(found, name, "nested_absmax", -(-blocks // state.nested_block))
        scale_table = _side(found, name, "nested_quant_map", 256)

    def rows(part: slice) -> Tensor:
        own, inputs = range(*part.indices(state.shape[0])), state.shape[1]
        first = own.start * inputs // state.block  # the blocks that these rows touch
        last = min(blocks, -(-own.stop * inputs // state.block))
        begin, end = first * state.block, min(numbers, last * state.block)
        packed = codes.file.get_slice(codes.name)[begin // 2 : -(-end // 2)].reshape(-1).int()
        values = all_of(table).float()[torch.stack([packed >> 4, packed & 15], 1).view(-1)[: end - begin]]
        scale = all_of(absmax)[first:last]
        if nested:
            groups = all_of(scales).float()[torch.arange(first, last) // state.nested_block]
            scale = all_of(scale_table).float()[scale.int()] * groups + state.offset
        values *= scale.float().repeat_interleave(state.block)[: end - begin]
        return values[own.start * inputs - begin : own.stop * inputs - begin].view(len(own), inputs)

    return state.shape, rows


def _state(found: Mapping[str, Any], name: str) -> _State:
    stored = next((each for key, each in found.items() if key.startswith(f"{name}.{_STATE}")), None)
    if stored is None:
        raise ValueError(
            f"the tensor '{name}.{_STATE}nf4' is missing, without which {name!r} has no shape; download it again"
        )
    try:
        told = json.loads(bytes(all_of(stored).tolist()))
        outputs, inputs = (int(size) for size in told["shape"])
        block, nested = int(told["blocksize"]), int(told.get("nested_blocksize", 256))
        state = _State((outputs, inputs), block, nested, float(told.get("nested_offset", 0.0)))
    except (ValueError, TypeError, KeyError):
        state = _State((0, 0), 0, 0, 0.0)
    if min(*state.shape, state.nested_block) < 1 or state.block < 2 or state.block % 2:
        raise ValueError(f"{stored.path}: the tensor {stored.name!r} does not say a matrix's shape and blocks")
    return state


def _side(found: Mapping[str, Any], name: str, suffix: str, count: int) -> Any:
    stored = found.get(f"{name}.{suffix}")
    if stored is None:
        raise ValueError(f"the tensor '{name}.{suffix}' is missing, without which {name!r} has no values")
    _expect(stored, count)
    return stored


def _expect(stored: Any, count: int) -> None:
    if prod(stored.shape) != count:
        raise ValueError(
            f"{stored.path}: the tensor {stored.name!r} should have {count} numbers and has {prod(stored.shape)}; "
            "download it again"
        )
