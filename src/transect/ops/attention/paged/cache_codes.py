"""Encode a KV cache in int8: for each head of each token, codes followed by their scale.

    value_i = scale * code_i        scale = max |value| / 127 over the d numbers of a head

A number is off by at most half a scale, 1/254 of the largest of its head and token. The last four bytes of a head's
``d + 4`` are the scale, a float32; so the cache stays one tensor, and a copy of blocks includes the scales.

Shapes: d head size; the cache of one layer ``[blocks, K, block_size, d + 4]`` int8.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...lang.jit import kernel, tl

SCALE_BYTES = 4
MOST = 127


def stored_width(head_dim: int, dtype: torch.dtype) -> int:
    """Return the elements that a cache of this dtype keeps for each head of a token."""
    return head_dim + SCALE_BYTES if dtype == torch.int8 else head_dim


def refusal(dtype: torch.dtype, head_dim: int) -> str | None:
    """Return the reason, as a sentence, why kernels on a GPU do not read a cache of this dtype; None if they do. Scales
    are aligned."""
    if stored_width(head_dim, dtype) == head_dim or head_dim % SCALE_BYTES == 0:
        return None
    name = str(dtype).removeprefix("torch.")
    return f"a KV cache in {name} on a GPU takes heads whose size is a multiple of {SCALE_BYTES}, not of {head_dim}"


def encode(values: Tensor) -> Tensor:
    """Encode ``[..., d]`` of any float dtype as int8 ``[..., d + 4]``."""
    wide = values.float()
    scale = wide.abs().amax(-1, keepdim=True) / MOST
    codes = (wide / scale.clamp(min=torch.finfo(torch.float32).tiny)).round_().clamp_(-MOST, MOST)
    return torch.cat((codes.to(torch.int8), scale.contiguous().view(torch.int8)), -1)


def values_of(stored: Tensor, dtype: torch.dtype) -> Tensor:
    """Decode slots of a cache to values ``[..., d]`` in ``dtype``; a cache of numbers is converted."""
    if stored.dtype != torch.int8:
        return stored.to(dtype)
    scale = stored[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return (stored[..., :-SCALE_BYTES].float() * scale).to(dtype)


@kernel
def codes_of(x, scale):  # type: ignore[no-untyped-def]
    """Divide ``x [n, columns]`` by ``scale [n]`` and round to the nearest integer; 0 where the scale is 0."""
    share = x / tl.maximum(scale, 1.1754943508222875e-38)[:, None]
    return ((share + 12582912.0) - 12582912.0).to(tl.int8)  # + 1.5 * 2^23: of two as near to the even one


@kernel
def store_scale(cache, at, scale, inside):  # type: ignore[no-untyped-def]
    """Write ``scale [n]`` after the codes of heads, at ``at [n, 1]``; ``inside [n, columns]``: which there are."""
    place = (cache + at).to(tl.pointer_type(tl.float32), bitcast=True)
    tl.store(place, scale[:, None], mask=(tl.max(inside.to(tl.int32), 1) > 0)[:, None])


@kernel
def store_heads(cache, at, size, column, x, inside):  # type: ignore[no-untyped-def]
    """Write heads ``x [n, columns]`` to a cache in its dtype, from ``at`` ``[n, 1]`` on."""
    if cache.dtype.element_ty == tl.int8:
        wide = tl.where(inside, x.to(tl.float32), 0.0)
        scale = tl.max(tl.abs(wide), 1) / 127.0
        tl.store(cache + at + column, codes_of(wide, scale), mask=inside)
        store_scale(cache, at + size, scale, inside)
    else:
        tl.store(cache + at + column, x.to(cache.dtype.element_ty), mask=inside)


@kernel
def store_halves(cache, at, half, column, first, second, inside):  # type: ignore[no-untyped-def]
    """Write heads in two halves of ``half`` columns each, as ``store_heads`` does."""
    if cache.dtype.element_ty == tl.int8:
        a = tl.where(inside, first.to(tl.float32), 0.0)
        b = tl.where(inside, second.to(tl.float32), 0.0)
        scale = tl.maximum(tl.max(tl.abs(a), 1), tl.max(tl.abs(b), 1)) / 127.0
        tl.store(cache + at + column, codes_of(a, scale), mask=inside)
        tl.store(cache + at + half + column, codes_of(b, scale), mask=inside)
        store_scale(cache, at + 2 * half, scale, inside)
    else:
        tl.store(cache + at + column, first.to(cache.dtype.element_ty), mask=inside)
        tl.store(cache + at + half + column, second.to(cache.dtype.element_ty), mask=inside)
