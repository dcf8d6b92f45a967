"""Readers of the block types of GGUF files with NumPy: the positions of bits in their bytes.

``spec/numbers/gguf.py`` has the sizes of blocks. All numbers are little-endian. Two families:

* symmetric: ``value = scale * (code - offset)``: Q8_0 (offset 128 once the signed byte is made a code), Q4_0 (8),
  Q5_0 (16), Q3_K and Q6_K (4 and 32; one signed scale for 16 columns, of 6 or 8 bits, times one float16 for the block);
  IQ4_NL and MXFP4 have 4 bits that choose one of 16 whole numbers, which are made codes of 8 bits here (offset 128);
  MXFP4's scale is a power of two, kept as its exponent;
* with a minimum: ``value = scale * code + minimum``: Q4_1, Q5_1, and Q2_K, Q4_K and Q5_K, whose scales and minima of a
  block are 4- or 6-bit integers times two float16 numbers.

Source of the layouts: ``ggml-common.h`` and ``ggml-quants.c`` of ggml; the tests compare with the ``gguf`` package.

Shapes in this file: M rows, b blocks in a row, ``block`` columns in a block, g groups in a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..spec.numbers.gguf import BLOCK_TYPES, BlockType, block_type
from .affine import AffineGroups

Unpacked = tuple[np.ndarray, np.ndarray, np.ndarray | None]
"""codes uint8 [M, b, block], scale float32 [M, b, g], minimum float32 [M, b, g] (None if symmetric)."""

_CHUNK = 1 << 17
"""Values dequantized at a time, so that the passes over them stay in the L2 cache."""


def _half(x: np.ndarray, at: int) -> np.ndarray:
    """Return the float16 at byte ``at`` of each block, as float32 [M, b, 1]."""
    return np.ascontiguousarray(x[..., at : at + 2]).view("<f2").astype(np.float32)


def _nibbles(x: np.ndarray) -> np.ndarray:
    """Unpack [..., n] bytes to [..., 2n] codes: all low halves first, then all high halves."""
    return np.concatenate((x & 15, x >> 4), axis=-1)


def _fifth_bits(x: np.ndarray) -> np.ndarray:
    """Unpack four bytes, bit j for value j, to [..., 32] values of 0 or 16."""
    return np.unpackbits(x, axis=-1, bitorder="little") << 4


def _q8_0(x: np.ndarray) -> Unpacked:
    return x[..., 2:] ^ 0x80, _half(x, 0), None


def _q4_0(x: np.ndarray) -> Unpacked:
    return _nibbles(x[..., 2:]), _half(x, 0), None


def _q4_1(x: np.ndarray) -> Unpacked:
    return _nibbles(x[..., 4:]), _half(x, 0), _half(x, 2)


def _q5_0(x: np.ndarray) -> Unpacked:
    return _nibbles(x[..., 6:]) | _fifth_bits(x[..., 2:6]), _half(x, 0), None


def _q5_1(x: np.ndarray) -> Unpacked:
    return _nibbles(x[..., 8:]) | _fifth_bits(x[..., 4:8]), _half(x, 0), _half(x, 2)


def _k_steps(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale and minimum [M, b, 8] of a Q4_K or Q5_K block as whole numbers, uint8.

    Bytes 0 and 2: float16 factors. Then 12 bytes hold 8 scales and 8 minima of 6 bits: those of the first four groups
    are the low 6 bits of bytes 0-3 and 4-7; those of the last four have their low 4 bits in bytes 8-11 (scale below,
    minimum above) and their upper 2 bits in the top of bytes 0-3 and 4-7.
    """
    first, second, third = x[..., 4:8], x[..., 8:12], x[..., 12:16]
    scale = np.concatenate((first & 63, (third & 15) | (first >> 6 << 4)), axis=-1)
    minimum = np.concatenate((second & 63, (third >> 4) | (second >> 6 << 4)), axis=-1)
    return scale, minimum


def _k_scales(x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Scale and minimum [M, b, 8] of a Q4_K or Q5_K block."""
    scale, minimum = _k_steps(x)
    return _half(x, 0) * scale, -(_half(x, 2) * minimum)


def _k_nibbles(x: np.ndarray) -> np.ndarray:
    """Unpack 128 bytes to [..., 8, 32] codes: 32 bytes hold one group in their low halves, the next in their high
    ones."""
    runs = x.reshape(*x.shape[:-1], 4, 32)
    return np.stack((runs & 15, runs >> 4), axis=-2).reshape(*x.shape[:-1], 8, 32)


def _q4_k(x: np.ndarray) -> Unpacked:
    codes = _k_nibbles(x[..., 16:144])
    return codes.reshape(*x.shape[:-1], 256), *_k_scales(x)


def _q5_k(x: np.ndarray) -> Unpacked:
    group_bit = np.arange(8, dtype=np.uint8)[:, None]
    high = (x[..., None, 16:48] >> group_bit & 1) << 4
    codes = _k_nibbles(x[..., 48:176]) | high
    return codes.reshape(*x.shape[:-1], 256), *_k_scales(x)


def _q6_k(x: np.ndarray) -> Unpacked:
    """Unpack Q6_K: 128 bytes of low 4 bits, 64 of upper 2 bits, 16 signed scales, a float16.

    Each half block (64 + 32 bytes) is four runs of 32 values: the low halves of its first 32 bytes, those of its second
    32, then their high halves.
    """
    low = x[..., :128].reshape(*x.shape[:-1], 2, 64)
    shift = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    high = (x[..., 128:192].reshape(*x.shape[:-1], 2, 1, 32) >> shift & 3) << 4
    codes = _nibbles(low).reshape(*x.shape[:-1], 2, 4, 32) | high
    scale = _half(x, 208) * np.ascontiguousarray(x[..., 192:208]).view(np.int8)
    return codes.reshape(*x.shape[:-1], 256), scale, None


def _q2_k(x: np.ndarray) -> Unpacked:
    """Unpack Q2_K: 16 bytes of a scale (low half) and a minimum (high half), 64 of 2-bit codes, two float16.

    Of each half of the codes' bytes the lowest 2 bits are 32 neighbouring codes, the next 2 the next 32, and so on.
    """
    scale, minimum = _half(x, 80) * (x[..., :16] & 15), -(_half(x, 82) * (x[..., :16] >> 4))
    return _two_bits(x[..., 16:80]).reshape(*x.shape[:-1], 256), scale, minimum


def _two_bits(x: np.ndarray) -> np.ndarray:
    """Unpack 64 bytes to [..., 2, 4, 32] codes of 2 bits."""
    shift = np.arange(0, 8, 2, dtype=np.uint8)[:, None]
    found: np.ndarray = x.reshape(*x.shape[:-1], 2, 1, 32) >> shift & 3
    return found


def _q3_k(x: np.ndarray) -> Unpacked:
    """Unpack Q3_K: 32 bytes of upper bits (bit n of a byte for the n-th 32 codes), 64 of 2-bit codes, 12 of scales, a
    float16.

    The 16 scales of 6 bits have their low 4 bits in bytes 0-7, low halves first, their upper 2 in bytes 8-11.
    """
    part = np.arange(8, dtype=np.uint8).reshape(2, 4, 1)
    high = (x[..., None, None, :32] >> part & 1) << 2
    codes = _two_bits(x[..., 32:96]) | high
    upper = x[..., None, 104:108] >> np.arange(0, 8, 2, dtype=np.uint8)[:, None] & 3
    scale = (_nibbles(x[..., 96:104]) | upper.reshape(*x.shape[:-1], 16) << 4).astype(np.int8) - np.int8(32)
    return codes.reshape(*x.shape[:-1], 256), _half(x, 108) * scale, None


def _listed(x: np.ndarray, name: str) -> np.ndarray:
    return (np.array(BLOCK_TYPES[name].listed) + 128).astype(np.uint8)[_nibbles(x)]


def _iq4_nl(x: np.ndarray) -> Unpacked:
    return _listed(x[..., 2:], "IQ4_NL"), _half(x, 0), None


def _mxfp4(x: np.ndarray) -> Unpacked:
    return _listed(x[..., 1:], "MXFP4"), np.exp2(x[..., :1].astype(np.float32) - 128), None


_PLAIN: dict[str, np.dtype[Any]] = {"F32": np.dtype("<f4"), "F16": np.dtype("<f2"), "BF16": np.dtype("<u2")}
_EXPONENTS = {"F32": ("<u4", 0x7F800000), "F16": ("<u2", 0x7C00), "BF16": ("<u2", 0x7F80)}
"""An integer type of the same width, and the bits of the exponent, which are all ones in infinities and NaN."""

_UNPACK: Mapping[str, Callable[[np.ndarray], Unpacked]] = {
    "Q8_0": _q8_0, "Q4_0": _q4_0, "Q4_1": _q4_1, "Q5_0": _q5_0, "Q5_1": _q5_1, "Q2_K": _q2_k, "Q3_K": _q3_k,
    "Q4_K": _q4_k, "Q5_K": _q5_k, "Q6_K": _q6_k, "IQ4_NL": _iq4_nl, "MXFP4": _mxfp4,
}  # fmt: skip
"""Readers of blocks uint8 [M, b, nbytes]."""


def _signed_steps(x: np.ndarray) -> np.ndarray:
    """Return the 16 scales of 8 bits [M, b, 16, 1] of a Q6_K block."""
    return x[..., 192:208, None]


def _paired_steps(x: np.ndarray) -> np.ndarray:
    """Return scales and minima of 6 bits [M, b, 8, 2] of a Q4_K or Q5_K block."""
    return np.stack(_k_steps(x), axis=-1)


_STEPS: Mapping[str, Callable[[np.ndarray], np.ndarray]] = {
    "Q4_K": _paired_steps,
    "Q5_K": _paired_steps,
    "Q6_K": _signed_steps,
}
"""Readers of the whole numbers that a block's float16 numbers are multiplied by, as bytes."""


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A tensor in the packing of a GGUF file.

    Attributes:
        type_name: one of ``BLOCK_TYPES``; the plain types F32, F16 and BF16 are among them.
        shape: row-major, as torch has it (GGUF files list the dimensions the other way round); (N, K) for a matrix.
        blocks: uint8 [product of all but the last dimension, bytes of a row]; may be a read-only view of a mapped file.

    Raises:
        ValueError: unknown type, or blocks that do not fit the shape.
    """

    type_name: str
    shape: tuple[int, ...]
    blocks: np.ndarray

    def __post_init__(self) -> None:
        if not self.shape:
            raise ValueError("a packed tensor has at least one dimension")
        expected = (math.prod(self.shape[:-1]), block_type(self.type_name).row_bytes(self.shape[-1]))
        if self.blocks.shape != expected or self.blocks.dtype != np.uint8:
            raise ValueError(
                f"{self.type_name} tensor of shape {list(self.shape)} needs uint8 blocks {list(expected)}, "
                f"got {self.blocks.dtype} {list(self.blocks.shape)}"
            )

    @property
    def block_type(self) -> BlockType:
        return BLOCK_TYPES[self.type_name]

    @property
    def is_packed(self) -> bool:
        """False for the plain types F32, F16 and BF16."""
        return self.block_type.packed

    @property
    def nbytes(self) -> int:
        """Bytes of the packed data."""
        return self.blocks.nbytes

    def rows(self, index: slice | np.ndarray) -> QuantizedTensor:
        """Select some rows of a matrix, in the order given, still packed; a slice makes a view, an integer array a
        copy.

        Raises:
            ValueError: the tensor is not a matrix.
        """
        if len(self.shape) != 2:
            raise ValueError(f"rows() needs a matrix, this tensor has shape {list(self.shape)}")
        blocks = self.blocks[index]
        return QuantizedTensor(self.type_name, (blocks.shape[0], self.shape[1]), blocks)

    def dequantize(self) -> np.ndarray:
        """Return the values as a new float32 array of this tensor's shape, with the same bits as ggml's reference
        code."""
        out = np.empty(self.shape, np.float32)
        rows = out.reshape(self.blocks.shape[0], self.shape[-1])
        step = max(1, _CHUNK // max(1, self.shape[-1]))
        for start in range(0, len(rows), step):
            self._dequantize_into(self.blocks[start : start + step], rows[start : start + step])
        return out

    def _dequantize_into(self, packed: np.ndarray, out: np.ndarray) -> None:
        kind = self.block_type
        if not kind.packed:
            plain = np.ascontiguousarray(packed).view(_PLAIN[kind.name])
            if kind.name == "BF16":  # the upper half of a float32
                np.left_shift(plain, 16, out=out.view(np.uint32), dtype=np.uint32)
            else:
                out[...] = plain
            return
        codes, scale, minimum = _UNPACK[kind.name](packed.reshape(len(packed), -1, kind.nbytes))
        out[...] = codes.reshape(out.shape)
        if kind.offset:
            out -= np.float32(kind.offset)
        groups = out.reshape(*scale.shape, kind.group)
        with np.errstate(invalid="ignore", over="ignore"):  # for the infinite scales of a corrupt file
            groups *= scale[..., None]
            if minimum is not None:
                groups += minimum[..., None]

    def affine(self) -> AffineGroups:
        """Return a packed matrix as codes, scales and zeros: see ``AffineGroups`` for shapes and exactness.

        Raises:
            ValueError: a plain type, or not a matrix.
        """
        kind = self.block_type
        if not kind.packed or len(self.shape) != 2:
            raise ValueError(f"only a packed matrix has affine groups, not {kind.name} of shape {list(self.shape)}")
        n, k = self.shape
        codes = np.empty((n, k), np.uint8)
        scale = np.empty((n, k // kind.group), np.float32)
        zero = np.empty_like(scale)
        step = max(1, _CHUNK // k)
        for start in range(0, n, step):
            part = slice(start, start + step)
            packed = self.blocks[part]
            c, s, m = _UNPACK[kind.name](packed.reshape(len(packed), -1, kind.nbytes))
            codes[part] = c.reshape(len(packed), k)
            scale[part] = s.reshape(len(packed), -1)
            zero[part] = scale[part] * np.float32(-kind.offset) if m is None else m.reshape(len(packed), -1)
        return AffineGroups(
            codes, scale, zero, kind.group, kind.bits, half_exact=kind.block == 32 and bool(kind.halves)
        )

    def parts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
        """Return a packed matrix in the numbers that a block stores, b blocks a row, g groups a block: codes uint8 [N,
        K], the bytes of its float16 numbers uint8 [N, b, 2 or 4], and the whole numbers that these are multiplied by,
        bytes [N, b, g, 1 or 2] (None where there are none).

        Raises:
            ValueError: a plain type, or not a matrix.
        """
        kind = self.block_type
        if not kind.packed or len(self.shape) != 2:
            raise ValueError(f"only a packed matrix has parts, not {kind.name} of shape {list(self.shape)}")
        n, k = self.shape
        blocks = self.blocks.reshape(n, -1, kind.nbytes)
        codes = np.empty((n, k), np.uint8)
        step = max(1, _CHUNK // k)
        for start in range(0, n, step):
            codes[start : start + step] = _UNPACK[kind.name](blocks[start : start + step])[0].reshape(-1, k)
        halves = np.concatenate([blocks[..., at : at + 2] for at in kind.halves], axis=-1)
        steps = _STEPS.get(kind.name)
        return codes, halves, None if steps is None else np.ascontiguousarray(steps(blocks))

    def has_nonfinite_scale(self) -> bool:
        """Return True if a float16 of a block (or, in a plain type, a value) is infinite or NaN: the file is
        corrupt."""
        kind = self.block_type
        if not kind.packed:
            width, exponent = _EXPONENTS[kind.name]
            bits = np.ascontiguousarray(self.blocks).view(width)
            return bool((bits & exponent == exponent).any())
        blocks = self.blocks.reshape(-1, kind.nbytes)
        if not kind.halves:  # the exponent of a power of two, whose products are beyond float32 from 2^120 on
            return bool((blocks[:, 0] >= 248).any())
        # the exponent of a float16 is bits 2 to 6 of its second byte; all ones means infinite or NaN
        return any(bool((blocks[:, at + 1] & 0x7C == 0x7C).any()) for at in kind.halves)
