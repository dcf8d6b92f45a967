r"""The gradient of flash attention: dq, dk and dv without ever storing the scores.

The forward pass (``flash_attention.py``) leaves o and L = log2 of the sum of powers 2^(s log2 e). With L, the
probabilities come back tile by tile: p = exp(s - L). The rest is the chain rule, for a query i, a key j and the
upstream gradient g = dL/do:

    o_i = sum_j p_ij v_j                  dv_j = sum_i p_ij g_i        dp_ij = g_i . v_j
    p_ij = exp(s_ij) / sum_k exp(s_ik)    ds_ij = p_ij (dp_ij - D_i)   with D_i = sum_k p_ik dp_ik = g_i . o_i
    s_ij = scale q_i . k_j                dq_i = scale sum_j ds_ij k_j        dk_j = scale sum_i ds_ij q_i

The Jacobian of softmax, diag(p) - p p^T, turns dp into ds. Its second term needs the sum over all keys of p dp, and
that is g . o, because o = sum p v. So D is one number for each query, and a kernel of its own computes it first.

dk and dv are sums over queries, dq is a sum over keys. There are two ways, and ``backward`` chooses:

* Two kernels (this file, every device). One holds BN keys and walks over the queries of all heads that share the key
  head. The other holds BM queries and walks over the keys. Both compute s and dp: 7 products where 5 would do. In
  return no two programs share a sum, and the gradient is the same to the bit in every run.
* One kernel (``packed/backward_hopper.py``: Hopper, 16 bits): 5 products. Many programs add to dq in memory, so its
  last bits differ from run to run. It does not run where torch.use_deterministic_algorithms is on.

In both, the program that holds the keys sums over the heads that share a key head: no memory, no second pass.

In a CUDA graph, capture forward and backward together, or run the forward on the capturing stream. Autograd runs the
backward of any operator on the stream of its forward; with a forward on the default stream CUDA gives up the capture
(StreamCaptureInvalidated). Nothing needs a warm-up.

Shapes: as in ``flash_attention.py``; g like q, L ``[H, T]`` float32. Softmax and sums in float32; p and ds are rounded
to the inputs' dtype for the products, as every fused attention does.

Source: Dao et al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691. Times are in ``docs/lab-notes/attention.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....hardware.device import target_of
from ...lang.jit import INTERPRETED, TRITON_TARGETS, kernel, tl, triton
from ...lang.tiles import dot
from ...registry import Kernel
from . import hopper as hopper
from .backward_hopper import backward as hopper_backward
from .backward_hopper import kernels as hopper_kernels
from .tiling import LOG2E, PackedTiling, check, descriptor, find_tile, fits_descriptor, keys_of, load_tile, padded, seen

# ---------------------------------------------------------------------------------------------------------- kernels


@kernel
def _dots(g, out, delta, tokens, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute D = g . o for BM tokens of one head."""
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
    """Sum dk and dv of one tile of keys (without the scale) over the queries of one head from ``first`` to ``last``."""
    for start in range(first, last, BM):
        i = start + tl.arange(0, BM)
        queries = load_tile(q, start, end, head, q_t, q_h, D, DP, BM, BULK)
        # Scores as [queries, keys]: keys and values then are right operands, which the tensor cores read from shared
        # memory. As left operands they would be held in registers, 64 for each thread, and spill.
        s = dot(queries, keys.T, tl.zeros((BM, BN), tl.float32))
        big_l = tl.load(lse + head.to(tl.int64) * tokens + i, i < end, 0.0)
        p = tl.exp2(s * scale2 - big_l[:, None])
        if MASK:
            p = tl.where(seen(i[:, None], j[None, :], end, window, CAUSAL, WINDOW), p, 0.0)
        upstream = load_tile(g, start, end, head, H * D, D, D, DP, BM, BULK)
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
    """Compute dk and dv of BN keys of one key head from the queries of every head that shares it."""
    document, tile = find_tile(tl.program_id(0), cu, documents, BN)
    begin = tl.load(cu + document)
    end = tl.load(cu + document + 1)
    first_j = begin + tile * BN
    if first_j < end:
        kv_head = tl.program_id(1)
        j = first_j + tl.arange(0, BN)
        keys = load_tile(k, first_j, end, kv_head, k_t, k_h, D, DP, BN, BULK)
        values = load_tile(v, first_j, end, kv_head, v_t, v_h, D, DP, BN, BULK)
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
    """Sum dq of one tile of queries (without the scale) over the keys from ``first`` to ``last``."""
    for start in range(first, last, BN):
        keys = load_tile(k, start, end, kv_head, k_t, k_h, D, DP, BN, BULK)
        s = dot(queries, keys.T, tl.zeros((BM, BN), tl.float32))
        values = load_tile(v, start, end, kv_head, v_t, v_h, D, DP, BN, BULK)
        dp = dot(upstream, values.T, tl.zeros((BM, BN), tl.float32))
        p = tl.exp2(s * scale2 - big_l[:, None])
        if MASK:
            j = start + tl.arange(0, BN)
            p = tl.where(seen(i[:, None], j[None, :], end, window, CAUSAL, WINDOW), p, 0.0)
        ds = p * (dp - at_delta[:, None])
        grad = dot(ds.to(keys.dtype), keys, grad)
    return grad


@kernel
def _backward_queries(  # type: ignore[no-untyped-def]
    q, k, v, g, dq, lse, delta, cu, documents, tokens, scale, scale2, window, q_t, q_h, k_t, k_h, v_t, v_h,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """Compute dq of BM queries of one head from the keys they see."""
    document, tile = find_tile(tl.num_programs(0) - 1 - tl.program_id(0), cu, documents, BM)
    begin = tl.load(cu + document)
    end = tl.load(cu + document + 1)
    first_i = begin + tile * BM
    if first_i < end:
        head = tl.program_id(1)
        kv_head = head // GROUP
        i = first_i + tl.arange(0, BM)
        queries = load_tile(q, first_i, end, head, q_t, q_h, D, DP, BM, False)
        upstream = load_tile(g, first_i, end, head, H * D, D, D, DP, BM, False)
        big_l = tl.load(lse + head.to(tl.int64) * tokens + i, i < end, 0.0)
        at_delta = tl.load(delta + head.to(tl.int64) * tokens + i, i < end, 0.0)
        grad = tl.zeros((BM, DP), tl.float32)
        low, low_full, high_full, high = keys_of(first_i, begin, end, window, BM, BN, CAUSAL, WINDOW)
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


KEYS, QUERIES = "keys", "queries"
STAGES = {KEYS: 1, QUERIES: 2}
"""Pipeline stages on Hopper. The kernel of the keys must not be pipelined. With 2 stages Triton 3.6 gives its queries a
ring of one tile, leaves the last product of dk running, which reads that tile, and starts the copy of the next queries
onto it (visible in its TTGIR; dk is then off by 1e-2 and different in every run). The kernel of the queries gets a ring
of two: a copy lands on the tile of the step before, whose products have been waited for."""


PORTABLE = PackedTiling(64, 64, 8, 2)
"""Tiling of both kernels without bulk copies: without spills in 74 KiB of shared memory."""


def choose(which: str, q: Tensor) -> PackedTiling:
    """Return the tiling of one of the two kernels. Measured on an H200; elsewhere a guess from the same numbers."""
    if INTERPRETED:
        return PackedTiling(16, 16, 1, 1)
    if q.element_size() == 4:
        return PackedTiling(32, 32, 4, 1)
    if not target_of(q.device).bulk_copies:
        return PORTABLE
    # Two programs on a multiprocessor: one computes exponentials while the other has the tensor cores.
    return PackedTiling(64, 64, 4, STAGES[which], bulk=True)


def backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor, scale: float,
    causal: bool = True, window: int | None = None, *, deterministic: bool | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of q, k and v from the upstream gradient and the results of ``forward``.

    The Hopper kernel computes them where it takes the inputs (``flash_attention_hopper.takes``) and ``deterministic``
    is false, else the two kernels of this file. If ``deterministic`` is None, it is torch's own setting
    (``torch.use_deterministic_algorithms``).
    """
    q, k, v = check(q, k, v, cu_seqlens)
    g = g.contiguous()
    tokens, heads, d = q.shape
    if q.numel() == 0:
        return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    delta = torch.empty_like(lse)
    _dots[(triton.cdiv(tokens, 32), heads)](g, out, delta, tokens, H=heads, D=d, DP=padded(d), BM=32)
    if deterministic is None:
        deterministic = torch.are_deterministic_algorithms_enabled()
    if not deterministic and hopper.takes(q, k, v) and fits_descriptor(g):
        return hopper_backward(g, q, k, v, lse, delta, cu_seqlens, scale, causal, window)
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    keys, queries = choose(KEYS, q), choose(QUERIES, q)
    documents = len(cu_seqlens) - 1
    strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    common: dict[str, Any] = {
        "H": heads, "GROUP": heads // k.shape[1], "D": d, "DP": padded(d), "CAUSAL": causal,
        "WINDOW": window is not None,
    }  # fmt: skip
    scales = (scale, scale * LOG2E, window or 0)
    bulk = keys.bulk and all(fits_descriptor(t) for t in (q, k, v, g))
    _backward_keys[(tokens // keys.bn + documents, k.shape[1])](
        descriptor(q, keys.bm, bulk), descriptor(k, keys.bn, bulk), descriptor(v, keys.bn, bulk),
        descriptor(g, keys.bm, bulk), dk, dv, lse, delta, cu_seqlens, documents, tokens, *scales, *strides, **common,
        BM=keys.bm, BN=keys.bn, BULK=bulk, num_warps=keys.warps, num_stages=keys.stages,
    )  # fmt: skip
    bulk = queries.bulk and fits_descriptor(k) and fits_descriptor(v)
    _backward_queries[(tokens // queries.bm + documents, heads)](
        q, descriptor(k, queries.bn, bulk), descriptor(v, queries.bn, bulk), g, dq, lse, delta, cu_seqlens, documents,
        tokens, *scales, *strides, **common, BM=queries.bm, BN=queries.bn, BULK=bulk, num_warps=queries.warps,
        num_stages=queries.stages,
    )  # fmt: skip
    return dq, dk, dv


@torch.library.custom_op("transect::flash_attention_gradient", mutates_args=())
def gradient_op(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor, scale: float, causal:
    bool, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return backward(g, q, k, v, out, lse, cu_seqlens, scale, causal, window)


@gradient_op.register_fake
def _(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, cu_seqlens: Tensor, scale: float, causal:
    bool, window: int | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def kernels() -> Sequence[Kernel]:
    """Describe the kernels of this file for compilation ahead of time."""
    strides = dict.fromkeys(("q_t", "q_h", "k_t", "k_h", "v_t", "v_h"), "i32")
    half = dict.fromkeys(("q", "k", "v", "g"), "*bf16")
    ints: dict[str, str] = {"cu": "*i32", "documents": "i32", "tokens": "i32", "window": "i32", **strides}
    base = {"H": 32, "GROUP": 4, "D": 128, "DP": 128, "CAUSAL": True, "WINDOW": False, "BULK": False}
    floats = {"lse": "*fp32", "delta": "*fp32", "scale": "fp32", "scale2": "fp32"}
    keys_kernel = Kernel(
        name="backward_keys",
        function=_backward_keys,
        arguments={**half, "dk": "*bf16", "dv": "*bf16", **floats, **ints},
        constants={**base, "BM": PORTABLE.bm, "BN": PORTABLE.bn},
        divisible=tuple(strides),
        warps=PORTABLE.warps,
        stages=PORTABLE.stages,
        targets=TRITON_TARGETS,
    )
    return [
        keys_kernel,
        replace(
            keys_kernel,
            name="backward_queries",
            function=_backward_queries,
            arguments={**half, "dq": "*bf16", **floats, **ints},
            constants={**base, "BM": PORTABLE.bm, "BN": PORTABLE.bn},
        ),
        *hopper_kernels(),
    ]
