r"""4-bit codes in groups: the layout of such a weight in memory.

    W[n, k] = scale[n, k // G] * code[n, k] + zero[n, k // G]        code in 0..15, G = 32, 64 or 128

A weight has one of two orders, chosen for its use when it is packed:

* ``pack``, for training: codes uint8 ``[N, K / 2]``, scales and zeros beside them, in any dtype. Byte j of pair p of
  groups holds code 2 p G + j of its row in the low half and code (2 p + 1) G + j in the high half, so that unpacking
  moves nothing between threads. ``int4_dequantize`` reads it.
* ``arrange``, for inference: codes, scales and zeros in one tensor, in the order in which the tensor cores take them,
  for any number of rows. ``int4_matmul`` reads it.

Source: the formats of GPTQ (Frantar et al. 2022, arXiv:2210.17323) and AWQ (Lin et al. 2023, arXiv:2306.00978).
"""

from __future__ import annotations

from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from .....spec.numbers.int4 import GROUPS as GROUPS

CHUNK = 128
"""k in a tile of ``arrange``."""


def pack(codes: Tensor, group: int) -> Tensor:
    """Pack uint8 codes ``[N, K]`` in 0..15 -> ``[N, K / 2]``.

    Raises:
        ValueError: the group is not 32, 64 or 128, or K is not a multiple of two groups.
    """
    n, k = codes.shape
    if group not in GROUPS or k % (2 * group):
        raise ValueError(
            f"int4 groups: the group must be one of {GROUPS} and K a multiple of twice it; got {group}, {k}"
        )
    pairs = codes.view(n, k // (2 * group), 2, group)
    return (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(n, k // 2)


def unpack(packed: Tensor, group: int) -> Tensor:
    """Return the inverse of ``pack``."""
    n, half = packed.shape
    pairs = packed.view(n, half // group, 1, group)
    return torch.cat((pairs & 15, pairs >> 4), dim=2).reshape(n, 2 * half)


def arrange(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Return the order that ``int4_matmul`` reads.

    Args:
        codes: uint8 ``[N, K / 2]`` from ``pack``.
        scale, zero: ``[N, K / G]``; rounded to bfloat16.

    Returns:
        int32 ``[K / 128, B, 256 + 16 (128 / G)]`` for B = N / 16 blocks of rows (the last filled up with zeros): what
        a span of 128 k needs for neighbouring blocks is one piece of memory. First the codes of 16 rows: of each 64 k,
        for every lane l of a warp, four words, one for each 16 k. A word holds rows l / 4 and l / 4 + 8, k = 2 (l % 4)
        and the next, and both 8 further: the lane's input of one product of the tensor cores, in the order in which
        shifts by four bits bring it out. Then for each group, for r = 0..7, rows r and r + 8: scale in the low half of
        a word, zero in the high half, bfloat16.

    Raises:
        ValueError: K is not a multiple of 128.
    """
    return arrange_codes(unpack(codes, 2 * codes.shape[1] // scale.shape[1]), scale, zero)


def arrange_codes(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Call ``arrange`` for codes uint8 ``[N, K]``, one to a byte; a row may have an odd number of groups."""
    n, k = codes.shape
    groups = scale.shape[1]
    if k % CHUNK:
        raise ValueError(f"int4 groups: to arrange a weight for int4_matmul K must be a multiple of {CHUNK}, not {k}")
    group, blocks, chunks = k // groups, -(-n // 16), k // CHUNK
    whole = F.pad(codes, (0, 0, 0, blocks * 16 - n))
    #             block, row / 8, row % 8, chunk, 64 k, 32 k, 16 k, 8 k, thread, pair
    parts = whole.view(blocks, 2, 8, chunks, 2, 2, 2, 2, 4, 2)
    words = torch.zeros((blocks, 8, chunks, 2, 2, 2, 4), dtype=torch.int32, device=codes.device)
    for below, right, odd in product(range(2), repeat=3):
        words |= parts[:, below, ..., right, :, odd].to(torch.int32) << (4 * (below + 2 * right) + 16 * odd)
    words = words.permute(2, 0, 3, 1, 6, 4, 5).reshape(chunks, blocks, 256)
    both = F.pad(torch.stack((scale, zero), -1).to(torch.bfloat16), (0, 0, 0, 0, 0, blocks * 16 - n))
    both = both.view(blocks, 2, 8, chunks, CHUNK // group, 2).permute(3, 0, 4, 2, 1, 5)
    return torch.cat((words, both.reshape(chunks, blocks, -1).view(torch.int32)), -1)


def group_of(weight: Tensor) -> int:
    """Return G of a weight from ``arrange``."""
    return 16 * CHUNK // max(1, weight.shape[2] - 256)


def is_arranged(weight: Tensor, n: int, k: int) -> bool:
    """Return True if a tensor has the dtype and shape that ``arrange`` produces for a weight ``[n, k]``."""
    if weight.dtype != torch.int32 or weight.dim() != 3:
        return False
    chunks, blocks, words = weight.shape
    group = group_of(weight)
    return group in GROUPS and words == 256 + 16 * CHUNK // group and chunks * CHUNK == k and blocks == -(-n // 16)


def taken_apart(weight: Tensor, n: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the inverse of ``arrange``: codes uint8 ``[n, K]`` one to a byte, scale and zero bfloat16 ``[n, K /
    G]``."""
    chunks, blocks, _ = weight.shape
    words = weight[..., :256].view(chunks, blocks, 2, 8, 4, 4)  # 64 k, row % 8, thread, 16 k
    codes = words.new_empty((blocks, 2, 8, chunks, 2, 4, 2, 4, 2), dtype=torch.uint8)
    for below, right, odd in product(range(2), repeat=3):
        nibbles = (words >> (4 * (below + 2 * right) + 16 * odd) & 15).to(torch.uint8)
        codes[:, below, ..., right, :, odd] = nibbles.permute(1, 3, 0, 2, 5, 4)
    both = weight[..., 256:].contiguous().view(torch.bfloat16).view(chunks, blocks, -1, 8, 2, 2)
    scale, zero = both.permute(5, 1, 4, 3, 0, 2).reshape(2, blocks * 16, -1)[:, :n]
    return codes.view(blocks * 16, -1)[:n], scale, zero
