"""Share tiles of packed documents, masks, and loads of tiles between the attention kernels.

Tokens of all documents lie one after another; document i is the tokens cu_seqlens[i] to cu_seqlens[i + 1]. Tensors are
``[tokens, heads, d]`` with any strides except the last, which is 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...lang.jit import kernel, next_power_of_2, require, tl

LOG2E = 1.4426950408889634


@kernel
def find_tile(tile, starts, count, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Find which of ``count`` runs of tokens a tile belongs to, and which tile of the run it is.

    Run i begins at token starts[i] and is given the tiles from starts[i] // SIZE + i on, which leaves it enough; some
    tiles at its end may have nothing to do.
    """
    low = 0
    high = count
    while high - low > 1:
        middle = (low + high) // 2
        if tl.load(starts + middle) // SIZE + middle <= tile:
            low = middle
        else:
            high = middle
    return low, tile - (tl.load(starts + low) // SIZE + low)


@kernel
def load_tile(pointer, token, end, head, stride_t, stride_h, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,  # type: ignore[no-untyped-def]
          BULK: tl.constexpr):  # fmt: skip
    """Load ROWS tokens of one head, ``[ROWS, DP]``: by bulk copy through a descriptor, or by pointers (zeros from
    ``end`` on)."""
    if BULK:
        tile = pointer.load([token, head, 0]).reshape(ROWS, DP)
    else:
        t = token + tl.arange(0, ROWS)
        d = tl.arange(0, DP)
        at = pointer + t[:, None].to(tl.int64) * stride_t + head * stride_h + d[None, :]
        tile = tl.load(at, (t < end)[:, None] & (d < D)[None, :], 0.0)
    return tile


@kernel
def seen(i, j, end, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the mask of pairs in which query i (in its shape) sees key j.

    Both are tokens of the whole pack, and the document ends at ``end``.
    """
    inside = (j < end) & (i < end)
    if CAUSAL:
        inside = inside & (j <= i)
    if WINDOW:
        inside = inside & (i - j < window) & (j - i < window)
    return inside


@kernel
def keys_of(first_i, begin, end, window, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr,  # type: ignore[no-untyped-def]
            WINDOW: tl.constexpr):  # fmt: skip
    """Return the range of keys that BM queries from ``first_i`` on see: ``low, low_full, high_full, high``.

    Keys [low, high) are seen by some of the queries, [low_full, high_full) by every one. All but ``high`` lie a whole
    number of tiles of BN after ``begin``.
    """
    low = begin
    high = end
    high_full = end
    if CAUSAL:
        high = min(end, first_i + BM)
        high_full = min(end, first_i + 1)
    low_full = low
    if WINDOW:
        low = max(begin, begin + (first_i - window + 1 - begin) // BN * BN)
        low_full = max(low, begin + (first_i + BM - window - begin + BN - 1) // BN * BN)
        if not CAUSAL:
            high = min(end, first_i + BM + window - 1)
            high_full = min(end, first_i + window)
    high_full = max(low, begin + (high_full - begin) // BN * BN)
    low_full = min(low_full, high_full)
    return low, low_full, high_full, high


@dataclass(frozen=True, slots=True)
class PackedTiling:
    """Knobs of one kernel: queries and keys of a tile, warps, stages, bulk copies."""

    bm: int
    bn: int
    warps: int = 4
    stages: int = 2
    bulk: bool = False


def fits_descriptor(t: Tensor) -> bool:
    """Return True if the bulk copy engine can address ``t``: strides and start in units of 16 bytes."""
    return (
        t.stride(2) == 1
        and t.data_ptr() % 16 == 0
        and all(stride * t.element_size() % 16 == 0 for stride in t.stride()[:2])
        and t.numel() > 0
    )


def descriptor(t: Tensor, rows: int, bulk: bool) -> Any:
    """Describe ``[T, H, d]`` for tiles of ``rows`` tokens of one head."""
    if not bulk:
        return t
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(t, [rows, 1, padded(t.shape[2])])


def padded(d: int) -> int:
    """Return the columns of a tile that holds heads of ``d``."""
    return max(16, next_power_of_2(d))


def check(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return q, k and v with the elements of a head contiguous.

    Raises:
        ValueError: shapes that do not fit each other, a head of more than 256, or cu_seqlens that is not int32.
    """
    require("flash_attention", q, k, v)
    if q.dim() != 3 or k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[2] != q.shape[2]:
        raise ValueError(
            f"flash_attention: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} do not fit each other"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"flash_attention: {q.shape[1]} query heads are not a multiple of {k.shape[1]} key heads")
    if q.shape[2] > 256:
        raise ValueError(f"flash_attention: head dimension {q.shape[2]} is larger than 256; use the reference")
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError("flash_attention: cu_seqlens must be int32 [documents + 1]")
    first, second, third = (t if t.stride(2) == 1 else t.contiguous() for t in (q, k, v))
    return first, second, third
