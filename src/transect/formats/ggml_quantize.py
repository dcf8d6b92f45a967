"""Float32 to GGUF block types by rounding each block on its own, as ggml's reference code does (``ggml-quants.c``).

For tests, tools and small exports. The K types need a search for good scales and are read here, not written.
"""

from __future__ import annotations

import numpy as np

from .ggml_blocks import QuantizedTensor, block_type

WRITABLE = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1")


def quantize(array: np.ndarray, type_name: str) -> QuantizedTensor:
    """Pack an array of one or more dimensions along its last one.

    Args:
        array: finite numbers, any float dtype; converted to float32 first.
        type_name: one of ``WRITABLE``.

    Raises:
        ValueError: another type, a last dimension that is no multiple of the block, a number that is not finite, or one
            too large for a float16 scale.
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
    if type_name == "F32":
        packed = values.astype("<f4")
    elif type_name == "F16":
        packed = _to_half(values, type_name)
    elif type_name == "BF16":
        packed = _round_to_bfloat16(values)
    else:
        packed = _pack(values.reshape(-1, kind.block), type_name)
    n_rows = int(np.prod(values.shape[:-1], dtype=np.int64))
    return QuantizedTensor(type_name, values.shape, packed.view(np.uint8).reshape(n_rows, row_bytes))


def _to_half(x: np.ndarray, type_name: str) -> np.ndarray:
    with np.errstate(over="ignore"):
        half = x.astype("<f2")
    if not np.isfinite(half).all():
        raise ValueError(f"cannot quantize to {type_name}: a value or scale is beyond float16's largest, 65504")
    return half


def _round_to_bfloat16(x: np.ndarray) -> np.ndarray:
    """To nearest, ties to even: add just under half of the last kept bit, or exactly half where that bit is odd."""
    bits = x.view(np.uint32)
    return ((bits + (0x7FFF + (bits >> 16 & 1))) >> 16).astype("<u2")


def _pack(x: np.ndarray, type_name: str) -> np.ndarray:
    """[blocks, 32] float32 to [blocks, bytes] uint8."""
    low = x.min(axis=1, keepdims=True)
    peak = np.take_along_axis(x, np.abs(x).argmax(axis=1, keepdims=True), axis=1)
    with np.errstate(over="ignore"):
        span = x.max(axis=1, keepdims=True) - low
    match type_name:
        case "Q8_0":
            scale = np.abs(peak) / np.float32(127)
            scaled = x * _inverse(scale)
            rounded = np.sign(scaled) * np.floor(np.abs(scaled) + np.float32(0.5))  # halves away from zero
            return np.concatenate((_bytes(_to_half(scale, type_name)), rounded.astype(np.int8).view(np.uint8)), axis=1)
        case "Q4_0" | "Q5_0":
            # the number of largest magnitude becomes code 0, so that it is kept exactly but for the scale's rounding
            half = 8 if type_name == "Q4_0" else 16
            scale = peak / np.float32(-half)
            head = _bytes(_to_half(scale, type_name))
            codes = np.trunc(x * _inverse(scale) + np.float32(half + 0.5)).clip(0, 2 * half - 1).astype(np.uint8)
        case _:
            top = 15 if type_name == "Q4_1" else 31
            scale = span / np.float32(top)
            head = np.concatenate((_bytes(_to_half(scale, type_name)), _bytes(_to_half(low, type_name))), axis=1)
            codes = np.trunc((x - low) * _inverse(scale) + np.float32(0.5)).clip(0, top).astype(np.uint8)
    if type_name.startswith("Q5"):
        head = np.concatenate((head, np.packbits(codes >> 4, axis=1, bitorder="little")), axis=1)
    nibbles = codes & 15
    return np.concatenate((head, nibbles[:, :16] | nibbles[:, 16:] << 4), axis=1)


def _inverse(scale: np.ndarray) -> np.ndarray:
    """1 / scale, and 0 where the scale is 0 (all values of the block alike)."""
    with np.errstate(divide="ignore", over="ignore"):
        inverse = np.float32(1) / scale
    return np.where(np.isfinite(inverse), inverse, np.float32(0))


def _bytes(half: np.ndarray) -> np.ndarray:
    """[blocks, 1] float16 to [blocks, 2] uint8."""
    return np.ascontiguousarray(half).view(np.uint8)
