"""Layouts of quantized matrices in safetensors files of other programs: functions from tensors to values and back.

A matrix is ``[O, I]``: outputs, inputs. Values are float32. Groups are neighbouring inputs that share a scale.

* fp8: e4m3 codes and a scale for the tensor, for each row, or for each block of rows and columns (DeepSeek)
* GPTQ (Frantar et al. 2022, arXiv:2210.17323): 8 codes of 4 bits in an int32, down the inputs; with act-order
  ``g_idx`` says which group an input is in
* AWQ (Lin et al. 2023, arXiv:2306.00978): 8 codes in an int32 along the outputs, in an order of their own
* compressed-tensors "pack-quantized": codes of 4 or 8 bits plus 8 or 128, along the inputs
* codebooks of ``spec/numbers``: packed codes and a scale for each group
* MXFP4 (OCP Microscaling Formats 1.0): e2m1 codes in blocks of 32 with a power of two for each
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..spec.numbers.fp8 import FP8
from ..spec.numbers.int8 import INT8
from ..spec.numbers.number_format import Codebook

PER_WORD = 8
"""Codes of 4 bits in an int32."""
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Position in a word of each of its eight outputs."""
AWQ_PLACES = tuple(AWQ_ORDER.index(place) for place in range(PER_WORD))
"""Output at each position of a word."""
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
MX_BLOCK = 32


def words_to_codes(words: Tensor, bits: int = 4) -> Tensor:
    """Unpack words, int32 ``[..., n]``, into codes of 4 or 8 bits, int32 ``[..., 32 n / bits]``, the lowest bits
    first."""
    shifts = bits * torch.arange(32 // bits, dtype=torch.int32, device=words.device)
    return ((words.to(torch.int32)[..., None] >> shifts) & (2**bits - 1)).flatten(-2)


def codes_to_words(codes: Tensor) -> Tensor:
    """Pack codes below 16 ``[..., 8 n]`` into int32 ``[..., n]``."""
    shifts = 4 * torch.arange(PER_WORD, dtype=torch.int64, device=codes.device)
    words = (codes.long().unflatten(-1, (-1, PER_WORD)) << shifts).sum(-1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def codes_to_awq(codes: Tensor) -> Tensor:
    """Pack codes below 16 ``[..., 8 n]`` into int32 ``[..., n]``, in AWQ's order."""
    return codes_to_words(codes.unflatten(-1, (-1, PER_WORD))[..., list(AWQ_PLACES)].flatten(-2))


def spread(scale: Tensor, rows: int, columns: int, block: tuple[int, int] | None = None) -> Tensor:
    """Expand a scale for the tensor, for each row, or for each block, so that it can be multiplied with ``[rows,
    columns]``. ``block``: rows and columns of a block; the last blocks may be smaller.

    Raises:
        ValueError: it has no such shape.
    """
    wide = scale.float()
    if wide.numel() == 1:
        return wide.reshape(1, 1)
    if wide.ndim == 1:
        wide = wide[:, None]
    if wide.ndim != 2 or 0 in wide.shape:
        raise ValueError(f"scales of shape {list(scale.shape)} do not fit a matrix [{rows}, {columns}]")
    each_row, each_column = -(-rows // wide.shape[0]), -(-columns // wide.shape[1])
    if block is not None and wide.shape != (rows, 1):
        each_row, each_column = block
    uneven = block is None and (rows % wide.shape[0] or columns % wide.shape[1])
    if uneven or -(-rows // each_row) != wide.shape[0] or -(-columns // each_column) != wide.shape[1]:
        raise ValueError(f"scales of shape {list(scale.shape)} do not fit a matrix [{rows}, {columns}]")
    return wide.repeat_interleave(each_row, 0)[:rows].repeat_interleave(each_column, 1)[:, :columns]


def gptq_values(qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor, *, zero_step: int = 1) -> Tensor:
    """Dequantize GPTQ: qweight ``[I / 8, O]``, qzeros ``[G, O / 8]`` int32, scales ``[G, O]``, g_idx ``[I]`` -> ``[O,
    I]``.

    ``zero_step``: what the first format of AutoGPTQ leaves out of its zeros."""
    codes = words_to_codes(qweight.T)  # [O, I]
    zeros = gptq_zeros(qzeros, zero_step)
    group = g_idx.long()
    return (codes - zeros[:, group]).float() * scales.float().T[:, group]


def gptq_zeros(qzeros: Tensor, zero_step: int = 1) -> Tensor:
    """Unpack qzeros ``[G, O / 8]`` int32 -> ``[O, G]``. The writer subtracted one from all zeros of a word at once, and
    the addition restores them: a zero of 0 had borrowed from its neighbour."""
    return words_to_codes(qzeros.to(torch.int32) + zero_step * 0x11111111).T


def awq_values(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Tensor:
    """Dequantize AWQ: qweight ``[I, O / 8]``, qzeros ``[G, O / 8]`` int32, scales ``[G, O]`` -> ``[O, I]``."""

    def in_order(words: Tensor) -> Tensor:
        return words_to_codes(words).unflatten(-1, (-1, PER_WORD))[..., list(AWQ_ORDER)].flatten(-2)

    group = torch.arange(len(qweight), device=qweight.device) // (len(qweight) // len(scales))
    return ((in_order(qweight) - in_order(qzeros)[group]).float() * scales.float()[group]).T


def packed_values(
    packed: Tensor, scale: Tensor, zero: Tensor | None, g_idx: Tensor | None, columns: int, bits: int = 4
) -> Tensor:
    """Dequantize compressed-tensors: packed ``[O, bits I / 32]`` int32 of codes plus 2^(bits - 1), scale ``[O, G]``,
    zero ``[O, G]`` whole numbers or ``[bits O / 32, G]`` packed -> ``[O, I]``."""
    middle = 2 ** (bits - 1)
    codes = words_to_codes(packed, bits)[:, :columns] - middle
    groups = scale.shape[1]
    group = torch.arange(columns) // -(-columns // groups) if g_idx is None else g_idx.long()
    if zero is not None:
        if zero.dtype == torch.int32 and len(zero) != len(scale):
            zero = words_to_codes(zero.T, bits).T[: len(scale)] - middle
        codes = codes - zero.to(torch.int32)[:, group]
    return codes.float() * scale.float()[:, group]


def mxfp4_values(blocks: Tensor, scales: Tensor) -> Tensor:
    """Dequantize MXFP4: blocks ``[..., G, 16]`` uint8, two codes a byte, the lower first; scales ``[..., G]`` uint8,
    exponents plus 127 -> ``[..., 32 G]``."""
    table = torch.tensor((*E2M1, *(-value for value in E2M1)), dtype=torch.float32, device=blocks.device)
    codes = torch.stack([blocks & 15, blocks >> 4], dim=-1).flatten(-2)
    return torch.ldexp(table[codes.long()], scales.int()[..., None] - 127).flatten(-2)


def to_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize ``[O, I]`` to e4m3 codes ``[O, I]`` and a float32 scale ``[O, 1]``: the largest number of a row becomes
    the largest code."""
    most = FP8.largest
    scale = (weight.float().abs().amax(1, keepdim=True) / most).clamp(min=1e-12)
    return (weight.float() / scale).clamp(-most, most).to(torch.float8_e4m3fn), scale


def to_int8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize ``[O, I]`` to int8 codes and a float32 scale ``[O, 1]``."""
    scale = (weight.float().abs().amax(1, keepdim=True) / INT8.largest).clamp(min=1e-12)
    return (weight.float() / scale).round().clamp(-INT8.largest, INT8.largest).to(torch.int8), scale


def code_shape(codebook: Codebook, outputs: int, inputs: int) -> tuple[int, int]:
    """Return the shape of packed codes, uint8."""
    return outputs, -(-inputs * codebook.code_bits // 8)


def scale_shape(codebook: Codebook, outputs: int, inputs: int) -> tuple[int, int]:
    """Return the shape of the scales."""
    return outputs, -(-inputs // codebook.group)


def to_listed(weight: Tensor, codebook: Codebook) -> tuple[Tensor, Tensor]:
    """Quantize ``[O, I]`` to codes uint8 ``code_shape`` and scales ``scale_shape``.

    Each group takes, of ``SIZES`` of scales, the one that leaves the smallest square error. Codes are taken with the
    scale as it is stored.
    """
    outputs, inputs = weight.shape
    values = torch.tensor(codebook.values, device=weight.device)
    spare = -inputs % codebook.group
    groups = torch.nn.functional.pad(weight.float(), (0, spare)).view(outputs, -1, codebook.group)
    largest = groups.abs().amax(2, keepdim=True) / values.abs().max()
    least = torch.full_like(largest, torch.inf)
    codes, scale = torch.zeros_like(groups, dtype=torch.uint8), torch.zeros_like(largest)
    for size in SIZES:
        tried = (size * largest).to(getattr(torch, codebook.scale_dtype)).float()
        near = torch.bucketize(groups / tried.clamp(min=1e-30), (values[:-1] + values[1:]) / 2)
        error = (values[near] * tried - groups).square().sum(2, keepdim=True)
        better = error < least
        least, scale = torch.where(better, error, least), torch.where(better, tried, scale)
        codes = torch.where(better, near.to(torch.uint8), codes)
    scale = scale[..., 0].to(getattr(torch, codebook.scale_dtype))
    return _code_bytes(codes.flatten(1)[:, :inputs], codebook.code_bits), scale


SIZES = (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4)
"""Candidate scales, as shares of the scale that maps a group's largest number to the largest value."""


def _code_bytes(codes: Tensor, bits: int) -> Tensor:
    """Pack codes uint8 ``[O, I]`` of 1, 2, 4 or 8 bits into bytes ``[O, bits I / 8]``, the first in the lowest bits."""
    per_byte = 8 // bits
    whole = torch.nn.functional.pad(codes, (0, -codes.shape[1] % per_byte)).unflatten(1, (-1, per_byte))
    shifts = bits * torch.arange(per_byte, dtype=torch.uint8, device=codes.device)
    return (whole << shifts).sum(-1, dtype=torch.uint8)


def byte_values(codebook: Codebook, device: torch.device | str = "cpu") -> Tensor:
    """Return the values of the codes in each byte, float32 ``[256, codes of a byte]``; 0 for codes that the codebook
    lacks."""
    spare = 2**codebook.code_bits - len(codebook.values)
    values = torch.tensor((*codebook.values, *[0.0] * spare), device=device)
    every = torch.arange(256, dtype=torch.uint8, device=device)[:, None]
    return values[code_numbers(every, codebook.code_bits)]


def code_numbers(codes: Tensor, bits: int) -> Tensor:
    """Unpack bytes ``[O, n]`` of ``to_listed`` into codes, int32 ``[O, 8 n / bits]``."""
    shifts = bits * torch.arange(8 // bits, dtype=torch.uint8, device=codes.device)
    return (codes[..., None] >> shifts & 2**bits - 1).flatten(1).int()


def listed_values(codes: Tensor, scale: Tensor, table: Tensor, group: int, inputs: int) -> Tensor:
    """Dequantize codes and scales of ``to_listed`` with ``byte_values`` -> ``[O, I]`` float32."""
    values = torch.nn.functional.embedding(codes.int(), table).flatten(1)
    if inputs % group:
        return values[:, :inputs] * scale.float().repeat_interleave(group, 1)[:, :inputs]
    return values.unflatten(1, (-1, group)).mul_(scale.float()[..., None]).flatten(1)
