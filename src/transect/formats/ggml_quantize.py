"""Conversion of float32 to GGUF block types.

The simple types round each block on its own, as ggml's reference code does (``ggml-quants.c``). The K types search for
good scales (``ggml_k_types.py``), and so do the 4- and 5-bit types where the importance of columns is given.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from ..spec.numbers.gguf import WRITABLE, BlockType, block_type
from .ggml_blocks import QuantizedTensor
from .ggml_k_types import K_TYPES, pack_k
from .ggml_search import affine_scale, inverse, symmetric_scale

_CHUNK = 1 << 17
"""Numbers searched at a time, so that the passes over them stay in the L2 cache."""


def quantize(array: np.ndarray, type_name: str, importance: np.ndarray | None = None) -> QuantizedTensor:
    """Pack an array of one or more dimensions along its last one.

    Args:
        array: finite numbers, any float dtype; converted to float32 first.
        type_name: one of ``WRITABLE``.
        importance: weights of the columns' square errors, float ``[columns]``, at least 0 (the mean square of the
            matrix's inputs), used by the types of 4 to 6 bits. None if all weigh the same.

    Raises:
        ValueError: another type, a last dimension that is not a multiple of the block, a number that is not finite, or
            one too large for a float16 scale; an importance of another length, or one that is negative or not finite.
    """
    if type_name not in WRITABLE:
        raise ValueError(f"cannot quantize to {type_name!r}; choose one of {', '.join(WRITABLE)}")
    if np.ndim(array) == 0:
        raise ValueError("cannot quantize a scalar; give an array of one or more dimensions")
    values = np.ascontiguousarray(array, dtype=np.float32)
    kind = block_type(type_name)
    row_bytes = kind.row_bytes(values.shape[-1])
    if not np.isfinite(values).all():
        raise ValueError(f"cannot quantize to {type_name}: the array holds NaN or infinite numbers")
    if not kind.packed:
        packed = _PLAIN[type_name](values, type_name)
    elif type_name in K_TYPES or (importance is not None and kind.searched):
        packed = _searched(values, kind, _weights(importance, values.shape[-1]))
    else:
        packed = _pack(values.reshape(-1, kind.block), kind)
    n_rows = int(np.prod(values.shape[:-1], dtype=np.int64))
    return QuantizedTensor(type_name, values.shape, packed.view(np.uint8).reshape(n_rows, row_bytes))


def _weights(importance: np.ndarray | None, columns: int) -> np.ndarray:
    """Return the share of each column in the error, float32 ``[columns]``, 1 on average."""
    if importance is None:
        return np.ones(columns, np.float32)
    given = np.asarray(importance, np.float64)
    if given.shape != (columns,) or not np.isfinite(given).all() or given.min() < 0:
        raise ValueError(f"the importance of {columns} columns must be as many finite numbers of at least 0")
    mean = given.mean()
    # A column that no input reached still counts a little: other text may reach it.
    return np.maximum(given / mean, 1e-4).astype(np.float32) if mean > 0 else np.ones(columns, np.float32)


def _searched(values: np.ndarray, kind: BlockType, weights: np.ndarray) -> np.ndarray:
    """Search scales and pack, some rows at a time, to bytes [blocks, bytes]."""
    rows = values.reshape(-1, values.shape[-1])
    step = max(1, _CHUNK // rows.shape[1])
    done = []
    for first in range(0, len(rows), step):
        part = rows[first : first + step]
        blocks = part.reshape(-1, kind.block)
        counts = np.broadcast_to(weights, part.shape).reshape(blocks.shape)
        if kind.name in K_TYPES:
            done.append(pack_k(blocks, counts, kind.name, lambda scale: _to_half(scale, kind.name)))
        else:
            done.append(_pack(blocks, kind, counts))
    return np.concatenate(done)


def _to_half(x: np.ndarray, type_name: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        half = x.astype("<f2")
    if not np.isfinite(half).all():
        raise ValueError(f"cannot quantize to {type_name}: a value or scale is beyond float16's largest, 65504")
    return half


def _round_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """Round to nearest, ties to even: add just under half of the last kept bit, or exactly half if that bit is odd."""
    bits = x.view(np.uint32)
    return ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype("<u2")


_PLAIN: Mapping[str, Callable[[np.ndarray, str], np.ndarray]] = {
    "F32": lambda values, _: values.astype("<f4"),
    "F16": _to_half,
    "BF16": lambda values, _: _round_to_bfloat16(values),
}


def _pack(x: np.ndarray, kind: BlockType, weights: np.ndarray | None = None) -> np.ndarray:
    """Pack [blocks, 32] float32 to [blocks, bytes] uint8."""
    type_name, top = kind.name, 2**kind.bits - 1
    low = x.min(axis=1, keepdims=True)
    peak = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)
    with np.errstate(over="ignore"):
        span = x.max(axis=1, keepdims=True) - low
    if kind.bits == 8:
        scale = np.abs(peak) / np.float32(127)
        scaled = x * inverse(scale)
        rounded = np.sign(scaled) * np.floor(np.abs(scaled) + np.float32(0.5))  # halves away from zero
        return np.concatenate((_bytes(_to_half(scale, type_name)), rounded.astype(np.int8).view(np.uint8)), axis=1)
    if kind.offset:
        # the number of largest magnitude becomes code 0, so that it is kept exactly but for the scale's rounding
        half = kind.offset
        scale = peak / np.float32(-half) if weights is None else _kept(symmetric_scale(x, weights, half), type_name)
        head = _bytes(_to_half(scale, type_name))
        codes = np.trunc(x * inverse(scale) + np.float32(half + 0.5)).clip(0, top).astype(np.uint8)
    else:
        scale = span / np.float32(top)
        if weights is not None:
            fitted = affine_scale(x, weights, top, below=False)
            scale, low = (_kept(each, type_name) for each in fitted)
        head = np.concatenate((_bytes(_to_half(scale, type_name)), _bytes(_to_half(low, type_name))), axis=1)
        codes = np.trunc((x - low) * inverse(scale) + np.float32(0.5)).clip(0, top).astype(np.uint8)
    if kind.bits == 5:
        head = np.concatenate((head, np.packbits(codes >> 4, axis=1, bitorder="little")), axis=1)
    nibbles = codes & 15
    return np.concatenate((head, nibbles[:, :16] | nibbles[:, 16:] << 4), axis=1)


def _kept(scale: np.ndarray, type_name: str) -> np.ndarray:
    """Return the scale as stored in the file, by which searched codes are chosen."""
    return _to_half(scale, type_name).astype(np.float32)


def _bytes(half: np.ndarray) -> np.ndarray:
    """Convert [blocks, 1] float16 to [blocks, 2] uint8."""
    return np.ascontiguousarray(half).view(np.uint8)
