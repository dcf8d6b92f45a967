r"""Attention over packed documents without ever storing the scores, forward and backward: causal, full, or windowed.

The math is that of ``attention.py``, which is the causal case of this operator. For a query i of a document with n
tokens:

    s_j = scale * q . k_j      p = softmax(s)      o = sum_j p_j v_j
    causal: j <= i      window: i - window < j (and j < i + window where not causal)

**Forward.** A program holds BM queries of one head and walks over tiles of BN keys. It keeps, for each query, the
largest score so far m, the sum l of exp(s - m), and the output o not yet divided (Milakov & Gimelshein 2018). A new
tile with the largest score m' multiplies what was summed before by exp(m - m'): that is all it takes for the softmax
never to need a second look. Only o and L = m + log l leave the program: T H (d + 1) numbers, not T^2 H.

Two kernels do that: the one of this file, which runs everywhere, and on Hopper the one in ``packed/hopper.py``
for 16-bit heads of 64, 96 and 128, up to 1.4 times faster there. ``forward`` chooses by device, dtype, head size,
strides, and how long the documents are on average. ``flash_attention.cu`` is the forward pass in CUDA C++, to be read.

**Backward.** The gradient, its derivation and its kernels are in ``packed/backward.py``.

Exponentials are powers of two (the hardware's own), with log2(e) in the scale; L is kept in that unit.

Shapes: q ``[T, H, d]``, k and v ``[T, K, d]``, H a multiple of K, cu_seqlens ``[documents + 1]`` int32, result like q.
Softmax and sums in float32; p and ds are rounded to the inputs' dtype for the products, as every fused attention does.
Source: Dao et al. 2022, arXiv:2205.14135; Dao 2023, arXiv:2307.08691; Shah et al. 2024, arXiv:2407.08608.

Bound by arithmetic for documents of more than a few hundred tokens: 4 d FLOPs for each visible pair and head.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

from ... import shapes
from ...counting import visible_pairs
from ...lang import cuda
from ...lang.jit import INTERPRETED, TRITON_TARGETS, available, kernel, tl
from ...lang.tiles import dot
from ...numerics import compute_dtype, sample
from ...registry import Case, Cost, Implementation, Kernel, Op, Trace, register
from . import hopper as hopper
from .backward import backward as backward
from .backward import gradient_op
from .backward import kernels as backward_kernels
from .tiling import LOG2E, Tiling, check, descriptor, find_tile, fits_descriptor, load_tile, padded, seen


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


def exact(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = True, window: int | None = None
) -> Tensor:
    """``reference`` for real shapes: one document and one key head at a time, scores computed again for the
    gradient."""
    bounds = cu_seqlens.tolist()
    group = q.shape[1] // k.shape[1]
    documents = []
    for start, end in pairwise(bounds):
        alone = cu_seqlens.new_tensor([0, end - start])
        heads = []
        for head in range(k.shape[1]):
            inputs = (
                q[start:end, head * group : (head + 1) * group],
                k[start:end, head : head + 1],
                v[start:end, head : head + 1],
            )
            heads.append(checkpoint(reference, *inputs, alone, scale, causal, window, use_reentrant=False))
        documents.append(torch.cat(heads, 1))
    return torch.cat(documents)


# ---------------------------------------------------------------------------------------------------------- kernels


@kernel
def _walk_keys(  # type: ignore[no-untyped-def]
    acc, l, m, q, k, v, first, last, i, end, kv_head, k_t, k_h, v_t, v_h, scale2, window,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    MASK: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """The online softmax over the keys from ``first`` to ``last``."""
    for start in range(first, last, BN):
        keys = load_tile(k, start, end, kv_head, k_t, k_h, D, DP, BN, BULK)
        s = dot(q, keys.T, tl.zeros((q.shape[0], BN), tl.float32))
        if MASK:
            s = tl.where(
                seen(i[:, None], start + tl.arange(0, BN)[None, :], end, window, CAUSAL, WINDOW), s, -float("inf")
            )
        new_m = tl.maximum(m, tl.max(s, 1) * scale2)
        shift = new_m
        if MASK:
            shift = tl.where(new_m == -float("inf"), 0.0, new_m)  # nothing seen yet: exp2(-inf) is 0, not NaN
        p = tl.exp2(s * scale2 - shift[:, None])
        fade = tl.exp2(m - shift)
        l = l * fade + tl.sum(p, 1)
        acc = acc * fade[:, None]
        values = load_tile(v, start, end, kv_head, v_t, v_h, D, DP, BN, BULK)
        acc = dot(p.to(q.dtype), values, acc)
        m = new_m
    return acc, l, m


@kernel
def _forward(  # type: ignore[no-untyped-def]
    q, k, v, out, lse, cu, documents, tokens, scale2, window, q_t, q_h, k_t, k_h, v_t, v_h,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BULK: tl.constexpr,
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
        queries = load_tile(q, first_i, end, head, q_t, q_h, D, DP, BM, False)
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
                acc, l, m, queries, k, v, low, low_full, i, end, kv_head, k_t, k_h, v_t, v_h, scale2, window,
                D, DP, BN, CAUSAL, WINDOW, True, BULK,
            )  # fmt: skip
        acc, l, m = _walk_keys(
            acc, l, m, queries, k, v, low_full, high_full, i, end, kv_head, k_t, k_h, v_t, v_h, scale2, window,
            D, DP, BN, CAUSAL, WINDOW, False, BULK,
        )  # fmt: skip
        acc, l, m = _walk_keys(
            acc, l, m, queries, k, v, high_full, high, i, end, kv_head, k_t, k_h, v_t, v_h, scale2, window,
            D, DP, BN, CAUSAL, WINDOW, True, BULK,
        )  # fmt: skip
        d = tl.arange(0, DP)
        at = out + i[:, None].to(tl.int64) * (H * D) + head * D + d[None, :]
        tl.store(at, (acc / l[:, None]).to(out.dtype.element_ty), (i < end)[:, None] & (d < D)[None, :])
        tl.store(lse + head.to(tl.int64) * tokens + i, m + tl.log2(l), i < end)


# -------------------------------------------------------------------------------------------------------- launchers


def choose(q: Tensor) -> Tiling:
    """The tiling of this file's kernel. Measured on an H200; elsewhere a guess from the same numbers."""
    if INTERPRETED:
        return Tiling(16, 16, 1, 1)
    if q.element_size() == 4:
        return Tiling(32, 32, 4, 1)
    hopper = torch.cuda.get_device_capability(q.device)[0] >= 9
    # Two programs on a multiprocessor: one computes exponentials while the other has the tensor cores.
    return Tiling(64, 64, 4, 3, bulk=hopper)


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = True, window: int | None = None,
    *, tiling: Tiling | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """The result, and L ``[H, T]`` in powers of two, which the backward pass needs.

    By the Hopper kernel where it takes the inputs and pays (``flash_attention_hopper.takes``, ``.pays``); else, or
    where a ``tiling`` is given, by the kernel of this file.
    """
    q, k, v = check(q, k, v, cu_seqlens)
    if tiling is None and hopper.takes(q, k, v) and hopper.pays(q, len(cu_seqlens) - 1):
        return hopper.forward(q, k, v, cu_seqlens, scale, causal, window)
    tokens, heads, d = q.shape
    out = torch.empty((tokens, heads, d), dtype=q.dtype, device=q.device)
    lse = torch.empty((heads, tokens), dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    tiling = tiling or choose(q)
    bulk = tiling.bulk and fits_descriptor(k) and fits_descriptor(v)
    documents = len(cu_seqlens) - 1
    _forward[(tokens // tiling.bm + documents, heads)](
        q, descriptor(k, tiling.bn, bulk), descriptor(v, tiling.bn, bulk), out, lse, cu_seqlens, documents, tokens,
        scale * LOG2E, window or 0, *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], H=heads,
        GROUP=heads // k.shape[1], D=d, DP=padded(d), BM=tiling.bm, BN=tiling.bn, CAUSAL=causal,
        WINDOW=window is not None, BULK=bulk, num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    return out, lse


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = True, window: int | None = None
) -> Tensor:
    """As ``reference``, without holding scores."""
    return forward(q, k, v, cu_seqlens, scale, causal, window)[0]


def portable(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = True, window: int | None = None
) -> Tensor:
    """``flash_attention`` by the kernel of this file on every device."""
    return forward(q, k, v, cu_seqlens, scale, causal, window, tiling=choose(q))[0]


def cuda_refusal(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = True, window: int | None = None
) -> str | None:
    """Why ``flash_attention.cu`` does not take heads of this size, or None."""
    return None if q.shape[2] in (64, 128) else f"flash_attention.cu takes heads of 64 or 128, not of {q.shape[2]}"


def by_cuda(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = True, window: int | None = None
) -> Tensor:
    """``flash_attention`` by ``flash_attention.cu``: bfloat16 heads of 64 or 128, else ValueError."""
    q, k, v = check(q, k, v, cu_seqlens)
    reason = cuda_refusal(q, k, v, cu_seqlens, scale, causal, window)
    if not reason and any(t.dtype != torch.bfloat16 for t in (q, k, v)):
        reason = f"flash_attention.cu takes bfloat16, not {q.dtype}, {k.dtype} and {v.dtype}"
    if reason:
        raise ValueError(f"{reason}; use another implementation")
    q, k, v = (t if fits_descriptor(t) else cuda.aligned(t) for t in (q, k, v))  # it reads 16 bytes at a time
    tokens, heads, d = q.shape
    out = torch.empty((tokens, heads, d), dtype=q.dtype, device=q.device)
    lse = torch.empty((heads, tokens), dtype=torch.float32, device=q.device)
    cuda.launcher("flash_attention", "transect_flash_attention")(
        q, k, v, out, lse, cu_seqlens.contiguous(), len(cu_seqlens) - 1, tokens, heads, heads // max(1, k.shape[1]), d,
        *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], scale * LOG2E, int(causal), window or 0,
    )  # fmt: skip
    return out


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


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, cu_seqlens, scale, causal, window = inputs
    ctx.save_for_backward(q, k, v, cu_seqlens, *output)
    ctx.mark_non_differentiable(output[1])
    ctx.options = (scale, causal, window)


def _backward_op(ctx: Any, g: Tensor, _lse: Tensor | None) -> tuple[Tensor | None, ...]:
    q, k, v, cu_seqlens, out, lse = ctx.saved_tensors
    return (*gradient_op(g, q, k, v, out, lse, cu_seqlens, *ctx.options), None, None, None, None)


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


def _dense(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """``[documents, heads, n, d]`` where all documents have n tokens, else None. While a CUDA graph is recorded the
    lengths cannot be read: then they are taken to be equal, as they were in the call before it."""
    documents = len(cu_seqlens) - 1
    if not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        bounds = cu_seqlens.tolist()
        if len({end - start for start, end in pairwise(bounds)}) != 1 or bounds[-1] != q.shape[0]:
            return None
    first, second, third = (x.unflatten(0, (documents, -1)).transpose(1, 2) for x in (q, k, v))
    return first, second, third


def _peer(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = True, window: int | None = None
) -> Tensor:
    """torch's scaled_dot_product_attention, one document after another where their lengths differ."""
    attend: Any = functools.partial(F.scaled_dot_product_attention, scale=scale, enable_gqa=True)
    dense: Any = None if window is not None else _dense(q, k, v, cu_seqlens)
    if dense is not None:
        out: Tensor = attend(*dense, is_causal=causal)
        return out.transpose(1, 2).flatten(0, 1)
    outputs = []
    bounds = cu_seqlens.tolist()
    for start, end in pairwise(bounds):
        heads_first: Any = (x[start:end].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        mask = None
        if window is not None:
            position = torch.arange(end - start, device=q.device)
            distance = position[:, None] - position[None]
            mask = (distance.abs() < window) & ((distance >= 0) | (not causal))
        out = attend(*heads_first, attn_mask=mask, is_causal=causal and mask is None)
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def _equal_documents(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """A peer from ``compute(q, k, v, scale, causal)`` on ``[documents, heads, n, d]``."""

    def peer(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        scale: float,
        causal: bool = True,
        window: int | None = None,
    ) -> Tensor:
        dense = None if window is not None else _dense(q, k, v, cu_seqlens)
        if dense is None:
            raise ValueError("this peer takes documents of one length and no window: compare with the peer 'torch'")
        return compute(*dense, scale, causal).transpose(1, 2).flatten(0, 1)

    return peer


def _fused(backend: SDPBackend) -> Callable[..., Tensor]:
    def compute(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)

    return compute


@functools.cache
def _compiled_flex() -> tuple[Any, Any]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    return torch.compile(flex_attention), functools.cache(create_block_mask)


def _not_later(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    return query >= key


def _flex(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """torch's flex_attention, compiled."""
    attend, block_mask = _compiled_flex()
    mask = block_mask(_not_later, None, None, q.shape[2], k.shape[2], q.device) if causal else None
    out: Tensor = attend(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out


def _unfused(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """Two products and a softmax, with all scores in memory."""
    group = q.shape[1] // k.shape[1]
    scores = q * scale @ k.repeat_interleave(group, 1).transpose(-1, -2)
    if causal:
        position = torch.arange(q.shape[2], device=q.device)
        scores = scores.masked_fill_(position[:, None] < position[None], -torch.inf)
    return scores.softmax(-1) @ v.repeat_interleave(group, 1)


def _examples() -> Sequence[dict[str, Any]]:
    examples = []
    for lengths, heads, kv_heads, d, causal, window in (
        ((1,), 1, 1, 8, True, None),
        ((5, 1, 37), 4, 2, 16, True, None),
        ((33, 20), 2, 1, 10, False, None),
        ((3, 50, 2), 4, 1, 16, True, 9),
        ((40, 7), 2, 2, 24, False, 18),
        ((70, 1, 3), 2, 1, 64, True, None),
        ((37,), 1, 1, 96, False, None),
        ((50,), 2, 1, 128, True, 20),
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


def _cases() -> Sequence[Case]:
    def make(
        device: torch.device, seed: int, lengths: tuple[int, ...], heads: int, kv_heads: int, d: int, causal: bool
    ) -> Mapping[str, Any]:
        generator = torch.Generator(device).manual_seed(seed)
        q, k, v = (
            torch.randn(sum(lengths), h, d, device=device, dtype=torch.bfloat16, generator=generator)
            for h in (heads, kv_heads, kv_heads)
        )
        cu_seqlens = torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32).to(device)
        return {"q": q, "k": k, "v": v, "cu_seqlens": cu_seqlens, "scale": d**-0.5, "causal": causal}

    table = [
        (f"16 heads of 128, {documents} x {length}, {'causal' if causal else 'full'}", documents * (length,), 16, 16,
         128, causal)
        for documents, length in ((4, 4096), (1, 16384))
        for causal in (True, False)
    ]  # fmt: skip
    models: dict[tuple[int, int, int], list[str]] = {}
    for model in shapes.MODELS:
        models.setdefault((model.n_heads, model.n_kv_heads, model.head_dim), []).append(model.name)
    table += [
        (f"{', '.join(names)}, {8192 // length} x {length}, causal", (8192 // length) * (length,), *sizes, True)
        for sizes, names in models.items()
        for length in (8192, 1024)
    ]
    return [
        Case(name, functools.partial(make, lengths=lengths, heads=heads, kv_heads=kv_heads, d=d, causal=causal))
        for name, lengths, heads, kv_heads, d, causal in table
    ]


def _kernels() -> Sequence[Kernel]:
    strides = dict.fromkeys(("q_t", "q_h", "k_t", "k_h", "v_t", "v_h"), "i32")
    half = dict.fromkeys(("q", "k", "v"), "*bf16")
    ints: dict[str, str] = {"cu": "*i32", "documents": "i32", "tokens": "i32", "window": "i32", **strides}
    base = {"H": 32, "GROUP": 4, "D": 128, "DP": 128, "CAUSAL": True, "WINDOW": False, "BULK": False}
    forward_kernel = Kernel(
        name="forward",
        function=_forward,
        arguments={**half, "out": "*bf16", "lse": "*fp32", "scale2": "fp32", **ints},
        constants={**base, "BM": 128, "BN": 64},
        divisible=tuple(strides),
        warps=8,
        stages=2,
        targets=TRITON_TARGETS,
    )
    bulk = dict.fromkeys(("k", "v"), "tensordesc<bf16[128, 1, 128]>")
    return [
        forward_kernel,
        replace(
            forward_kernel,
            name="forward_bulk",
            arguments={**forward_kernel.arguments, **bulk},
            constants={**forward_kernel.constants, "BN": 128, "BULK": True},
            targets=("sm_90",),
        ),
        *hopper.kernels(),
        *backward_kernels(),
    ]


def _trace() -> Trace:
    def arguments() -> Mapping[str, Any]:
        q, k, v = (sample(12, 1, 16, seed=seed) for seed in range(3))
        return {"q": q, "k": k, "v": v, "cu_seqlens": torch.tensor([0, 12], dtype=torch.int32), "scale": 0.25}

    return Trace(
        arguments,
        functools.partial(forward, tiling=Tiling(4, 4, 1, 1)),
        ("_walk_keys", "start", "fade", "l", "m"),
        "m, the largest score so far, only grows; when it does, l, the sum of powers of 2, and what was summed of v "
        "are multiplied by fade.",
    )


register(
    Op(
        name="flash_attention",
        reference=reference,
        cost=cost,
        gradient_cost=gradient_cost,
        implementations={
            "hopper": Implementation(
                "triton",
                hopper.available(hopper.flash_attention),
                ("sm_90",),
                batch_invariant=True,
                autograd=hopper.available(flash_attention_autograd),
                dtypes=("bfloat16", "float16"),
                refusal=hopper.refusal,
            ),
            "triton": Implementation(
                "triton",
                available(portable),
                TRITON_TARGETS,
                batch_invariant=True,
                autograd=available(flash_attention_autograd),
            ),
            "cuda": Implementation(
                "cuda",
                cuda.available("flash_attention", by_cuda),
                cuda.CUDA_TARGETS,
                batch_invariant=True,
                dtypes=("bfloat16",),
                refusal=cuda_refusal,
                source="flash_attention.cu",
            ),
        },
        examples=_examples,
        peers={
            "torch": _peer,
            "cudnn": _equal_documents(_fused(SDPBackend.CUDNN_ATTENTION)),
            "flash2": _equal_documents(_fused(SDPBackend.FLASH_ATTENTION)),
            "flex": _equal_documents(_flex),
            "unfused": _equal_documents(_unfused),
        },
        differentiable=("q", "k", "v"),
        cases=_cases,
        kernels=_kernels,
        trace=_trace,
        exact=exact,
    )
)
