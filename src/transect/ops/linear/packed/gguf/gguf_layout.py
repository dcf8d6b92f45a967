r"""Weights in the block types of GGUF files in a GPU's memory: the file's bits, in the order that kernels read.

A block of a file has an odd number of bytes and keeps the bits of a number apart in ways of its own. Here the same bits
stand in *units* of 16 rows by 256 columns, each in one piece: one or two planes of codes, then scales. The types differ
in the planes' widths and in their scales alone (``BlockUnits``), so one kernel serves them all:

    value = scale (code - offset)        or        value = scale code + minimum

A lane of a warp holds the same places of every unit, those that it gives to a tensor-core product: of lane 4 g + c the
rows g and g + 8 (h = 0, 1), and of each 32 columns (j = 0 to 7) 16 q + 8 t + 2 c + o, with q, t and o = 0, 1. What it
reads at once lies together, with s = 2 q + t:

====== ================================================================================================================
4 bits ``[j / 2][lane][j % 2][h]``, a word of eight codes: pair s (o = 0 and 1) in bits 4 s and 16 + 4 s
2 bits ``[j / 4][lane][j % 4]``, a word of sixteen: pair p = 4 h + s in bits 2 p and 16 + 2 p
1 bit  ``[lane][j / 2]``, a word of thirty-two: pair p = 8 (j % 2) + 4 h + s in bits p and 16 + p
8 bits ``[j][lane][h][q]``, a word of four: (t, o) in the order 00, 10, 01, 11
scales ``[j][g][group of the 32 columns][scale, minimum][h]``, float16 (of MXFP4 bfloat16), or a byte each; behind bytes
       ``[g][scale, minimum][h]`` float16, which they are multiplied by
====== ================================================================================================================

Columns are filled up to whole units with numbers whose scale is 0, rows with zeros. The scales of Q2_K, of 4 bits in
the file, take 8 here, and those of Q3_K, Q4_K and Q5_K, of 6 bits, too; nothing else takes more than in the file.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .....spec.numbers.gguf import BLOCK_TYPES, UNIT_COLUMNS, UNIT_ROWS, UNITS, BlockUnits

ROWS, COLUMNS = UNIT_ROWS, UNIT_COLUMNS
"""The size of a unit."""
PIECE = 1 << 24
"""Numbers that are arranged at a time."""


def units_of(outputs: int, inputs: int) -> tuple[int, int]:
    """Return the number of units down and across."""
    return -(-outputs // ROWS), -(-inputs // COLUMNS)


def arranged_shape(kind: BlockUnits, outputs: int, inputs: int) -> tuple[int, int, int]:
    """Return the shape of the bytes of a matrix: units down, units across, bytes of one."""
    return *units_of(outputs, inputs), kind.unit


def arrange(name: str, blocks: Tensor, inputs: int) -> Tensor:
    """Arrange rows of blocks as in a file, uint8 ``[O, bytes of a row]``, on any device -> uint8 ``arranged_shape``.

    Raises:
        ValueError: a type that is not among ``UNITS``.
    """
    if name not in UNITS:
        raise ValueError(f"{name} is held as dense numbers on a GPU; held in blocks are {', '.join(UNITS)}")
    kind = UNITS[name]
    down, across, unit = arranged_shape(kind, len(blocks), inputs)
    out = torch.empty(down, across, unit, dtype=torch.uint8, device=blocks.device)
    step = max(1, PIECE // (ROWS * across * COLUMNS))
    for first in range(0, down, step):
        own = blocks[first * ROWS : (first + step) * ROWS]
        codes, scales, behind = _unpacked(kind, own.reshape(len(own), -1, BLOCK_TYPES[name].nbytes))
        missing = (-len(own) % ROWS, across * COLUMNS - inputs)
        out[first : first + step] = _arranged(
            kind,
            F.pad(codes, (0, missing[1], 0, missing[0])),
            F.pad(scales, (0, 0, 0, missing[1] // kind.group, 0, missing[0])),
            None if behind is None else F.pad(behind, (0, 0, 0, missing[1] // COLUMNS, 0, missing[0])),
        )
    return out


def _unpacked(kind: BlockUnits, x: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
    """Unpack blocks ``[M, b, bytes]`` -> codes uint8 ``[M, K]``, scales ``[M, groups, 1 or 2]`` (bytes, or float16),
    and the factors of those bytes, float16 ``[M, b, 1 or 2]``. The layouts are those of ``formats/ggml_blocks.py``."""

    def halves(first: int, count: int = 1) -> Tensor:
        return x[..., first : first + 2 * count].contiguous().view(torch.float16)

    def nibbles(part: Tensor) -> Tensor:
        return torch.cat((part & 15, part >> 4), -1)

    def bits(part: Tensor, width: int) -> Tensor:
        """Split [..., n] bytes -> [..., 8 / width, n]: the lowest bits first."""
        shift = torch.arange(0, 8, width, dtype=torch.uint8, device=x.device)[:, None]
        return part[..., None, :] >> shift & (1 << width) - 1

    rows, behind = len(x), None
    match kind.name:
        case "Q4_0" | "IQ4_NL":
            codes, scales = nibbles(x[..., 2:]), halves(0)
        case "Q4_1":
            codes, scales = nibbles(x[..., 4:]), halves(0, 2)
        case "Q5_0" | "Q5_1":
            first = 2 if kind.name == "Q5_0" else 4
            high = bits(x[..., first : first + 4], 1).transpose(-1, -2).flatten(-2)
            codes, scales = nibbles(x[..., first + 4 :]) | high << 4, halves(0, first // 2)
        case "Q8_0":
            codes, scales = x[..., 2:] ^ 0x80, halves(0)
        case "MXFP4":  # bfloat16 has the exponent of float32: 2^(e - 128), below the normal range for e = 0 and 1
            scales = torch.exp2(x[..., :1].float() - 128).to(torch.bfloat16)
            codes = nibbles(x[..., 1:])
        case "Q2_K":
            codes = bits(x[..., 16:80].unflatten(-1, (2, 32)), 2)
            scales, behind = torch.stack((x[..., :16] & 15, x[..., :16] >> 4), -1), halves(80, 2)
        case "Q3_K":
            high = bits(x[..., :32], 1).unflatten(-2, (2, 4))
            codes = bits(x[..., 32:96].unflatten(-1, (2, 32)), 2) | high << 2
            scales = nibbles(x[..., 96:104]) | bits(x[..., 104:108], 2).flatten(-2) << 4
            behind = halves(108)
        case "Q4_K" | "Q5_K":
            low, high, mixed = x[..., 4:8], x[..., 8:12], x[..., 12:16]
            scale = torch.cat((low & 63, (mixed & 15) | low >> 6 << 4), -1)
            minimum = torch.cat((high & 63, mixed >> 4 | high >> 6 << 4), -1)
            scales, behind = torch.stack((scale, minimum), -1), halves(0, 2)
            codes = bits(x[..., -128:].unflatten(-1, (4, 32)), 4)
            if kind.name == "Q5_K":
                codes = codes | bits(x[..., 16:48], 1).unflatten(-2, (4, 2)) << 4
        case _:
            low = x[..., :128].unflatten(-1, (2, 64))
            codes = nibbles(low).unflatten(-1, (4, 32)) | bits(x[..., 128:192].unflatten(-1, (2, 32)), 2) << 4
            scales, behind = x[..., 192:208] ^ 0x80, halves(208)
    return codes.reshape(rows, -1), scales.reshape(rows, -1, 1 + kind.minimum), behind


def _arranged(kind: BlockUnits, codes: Tensor, scales: Tensor, behind: Tensor | None) -> Tensor:
    """Arrange codes ``[M, K]``, scales ``[M, groups, 1 or 2]`` and their factors, of whole units, into units."""
    down, across = units_of(*codes.shape)
    # [down, h, g, across, j, q, t, c, o] -> [down, across, j, g, c, h, s, o]
    places = codes.view(down, 2, 8, across, 8, 2, 2, 4, 2).permute(0, 3, 4, 2, 7, 1, 5, 6, 8)
    places = places.reshape(down, across, 8, 32, 2, 4, 2)
    parts, below = [], 0
    for width in kind.planes:
        part = places >> below & (1 << width) - 1
        parts.append(_plane(part, width))
        below += width
    # [down, h, g, across, j, group, v] -> [down, across, j, g, group, v, h]
    each = scales.view(down, 2, 8, across, 8, 32 // kind.group, -1).permute(0, 3, 4, 2, 5, 6, 1)
    parts.append(_as_bytes(each, down, across))
    if behind is not None:
        parts.append(_as_bytes(behind.view(down, 2, 8, across, -1).permute(0, 3, 2, 4, 1), down, across))
    return torch.cat(parts, -1)


def _as_bytes(numbers: Tensor, down: int, across: int) -> Tensor:
    return numbers.contiguous().view(torch.uint8).view(down, across, -1)


def _plane(part: Tensor, width: int) -> Tensor:
    """Pack ``[down, across, j, lane, h, s, o]`` of ``width`` bits each -> bytes ``[down, across, ...]``."""
    down, across = part.shape[:2]
    if width == 8:  # [.., j, lane, h, q, t, o] -> o before t: bytes 0, 2, 1, 3
        return part.unflatten(-2, (2, 2)).transpose(-1, -2).reshape(down, across, -1)
    # Bits of a word, from the lowest: [o] of 16 bits, and in these the pairs.
    if width == 4:  # a word of (j, h): pairs s
        words = part.unflatten(2, (4, 2)).permute(0, 1, 2, 4, 3, 5, 7, 6)  # [.., lane, j % 2, h, o, s]
    elif width == 2:  # a word of j: pairs (h, s)
        words = part.unflatten(2, (2, 4)).permute(0, 1, 2, 4, 3, 7, 5, 6).flatten(-2)  # [.., lane, j % 4, o, (h s)]
    else:  # a word of j / 2: pairs (j % 2, h, s)
        words = part.unflatten(2, (4, 2)).permute(0, 1, 4, 2, 7, 3, 5, 6).flatten(-3)  # [.., lane, j / 2, o, (j h s)]
    words = words.flatten(-2).reshape(down, across, -1, 8 // width)  # numbers of a byte
    shift = torch.arange(0, 8, width, dtype=torch.uint8, device=part.device)
    return (words << shift).sum(-1, dtype=torch.uint8)


def dense(arranged: Tensor, kind: BlockUnits, outputs: int, inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values ``[O, I]`` of arranged bytes, bit-identical to the file's values in float32."""
    down, across, _ = arranged.shape
    codes = torch.zeros((), dtype=torch.uint8, device=arranged.device)
    first = below = 0
    for width in kind.planes:
        last = first + width * ROWS * COLUMNS // 8
        codes = codes | _places(arranged[..., first:last], width) << below
        first, below = last, below + width
    last = first + kind.scale_bytes
    values = 1 + kind.minimum
    raw = arranged[..., first:last].contiguous()
    wide = raw if kind.byte_scales is not None else raw.view(getattr(torch, kind.scale_dtype))
    # [down, across, j, g, group, v, h] -> [down, h, g, across, j, group, v]
    each = wide.view(down, across, 8, 8, 32 // kind.group, values, 2).permute(0, 6, 3, 1, 2, 4, 5).float()
    if kind.byte_scales is not None:
        behind = arranged[..., last:].contiguous().view(torch.float16).view(down, across, 8, values, 2)
        each = (each - kind.byte_scales) * behind.permute(0, 4, 2, 1, 3).float()[:, :, :, :, None, None]
    if kind.listed is not None:
        codes = torch.tensor(kind.listed, device=arranged.device)[codes.long()]
        whole = codes.float()
    else:
        whole = codes.float() - kind.offset
    # [down, across, j, g, c, h, q, t, o] -> [down, h, g, across, j, q, (t, c, o)]
    whole = whole.view(down, across, 8, 8, 4, 2, 2, 2, 2).permute(0, 5, 3, 1, 2, 6, 7, 4, 8).flatten(-3)
    whole = whole.reshape(*whole.shape[:5], 32 // kind.group, kind.group)
    found = whole * each[..., :1]
    if kind.minimum:
        below_0 = each[..., 1:] if kind.byte_scales is None else -each[..., 1:]
        found = found + below_0
    return found.reshape(down * ROWS, across * COLUMNS)[:outputs, :inputs].to(dtype)


def _places(plane: Tensor, width: int) -> Tensor:
    """Return the reverse of ``_plane``: ``[down, across, j, lane, h, s, o]``."""
    down, across = plane.shape[:2]
    if width == 8:
        return plane.reshape(down, across, 8, 32, 2, 2, 2, 2).transpose(-1, -2).flatten(-3, -2)
    shift = torch.arange(0, 8, width, dtype=torch.uint8, device=plane.device)
    words = plane[..., None] >> shift & (1 << width) - 1
    if width == 4:
        words = words.reshape(down, across, 4, 32, 2, 2, 2, 4).permute(0, 1, 2, 4, 3, 5, 7, 6)
    elif width == 2:
        words = words.reshape(down, across, 2, 32, 4, 2, 2, 4).permute(0, 1, 2, 4, 3, 6, 7, 5)
    else:
        words = words.reshape(down, across, 32, 4, 2, 2, 2, 4).permute(0, 1, 3, 5, 2, 6, 7, 4)
    return words.flatten(2, 3)
