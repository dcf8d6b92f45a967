r"""Attention over packed documents without ever storing the scores, forward and backward: causal, full, or windowed.

The math is that of ``attention.py``, which is the causal case of this operator. For a query i of a document with n
tokens:

    s_j = scale * q . k_j      p = softmax(s)      o = sum_j p_j v_j
    causal: j <= i      window: i - window < j (and j < i + window where not causal)

**Forward.** A program holds BM queries of one head and walks over tiles of BN keys. It keeps, for each query, the
largest score so far m, the sum l of exp(s - m), and the output o not yet divided (Milakov & Gimelshein 2018). A new
tile with the largest score m' multiplies what was summed before by exp(m - m'): that is all it takes for the softmax
never to need a second look. Only o and L = m + log l leave the program: T H (d + 1) numbers, not T^2 H.

**Backward.** With L, p can be computed again, tile by tile: p = exp(s - L). With g = dL/do and D = g . o (one number
for each query, computed first):

    dv_j = sum_i p_ij g_i        dp_ij = g_i . v_j        ds_ij = p_ij (dp_ij - D_i)
    dk_j = scale * sum_i ds_ij q_i                        dq_i = scale * sum_j ds_ij k_j

dk and dv are sums over queries, dq is a sum over keys. So one kernel holds BN keys and walks over the queries (of all
heads that share the key head), another holds BM queries and walks over the keys. Both compute s and dp: 7 products
where 5 would do, and in return no sum is ever shared by two programs: the gradient is the same in every run.

Exponentials are powers of two (the hardware's own), with log2(e) in the scale; L is kept in that unit.

Shapes: q ``[T, H, d]``, k and v ``[T, K, d]``, H a multiple of K, cu_seqlens ``[documents + 1]`` int32, result like q.
Softmax and sums in float32; p and ds are rounded to the inputs' dtype for the products, as every fused attention does.
Source: Dao et al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691; Shah et al. 2024, arXiv:2407.08608.

Bound by arithmetic for documents of more than a few hundred tokens: 4 d FLOPs for each visible pair and head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .counting import visible_pairs
from .jit import INTERPRETED, TRITON_TARGETS, available, kernel, next_power_of_2, require, tl, triton
from .numerics import compute_dtype, sample
from .registry import Cost, Implementation, Kernel, Op, register
from .tiles import dot

LOG2E = 1.4426950408889634


def reference(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = True, window: int | None = None
) -> Tensor:
    """q ``[T, H, d]``, k and v ``[T, K, d]``, cu_seqlens ``[documents + 1]`` -> ``[T, H, d]``. Holds all T x T
    scores."""
    dtype = compute_dtype(q.dtype)
    group = q.shape[1] // k.shape[1]
    keys = k.to(dtype).repeat_interleave(group, dim=1)
    values = v.to(dtype).repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,shd->hts", q.to(dtype), keys) * scale
    token = torch.arange(q.shape[0], device=q.device)
    document = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)
    distance = token[:, None] - token[None]
    visible = document[:, None] == document[None]
    if causal:
        visible &= distance >= 0
    if window is not None:
        visible &= distance.abs() < window
    p = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", p, values).to(q.dtype)


# ---------------------------------------------------------------------------------------------------------- kernels


@kernel
def find_tile(tile, starts, count, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Which of ``count`` runs of tokens a tile belongs to, and which tile of the run it is.

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
def _load(pointer, token, end, head, stride_t, stride_h, D: tl.constexpr, DP: tl.constexpr, ROWS: tl.constexpr,  # type: ignore[no-untyped-def]
          BULK: tl.constexpr):  # fmt: skip
    """ROWS tokens of one head, ``[ROWS, DP]``: by bulk copy through a descriptor, or by pointers (zeros from ``end``
    on)."""
    if BULK:
        tile = pointer.load([token, head, 0]).reshape(ROWS, DP)
    else:
        t = token + tl.arange(0, ROWS)
        d = tl.arange(0, DP)
        at = pointer + t[:, None].to(tl.int64) * stride_t + head * stride_h + d[None, :]
        tile = tl.load(at, (t < end)[:, None] & (d < D)[None, :], 0.0)
    return tile


@kernel
def _seen(i, j, end, window, CAUSAL: tl.constexpr, WINDOW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Whether query i (in its shape) sees key j; both are tokens of the whole pack, and the document ends at
    ``end``."""
    seen = (j < end) & (i < end)
    if CAUSAL:
        seen = seen & (j <= i)
    if WINDOW:
        seen = seen & (i - j < window) & (j - i < window)
    return seen


@kernel
def _walk_keys(  # type: ignore[no-untyped-def]
    acc, l, m, q, k, v, first, last, i, begin, end, kv_head, k_t, k_h, v_t, v_h, scale2, window,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    MASK: tl.constexpr, BULK: tl.constexpr, SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """The online softmax over the keys from ``first`` to ``last``."""
    for start in tl.range(first, last, BN, warp_specialize=SPECIALIZE):
        keys = _load(k, start, end, kv_head, k_t, k_h, D, DP, BN, BULK)
        s = dot(q, keys.T, tl.zeros((q.shape[0], BN), tl.float32))
        if MASK:
            s = tl.where(
                _seen(i[:, None], start + tl.arange(0, BN)[None, :], end, window, CAUSAL, WINDOW), s, -float("inf")
            )
        new_m = tl.maximum(m, tl.max(s, 1) * scale2)
        shift = new_m
        if MASK:
            shift = tl.where(new_m == -float("inf"), 0.0, new_m)  # nothing seen yet: exp2(-inf) is 0, not NaN
        p = tl.exp2(s * scale2 - shift[:, None])
        fade = tl.exp2(m - shift)
        l = l * fade + tl.sum(p, 1)
        acc = acc * fade[:, None]
        values = _load(v, start, end, kv_head, v_t, v_h, D, DP, BN, BULK)
        acc = dot(p.to(q.dtype), values, acc)
        m = new_m
    return acc, l, m


@kernel
def _forward(  # type: ignore[no-untyped-def]
    q, k, v, out, lse, cu, documents, tokens, scale2, window, q_t, q_h, k_t, k_h, v_t, v_h,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BULK: tl.constexpr, SPECIALIZE: tl.constexpr,
):  # fmt: skip
    """BM queries of one head. Axis 0: tiles of queries, the last first (they see most); axis 1: heads."""
    document, tile = find_tile(tl.num_programs(0) - 1 - tl.program_id(0), cu, documents, BM)
    begin = tl.load(cu + document)
    end = tl.load(cu + document + 1)
    first_i = begin + tile * BM
    if first_i < end:
        head = tl.program_id(1)
        kv_head = head // GROUP
        i = first_i + tl.arange(0, BM)
        queries = _load(q, first_i, end, head, q_t, q_h, D, DP, BM, False)
        acc = tl.zeros((BM, DP), tl.float32)
        l = tl.zeros((BM,), tl.float32)
        m = tl.full((BM,), -float("inf"), tl.float32)
        # Keys [low, high) are seen by some query of the tile, [low_full, high_full) by every one.
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
        if WINDOW:
            acc, l, m = _walk_keys(
                acc, l, m, queries, k, v, low, low_full, i, begin, end, kv_head, k_t, k_h, v_t, v_h, scale2, window,
                D, DP, BN, CAUSAL, WINDOW, True, BULK, False,
            )  # fmt: skip
        acc, l, m = _walk_keys(
            acc, l, m, queries, k, v, low_full, high_full, i, begin, end, kv_head, k_t, k_h, v_t, v_h, scale2, window,
            D, DP, BN, CAUSAL, WINDOW, False, BULK, SPECIALIZE,
        )  # fmt: skip
        acc, l, m = _walk_keys(
            acc, l, m, queries, k, v, high_full, high, i, begin, end, kv_head, k_t, k_h, v_t, v_h, scale2, window,
            D, DP, BN, CAUSAL, WINDOW, True, BULK, False,
        )  # fmt: skip
        d = tl.arange(0, DP)
        at = out + i[:, None].to(tl.int64) * (H * D) + head * D + d[None, :]
        tl.store(at, (acc / l[:, None]).to(out.dtype.element_ty), (i < end)[:, None] & (d < D)[None, :])
        tl.store(lse + head.to(tl.int64) * tokens + i, m + tl.log2(l), i < end)


@kernel
def _dots(g, out, delta, tokens, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr):  # type: ignore[no-untyped-def]
    """D = g . o for BM tokens of one head."""
    i = tl.program_id(0) * BM + tl.arange(0, BM)
    head = tl.program_id(1)
    d = tl.arange(0, DP)
    at = i[:, None].to(tl.int64) * (H * D) + head * D + d[None, :]
    inside = (i < tokens)[:, None] & (d < D)[None, :]
    both = tl.load(g + at, inside, 0.0).to(tl.float32) * tl.load(out + at, inside, 0.0).to(tl.float32)
    tl.store(delta + head.to(tl.int64) * tokens + i, tl.sum(both, 1), i < tokens)


@kernel
def _walk_queries(  # type: ignore[no-untyped-def]
    dk, dv, keys, values, q, g, lse, delta, first, last, j, end, head, tokens, q_t, q_h, scale2, window,
    H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, MASK: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """dk and dv of one tile of keys (less the scale) from the queries of one head from ``first`` to ``last``."""
    for start in range(first, last, BM):
        i = start + tl.arange(0, BM)
        queries = _load(q, start, end, head, q_t, q_h, D, DP, BM, BULK)
        # Scores as [queries, keys]: keys and values then are right operands, which the tensor cores read from shared
        # memory. As left operands they would be held in registers, 64 for each thread, and spill.
        s = dot(queries, keys.T, tl.zeros((BM, BN), tl.float32))
        big_l = tl.load(lse + head.to(tl.int64) * tokens + i, i < end, 0.0)
        p = tl.exp2(s * scale2 - big_l[:, None])
        if MASK:
            p = tl.where(_seen(i[:, None], j[None, :], end, window, CAUSAL, WINDOW), p, 0.0)
        upstream = _load(g, start, end, head, H * D, D, D, DP, BM, BULK)
        dv = dot(p.to(keys.dtype).T, upstream, dv)
        dp = dot(upstream, values.T, tl.zeros((BM, BN), tl.float32))
        at_delta = tl.load(delta + head.to(tl.int64) * tokens + i, i < end, 0.0)
        ds = p * (dp - at_delta[:, None])
        dk = dot(ds.to(keys.dtype).T, queries, dk)
    return dk, dv


@kernel
def _backward_keys(  # type: ignore[no-untyped-def]
    q, k, v, g, dk, dv, lse, delta, cu, documents, tokens, scale, scale2, window, q_t, q_h, k_t, k_h, v_t, v_h,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """BN keys of one key head, against the queries of every head that shares it."""
    document, tile = find_tile(tl.program_id(0), cu, documents, BN)
    begin = tl.load(cu + document)
    end = tl.load(cu + document + 1)
    first_j = begin + tile * BN
    if first_j < end:
        kv_head = tl.program_id(1)
        j = first_j + tl.arange(0, BN)
        keys = _load(k, first_j, end, kv_head, k_t, k_h, D, DP, BN, BULK)
        values = _load(v, first_j, end, kv_head, v_t, v_h, D, DP, BN, BULK)
        grad_k = tl.zeros((BN, DP), tl.float32)
        grad_v = tl.zeros((BN, DP), tl.float32)
        # Queries [low, high) see some key of the tile, [low_full, high_full) see every one; all at multiples of BM.
        low = begin
        low_full = begin
        high = end
        high_full = end
        if CAUSAL:
            low = begin + (first_j - begin) // BM * BM
            low_full = begin + (first_j + BN - 1 - begin + BM - 1) // BM * BM
        if WINDOW:
            high = min(end, first_j + BN + window - 1)
            high_full = min(end, first_j + window)
            if not CAUSAL:
                low = max(begin, begin + (first_j - window + 1 - begin) // BM * BM)
                low_full = max(low, begin + (first_j + BN - window - begin + BM - 1) // BM * BM)
        if first_j + BN > end:
            low_full = high  # keys past the end: every tile is masked
        high_full = max(low, begin + (high_full - begin) // BM * BM)
        low_full = min(low_full, high_full)
        for member in range(GROUP):
            head = kv_head * GROUP + member
            grad_k, grad_v = _walk_queries(
                grad_k, grad_v, keys, values, q, g, lse, delta, low, low_full, j, end, head, tokens, q_t, q_h, scale2,
                window, H, D, DP, BM, BN, CAUSAL, WINDOW, True, BULK,
            )  # fmt: skip
            grad_k, grad_v = _walk_queries(
                grad_k, grad_v, keys, values, q, g, lse, delta, low_full, high_full, j, end, head, tokens, q_t, q_h,
                scale2, window, H, D, DP, BM, BN, CAUSAL, WINDOW, False, BULK,
            )  # fmt: skip
            grad_k, grad_v = _walk_queries(
                grad_k, grad_v, keys, values, q, g, lse, delta, high_full, high, j, end, head, tokens, q_t, q_h, scale2,
                window, H, D, DP, BM, BN, CAUSAL, WINDOW, True, BULK,
            )  # fmt: skip
        d = tl.arange(0, DP)
        at = j[:, None].to(tl.int64) * (H // GROUP * D) + kv_head * D + d[None, :]
        inside = (j < end)[:, None] & (d < D)[None, :]
        tl.store(dk + at, (grad_k * scale).to(dk.dtype.element_ty), inside)
        tl.store(dv + at, grad_v.to(dv.dtype.element_ty), inside)


@kernel
def _walk_keys_again(  # type: ignore[no-untyped-def]
    grad, queries, upstream, big_l, at_delta, k, v, first, last, i, end, kv_head, k_t, k_h, v_t, v_h, scale2, window,
    D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr, MASK: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """dq of one tile of queries (less the scale) from the keys from ``first`` to ``last``."""
    for start in range(first, last, BN):
        keys = _load(k, start, end, kv_head, k_t, k_h, D, DP, BN, BULK)
        s = dot(queries, keys.T, tl.zeros((BM, BN), tl.float32))
        values = _load(v, start, end, kv_head, v_t, v_h, D, DP, BN, BULK)
        dp = dot(upstream, values.T, tl.zeros((BM, BN), tl.float32))
        p = tl.exp2(s * scale2 - big_l[:, None])
        if MASK:
            j = start + tl.arange(0, BN)
            p = tl.where(_seen(i[:, None], j[None, :], end, window, CAUSAL, WINDOW), p, 0.0)
        ds = p * (dp - at_delta[:, None])
        grad = dot(ds.to(keys.dtype), keys, grad)
    return grad


@kernel
def _backward_queries(  # type: ignore[no-untyped-def]
    q, k, v, g, dq, lse, delta, cu, documents, tokens, scale, scale2, window, q_t, q_h, k_t, k_h, v_t, v_h,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """BM queries of one head, against the keys they see."""
    document, tile = find_tile(tl.num_programs(0) - 1 - tl.program_id(0), cu, documents, BM)
    begin = tl.load(cu + document)
    end = tl.load(cu + document + 1)
    first_i = begin + tile * BM
    if first_i < end:
        head = tl.program_id(1)
        kv_head = head // GROUP
        i = first_i + tl.arange(0, BM)
        queries = _load(q, first_i, end, head, q_t, q_h, D, DP, BM, False)
        upstream = _load(g, first_i, end, head, H * D, D, D, DP, BM, False)
        big_l = tl.load(lse + head.to(tl.int64) * tokens + i, i < end, 0.0)
        at_delta = tl.load(delta + head.to(tl.int64) * tokens + i, i < end, 0.0)
        grad = tl.zeros((BM, DP), tl.float32)
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
        if WINDOW:
            grad = _walk_keys_again(
                grad, queries, upstream, big_l, at_delta, k, v, low, low_full, i, end, kv_head, k_t, k_h, v_t, v_h,
                scale2, window, D, DP, BM, BN, CAUSAL, WINDOW, True, BULK,
            )  # fmt: skip
        grad = _walk_keys_again(
            grad, queries, upstream, big_l, at_delta, k, v, low_full, high_full, i, end, kv_head, k_t, k_h, v_t, v_h,
            scale2, window, D, DP, BM, BN, CAUSAL, WINDOW, False, BULK,
        )  # fmt: skip
        grad = _walk_keys_again(
            grad, queries, upstream, big_l, at_delta, k, v, high_full, high, i, end, kv_head, k_t, k_h, v_t, v_h,
            scale2, window, D, DP, BM, BN, CAUSAL, WINDOW, True, BULK,
        )  # fmt: skip
        d = tl.arange(0, DP)
        at = dq + i[:, None].to(tl.int64) * (H * D) + head * D + d[None, :]
        tl.store(at, (grad * scale).to(dq.dtype.element_ty), (i < end)[:, None] & (d < D)[None, :])


# -------------------------------------------------------------------------------------------------------- launchers


@dataclass(frozen=True, slots=True)
class Tiles:
    """Knobs of one kernel: queries and keys of a tile, warps, stages, bulk copies, warp specialization."""

    bm: int
    bn: int
    warps: int = 4
    stages: int = 2
    bulk: bool = False
    specialize: bool = False


FORWARD, KEYS, QUERIES = "forward", "keys", "queries"


def choose(which: str, q: Tensor) -> Tiles:
    """Tiles of one of the three kernels. Measured on an H200; elsewhere a guess from the same numbers."""
    if INTERPRETED:
        return Tiles(16, 16, 1, 1)
    if q.element_size() == 4:
        return Tiles(32, 32, 4, 1)
    hopper = torch.cuda.get_device_capability(q.device)[0] >= 9
    # Two programs on a multiprocessor: one computes exponentials while the other has the tensor cores. The kernel of
    # the keys must not be pipelined: with 2 stages and more Triton 3.6 lets the copy of the next queries overwrite what
    # the last product of dk still reads (seen on an H200 with GROUP 1: dk off by 1e-2 and different in every run).
    return Tiles(64, 64, 4, {FORWARD: 3, KEYS: 1, QUERIES: 2}[which], bulk=hopper)


def _fits_descriptor(t: Tensor) -> bool:
    return (
        t.stride(2) == 1
        and t.data_ptr() % 16 == 0
        and all(stride * t.element_size() % 16 == 0 for stride in t.stride()[:2])
        and t.numel() > 0
    )


def _descriptor(t: Tensor, rows: int, bulk: bool) -> Any:
    """``[T, H, d]`` for tiles of ``rows`` tokens of one head."""
    if not bulk:
        return t
    from triton.tools.tensor_descriptor import TensorDescriptor

    return TensorDescriptor.from_tensor(t, [rows, 1, _padded(t.shape[2])])


def _padded(d: int) -> int:
    return max(16, next_power_of_2(d))


def _check(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    require("flash_attention", q, k, v)
    if q.dim() != 3 or k.shape != v.shape or k.shape[0] != q.shape[0] or k.shape[2] != q.shape[2]:
        raise ValueError(
            f"flash_attention: q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)} do not fit each other"
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"flash_attention: {q.shape[1]} query heads are no multiple of {k.shape[1]} key heads")
    if q.shape[2] > 256:
        raise ValueError(f"flash_attention: head dimension {q.shape[2]} is larger than 256; use the reference")
    if cu_seqlens.dtype != torch.int32 or cu_seqlens.dim() != 1 or len(cu_seqlens) < 2:
        raise ValueError("flash_attention: cu_seqlens must be int32 [documents + 1]")
    first, second, third = (t if t.stride(2) == 1 else t.contiguous() for t in (q, k, v))
    return first, second, third


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = True, window: int | None = None,
    *, tiles: Tiles | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result, and L ``[H, T]`` in powers of two, which the backward pass needs."""
    q, k, v = _check(q, k, v, cu_seqlens)
    tokens, heads, d = q.shape
    out = torch.empty((tokens, heads, d), dtype=q.dtype, device=q.device)
    lse = torch.empty((heads, tokens), dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    tiles = tiles or choose(FORWARD, q)
    bulk = tiles.bulk and _fits_descriptor(k) and _fits_descriptor(v)
    documents = len(cu_seqlens) - 1
    _forward[(tokens // tiles.bm + documents, heads)](
        q, _descriptor(k, tiles.bn, bulk), _descriptor(v, tiles.bn, bulk), out, lse, cu_seqlens, documents, tokens,
        scale * LOG2E, window or 0, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], H=heads,
        GROUP=heads // k.shape[1], D=d, DP=_padded(d), BM=tiles.bm, BN=tiles.bn, CAUSAL=causal, WINDOW=window is not
        None, BULK=bulk, SPECIALIZE=tiles.specialize, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out, lse


def backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor, scale: float,
    causal: bool = True, window: int | None = None, *, keys: Tiles | None = None, queries: Tiles | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v from the upstream gradient and what ``forward`` returned."""
    q, k, v = _check(q, k, v, cu_seqlens)
    g = g.contiguous()
    tokens, heads, d = q.shape
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    if q.numel() == 0:
        return dq, dk, dv
    delta = torch.empty_like(lse)
    _dots[(triton.cdiv(tokens, 32), heads)](g, out, delta, tokens, H=heads, D=d, DP=_padded(d), BM=32)
    keys = keys or choose(KEYS, q)
    queries = queries or choose(QUERIES, q)
    documents = len(cu_seqlens) - 1
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    common: dict[str, Any] = {
        "H": heads, "GROUP": heads // k.shape[1], "D": d, "DP": _padded(d), "CAUSAL": causal,
        "WINDOW": window is not None,
    }  # fmt: skip
    scales = (scale, scale * LOG2E, window or 0)
    bulk = keys.bulk and all(_fits_descriptor(t) for t in (q, k, v, g))
    _backward_keys[(tokens // keys.bn + documents, k.shape[1])](
        _descriptor(q, keys.bm, bulk), _descriptor(k, keys.bn, bulk), _descriptor(v, keys.bn, bulk),
        _descriptor(g, keys.bm, bulk), dk, dv, lse, delta, cu_seqlens, documents, tokens, *scales, *strides, **common,
        BM=keys.bm, BN=keys.bn, BULK=bulk, num_warps=keys.warps, num_stages=keys.stages,
    )  # fmt: skip
    bulk = queries.bulk and _fits_descriptor(k) and _fits_descriptor(v)
    _backward_queries[(tokens // queries.bm + documents, heads)](
        q, _descriptor(k, queries.bn, bulk), _descriptor(v, queries.bn, bulk), g, dq, lse, delta, cu_seqlens, documents,
        tokens, *scales, *strides, **common, BM=queries.bm, BN=queries.bn, BULK=bulk, num_warps=queries.warps,
        num_stages=queries.stages,
    )  # fmt: skip
    return dq, dk, dv


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = True, window: int | None = None
) -> Tensor:
    """As ``reference``, without holding scores."""
    return forward(q, k, v, cu_seqlens, scale, causal, window)[0]


def attention(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, window: int | None = None) -> Tensor:
    """``flash_attention`` with the arguments of the operator ``attention``."""
    return forward(q, k, v, cu_seqlens, scale, True, window)[0]


@torch.library.custom_op("transect::flash_attention", mutates_args=())
def _attention_op(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = True, window: int | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return forward(q, k, v, cu_seqlens, scale, causal, window)


@_attention_op.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = True, window: int | None = None
) -> tuple[Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=torch.float32)


@torch.library.custom_op("transect::flash_attention_gradient", mutates_args=())
def _gradient_op(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor, scale: float, causal:
    bool, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return backward(g, q, k, v, out, lse, cu_seqlens, scale, causal, window)


@_gradient_op.register_fake
def _(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor, scale: float, causal:
    bool, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, scale, causal, window = inputs
    ctx.save_for_backward(q, k, v, cu_seqlens, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.options = (scale, causal, window)


def _backward_op(ctx: Any, g: Tensor, _lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, cu_seqlens, out, lse = ctx.saved_tensors
    return (*_gradient_op(g, q, k, v, out, lse, cu_seqlens, *ctx.options), None, None, None, None)


_attention_op.register_autograd(_backward_op, setup_context=_save)


def flash_attention_autograd(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = True, window: int | None = None
) -> Tensor:
    """As ``flash_attention``, through ``torch.library``: gradients, fake tensors, ``torch.compile``."""
    return _attention_op(q, k, v, cu_seqlens, scale, causal, window)[0]


flash_attention_autograd.operator = _attention_op  # type: ignore[attr-defined]


def attention_autograd(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, window: int | None = None
) -> Tensor:
    """``attention`` with gradients."""
    return _attention_op(q, k, v, cu_seqlens, scale, True, window)[0]


# ----------------------------------------------------------------------------------------------------- registry entry


def _pairs(cu_seqlens: Tensor, causal: bool, window: int | None) -> int:
    """Visible query-key pairs of a head."""
    bounds = cu_seqlens.tolist()
    lengths = [end - start for start, end in pairwise(bounds)]
    one_sided = sum(visible_pairs(n, n, window) for n in lengths)
    return one_sided if causal else 2 * one_sided - sum(lengths)


def cost(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = True, window: int | None = None
) -> Cost:
    """4 d FLOPs for each visible pair and head; the softmax is not counted. ``cu_seqlens`` must hold its values."""
    pairs = _pairs(cu_seqlens, causal, window)
    return Cost(4 * pairs * q.shape[1] * q.shape[2], q.nbytes + k.nbytes + v.nbytes, q.nbytes)


def gradient_cost(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = True, window: int | None = None
) -> Cost:
    """5 products of 2 d FLOPs for each visible pair and head."""
    pairs = _pairs(cu_seqlens, causal, window)
    read = 3 * q.nbytes + k.nbytes + v.nbytes
    return Cost(10 * pairs * q.shape[1] * q.shape[2], read, q.nbytes + k.nbytes + v.nbytes)


def _peer(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = True, window: int | None = None
) -> Tensor:
    """torch's scaled_dot_product_attention, one document after another."""
    outputs = []
    bounds = cu_seqlens.tolist()
    for start, end in pairwise(bounds):
        heads_first: Any = (x[start:end].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        mask = None
        if window is not None:
            position = torch.arange(end - start, device=q.device)
            distance = position[:, None] - position[None]
            mask = (distance.abs() < window) & ((distance >= 0) | (not causal))
        options: dict[str, Any] = {
            "attn_mask": mask,
            "is_causal": causal and mask is None,
            "scale": scale,
            "enable_gqa": True,
        }
        out = F.scaled_dot_product_attention(*heads_first, **options)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def _examples() -> Sequence[dict[str, Any]]:
    examples = []
    for lengths, heads, kv_heads, d, causal, window in (
        ((1,), 1, 1, 8, True, None),
        ((5, 1, 37), 4, 2, 16, True, None),
        ((33, 20), 2, 1, 10, False, None),
        ((3, 50, 2), 4, 1, 16, True, 9),
        ((40, 7), 2, 2, 24, False, 18),
    ):
        tokens = sum(lengths)
        examples.append(
            {
                "q": 2 * sample(tokens, heads, d),
                "k": sample(tokens, kv_heads, d, seed=1),
                "v": sample(tokens, kv_heads, d, seed=2),
                "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32),
                "scale": d**-0.5,
                "causal": causal,
                "window": window,
            }
        )
    return examples


def _kernels() -> Sequence[Kernel]:
    strides = dict.fromkeys(("q_t", "q_h", "k_t", "k_h", "v_t", "v_h"), "i32")
    half = dict.fromkeys(("q", "k", "v"), "*bf16")
    ints: dict[str, str] = {"cu": "*i32", "documents": "i32", "tokens": "i32", "window": "i32", **strides}
    base = {"H": 32, "GROUP": 4, "D": 128, "DP": 128, "CAUSAL": True, "WINDOW": False, "BULK": False}
    floats = {"lse": "*fp32", "delta": "*fp32", "scale": "fp32", "scale2": "fp32"}
    forward_kernel = Kernel(
        name="forward",
        function=_forward,
        arguments={**half, "out": "*bf16", "lse": "*fp32", "scale2": "fp32", **ints},
        constants={**base, "BM": 128, "BN": 64, "SPECIALIZE": False},
        divisible=tuple(strides),
        warps=8,
        stages=2,
        targets=TRITON_TARGETS,
    )
    bulk = dict.fromkeys(("k", "v"), "tensordesc<bf16[128, 1, 128]>")
    keys_kernel = Kernel(
        name="backward_keys",
        function=_backward_keys,
        arguments={**half, "g": "*bf16", "dk": "*bf16", "dv": "*bf16", **floats, **ints},
        constants={**base, "BM": 64, "BN": 128},
        divisible=tuple(strides),
        warps=8,
        stages=2,
        targets=TRITON_TARGETS,
    )
    return [
        forward_kernel,
        replace(
            forward_kernel,
            name="forward_bulk",
            arguments={**forward_kernel.arguments, **bulk},
            constants={**forward_kernel.constants, "BN": 128, "BULK": True},
            targets=("sm_90",),
        ),
        keys_kernel,
        replace(
            keys_kernel,
            name="backward_queries",
            function=_backward_queries,
            arguments={**half, "g": "*bf16", "dq": "*bf16", **floats, **ints},
            constants={**base, "BM": 128, "BN": 64},
        ),
    ]


register(
    Op(
        name="flash_attention",
        reference=reference,
        cost=cost,
        gradient_cost=gradient_cost,
        implementations={
            "triton": Implementation(
                "triton",
                available(flash_attention),
                TRITON_TARGETS,
                batch_invariant=True,
                autograd=available(flash_attention_autograd),
            )
        },
        examples=_examples,
        peers={"torch": _peer},
        differentiable=("q", "k", "v"),
        kernels=_kernels,
    )
)
