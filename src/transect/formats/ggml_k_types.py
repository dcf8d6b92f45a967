"""Conversion of float32 to the K types of GGUF files, Q4_K, Q5_K and Q6_K: the inverse of their readers in
``ggml_blocks.py``.

A block is 256 numbers. Each of its groups (8 of 32, or 16 of 16 in Q6_K) gets the scale, and minimum, of
``ggml_search.py``. These are rounded to 6 (or 8) bits beside one float16 for the block, which is fitted once more to
the codes that follow. Then the codes are taken with the numbers as they are stored.

Shapes: n blocks of 256 numbers, float32; weights ``[n, 256]``, or ``[1, 256]``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from .ggml_search import affine_scale, inverse, symmetric_scale

Half = Callable[[np.ndarray], np.ndarray]
"""Function from float32 to float16 that refuses numbers out of range."""


def pack_k(x: np.ndarray, weight: np.ndarray, type_name: str, half: Half) -> np.ndarray:
    """Pack ``[n, 256]`` numbers into bytes [n, bytes of a block]."""
    return _PACK[type_name](x, np.broadcast_to(weight, x.shape), half)


def _with_minima(x: np.ndarray, weight: np.ndarray, top: int, half: Half) -> np.ndarray:
    n = len(x)
    grouped, weights = x.reshape(n, 8, 32), weight.reshape(n, 8, 32)
    scale, low = affine_scale(grouped.reshape(-1, 32), weights.reshape(-1, 32), top, below=True)
    scale, depth = scale.reshape(n, 8), -low.reshape(n, 8)
    steps, step = _whole(scale, 63, half)
    # A step below float16's smallest number leaves all codes 0: 0 is nearer to such numbers than their minimum.
    lost = (step == 0) & (scale.max(1, keepdims=True) > 0)
    minima, drop = _whole(np.where(lost, np.float32(0), depth), 63, half)
    codes = _codes(grouped, steps, minima, step, drop, top)
    step, drop = _fitted(grouped, weights, codes * steps[..., None], np.float32(1) * minima, step, drop, half)
    codes = _codes(grouped, steps, minima, step, drop, top).astype(np.uint8)
    packed = np.concatenate((_bytes(step), _bytes(drop), _six_bits(steps, minima)), axis=1)
    if top == 31:
        high = (codes >> 4 << np.arange(8, dtype=np.uint8)[:, None]).sum(1, dtype=np.uint8)
        packed = np.concatenate((packed, high), axis=1)
    pairs = (codes & 15).reshape(n, 4, 2, 32)
    return np.concatenate((packed, (pairs[:, :, 0] | pairs[:, :, 1] << 4).reshape(n, 128)), axis=1)


def _whole(values: np.ndarray, most: int, half: Half) -> tuple[np.ndarray, np.ndarray]:
    """Round nonnegative numbers of a block to whole ones from 0 to ``most`` with a factor ``[n, 1]`` in float16."""
    factor = half(values.max(1, keepdims=True) / np.float32(most)).astype(np.float32)
    return np.rint(values * inverse(factor)).clip(0, most), factor


def _codes(
    x: np.ndarray, steps: np.ndarray, minima: np.ndarray, step: np.ndarray, drop: np.ndarray, top: int
) -> np.ndarray:
    scaled = (x + (drop * minima)[..., None]) * inverse(step * steps)[..., None]
    return np.rint(scaled).clip(0, top)


def _fitted(
    x: np.ndarray,
    weight: np.ndarray,
    up: np.ndarray,
    minima: np.ndarray,
    step: np.ndarray,
    drop: np.ndarray,
    half: Half,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the two factors of a block, ``[n, 1]``, that bring ``step * up - drop * minima`` nearest to x; the given
    ones if the fit is worse after rounding, or has another sign."""
    down = np.broadcast_to(minima[..., None], x.shape)

    def total(values: np.ndarray) -> np.ndarray:
        return (weight * values).sum((1, 2), dtype=np.float64)[:, None]

    uu, dd, ud, ux, dx = total(up * up), total(down * down), total(up * down), total(up * x), total(down * x)
    bend = uu * dd - ud * ud
    with np.errstate(divide="ignore", invalid="ignore"):
        a = np.where(bend > 0, (dd * ux - ud * dx) / bend, ux / uu)
        b = np.where(bend > 0, (ud * ux - uu * dx) / bend, 0)
    fits = np.isfinite(a) & np.isfinite(b) & (a > 0) & (b >= 0) & (a < 65000) & (b < 65000)
    a, b = np.where(fits, a, step).astype(np.float32), np.where(fits, b, drop).astype(np.float32)
    a, b = half(a).astype(np.float32), half(b).astype(np.float32)

    def error(step: np.ndarray, drop: np.ndarray) -> np.ndarray:
        return total(np.square(step[..., None] * up - drop[..., None] * down - x))

    better = error(a, b) < error(step, drop)
    return np.where(better, a, step), np.where(better, b, drop)


def _six_bits(steps: np.ndarray, minima: np.ndarray) -> np.ndarray:
    """Pack eight scales and eight minima below 64 into 12 bytes; ``ggml_blocks`` documents the bits."""
    s, m = steps.astype(np.uint8), minima.astype(np.uint8)
    first = s[:, :4] | s[:, 4:] >> 4 << 6
    second = m[:, :4] | m[:, 4:] >> 4 << 6
    third = (s[:, 4:] & 15) | (m[:, 4:] & 15) << 4
    return np.concatenate((first, second, third), axis=1)


def _q6_k(x: np.ndarray, weight: np.ndarray, half: Half) -> np.ndarray:
    n = len(x)
    grouped, weights = x.reshape(n, 16, 16), weight.reshape(n, 16, 16)
    scale = symmetric_scale(grouped.reshape(-1, 16), weights.reshape(-1, 16), 32).reshape(n, 16)
    peak = np.take_along_axis(scale, np.abs(scale).argmax(1)[:, None], axis=1)
    step = half(peak / np.float32(-128)).astype(np.float32)
    steps = np.rint(scale * inverse(step)).clip(-128, 127)
    codes = np.rint(grouped * inverse(step * steps)[..., None]).clip(-32, 31)
    up = codes * steps[..., None]
    squares = (weights * up * up).sum((1, 2), dtype=np.float64)[:, None]
    along = (weights * up * grouped).sum((1, 2), dtype=np.float64)[:, None]
    with np.errstate(divide="ignore", invalid="ignore"):
        fitted = np.where(squares > 0, along / squares, step).astype(np.float32)
    step = half(fitted).astype(np.float32)
    codes = np.rint(grouped * inverse(step * steps)[..., None]).clip(-32, 31)
    whole = (codes + 32).astype(np.uint8).reshape(n, 2, 4, 32)
    low, high = whole & 15, whole >> 4
    nibbles = low[:, :, :2] | low[:, :, 2:] << 4
    pairs = (high << np.arange(0, 8, 2, dtype=np.uint8)[:, None]).sum(2, dtype=np.uint8)
    signed = steps.astype(np.int8).view(np.uint8)
    return np.concatenate((nibbles.reshape(n, 128), pairs.reshape(n, 64), signed, _bytes(step)), axis=1)


def _bytes(value: np.ndarray) -> np.ndarray:
    """Convert [n, 1] numbers in float16's range to [n, 2] uint8."""
    return np.ascontiguousarray(value.astype("<f2")).view(np.uint8)


_PACK: Mapping[str, Callable[[np.ndarray, np.ndarray, Half], np.ndarray]] = {
    "Q4_K": lambda x, weight, half: _with_minima(x, weight, 15, half),
    "Q5_K": lambda x, weight, half: _with_minima(x, weight, 31, half),
    "Q6_K": _q6_k,
}
K_TYPES = tuple(_PACK)
