"""A KV cache in int8: codes, and behind those of each head of each token the scale that belongs to them.

    value_i = scale * code_i        scale = max |value| / 127 over the d numbers of a head

A number is off by at most half a scale, 1/254 of the largest of its head and token. The last four bytes of a head's
``d + 4`` are the scale, a float32; so the cache stays one tensor, and whoever copies blocks copies scales with them.

Shapes: d head size; the cache of one layer ``[blocks, K, block_size, d + 4]`` int8.
"""

from __future__ import annotations

import torch
from torch import Tensor

SCALE_BYTES = 4
MOST = 127


def stored_width(head_dim: int, dtype: torch.dtype) -> int:
    """Elements that a cache of this dtype keeps for each head of a token."""
    return head_dim + SCALE_BYTES if dtype == torch.int8 else head_dim


def stored_bits(head_dim: int, dtype: torch.dtype) -> float:
    """Bits of a number in the cache, its part of the scale included."""
    return 8.0 * dtype.itemsize * stored_width(head_dim, dtype) / head_dim


def encode(values: Tensor) -> Tensor:
    """``[..., d]`` of any float dtype -> int8 ``[..., d + 4]``."""
    wide = values.float()
    scale = wide.abs().amax(-1, keepdim=True) / MOST
    codes = (wide / scale.clamp(min=torch.finfo(torch.float32).tiny)).round_().clamp_(-MOST, MOST)
    return torch.cat((codes.to(torch.int8), scale.contiguous().view(torch.int8)), -1)


def values_of(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """What some slots of a cache stand for, ``[..., d]`` in ``dtype``; a cache of numbers is converted."""
    if stored.dtype != torch.int8:
        return stored.to(dtype)
    scale = stored[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (stored[..., :-SCALE_BYTES].float() * scale).to(dtype)
