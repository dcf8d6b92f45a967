r"""Causal attention over packed documents of different lengths (varlen), with grouped heads and a sliding window.

Documents lie one after another in the token axis; ``cu_seqlens`` holds where each begins, and the end. A query at
position i of its document sees the keys j of the same document with i - window < j <= i. Query head h reads key head
h // (H / K). For each query and head:

    s_j = scale * q . k_j        p = softmax(s)        o = sum_j p_j v_j

Backward, with g = dL/do and D = g . o:

    dL/dv_j = sum over queries of p_j g         dL/ds_j = p_j (g . v_j - D)
    dL/dq = scale * sum_j dL/ds_j k_j           dL/dk_j = scale * sum over queries of dL/ds_j q
    (dk and dv add up over the query heads that share a key head)

Shapes: q ``[T, H, d]``, k and v ``[T, K, d]``, cu_seqlens ``[documents + 1]`` int32, result like q. Softmax in float32.
Source: Vaswani et al. 2017, arXiv:1706.03762; grouped heads: Ainslie et al. 2023, arXiv:2305.13245; window: Beltagy et
al. 2020, arXiv:2004.05150.

Bound by arithmetic when documents are long: a document of n tokens takes about 2 n^2 H d FLOPs (4 d for each of its
n^2 / 2 visible pairs) and, without storing scores (Dao et al. 2022, arXiv:2205.14135), moves 2 n d (H + K) elements:
n H / (2 (H + K)) FLOPs per byte in bfloat16, 512 tokens with H = K giving 128.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....costs.work import Cost, visible_pairs
from ...cpu import gradients
from ...lang.jit import TRITON_TARGETS, available
from ...numerics import compute_dtype, sample
from ...registry import Implementation, Op, in_torch, register


def reference(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, window: int | None = None) -> Tensor:
    """Compute attention, shapes as above: ``-> [T, H, d]``, by way of all T x T scores."""
    dtype = compute_dtype(q.dtype)
    group = q.shape[1] // k.shape[1]
    keys = k.to(dtype).repeat_interleave(group, dim=1)
    values = v.to(dtype).repeat_interleave(group, dim=1)
    scores = torch.einsum("thd,shd->hts", q.to(dtype), keys) * scale
    token = torch.arange(q.shape[0], device=q.device)
    document = torch.searchsorted(cu_seqlens[1:].contiguous(), token, right=True)
    visible = (document[:, None] == document[None]) & _band(token, token, window)
    p = scores.masked_fill(~visible, -torch.inf).softmax(-1)
    return torch.einsum("hts,shd->thd", p, values).to(q.dtype)


def by_document(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int | None = None,
    *,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    chunk: int | None = None,
) -> Tensor:
    """Compute ``reference`` document by document with torch's fused attention.

    Only the scores of one document exist at a time.

    With ``softcap``, scores become ``softcap * tanh(s / softcap)`` first (Gemma 2, arXiv:2408.00118). ``sinks`` ``[H]``
    are additional scores in the softmax, without a value (gpt-oss, arXiv:2508.10925). With ``chunk`` a query sees only
    the tokens of its own chunk of ``chunk`` positions (Llama 4).
    """
    outputs = []
    bounds = cu_seqlens.tolist()
    for start, end in pairwise(bounds):
        mask = None
        if softcap is not None or sinks is not None or chunk is not None:
            own = q[start:end], k[start:end], v[start:end]
            outputs.append(_with_scores(*own, scale, window, softcap, sinks, chunk))
            continue
        q_HTd, k_KTd, v_KTd = (x[start:end].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        if window is not None and end - start > window:
            position = torch.arange(end - start, device=q.device)
            mask = _band(position, position, window)
        out = F.scaled_dot_product_attention(
            q_HTd,
            k_KTd,
            v_KTd,
            attn_mask=mask,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=q.shape[1] != k.shape[1],
        )
        outputs.append(out[0].transpose(0, 1))
    return torch.cat(outputs)


def _with_scores(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks: Tensor | None,
    chunk: int | None,
) -> Tensor:
    """Attend within one document whose scores are capped, share the softmax with sinks, or end with chunks."""
    dtype = compute_dtype(q.dtype)
    group = q.shape[1] // k.shape[1]
    keys, values = (x.to(dtype).repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("thd,shd->hts", q.to(dtype), keys) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    position = torch.arange(len(q), device=q.device)
    seen = _band(position, position, window)
    if chunk is not None:
        seen &= (position // chunk)[:, None] == (position // chunk)[None]
    scores = scores.masked_fill(~seen, -torch.inf)
    if sinks is not None:
        column = sinks.to(dtype)[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, column], dim=-1)
    p = scores.softmax(-1)[:, :, : len(q)]
    return torch.einsum("hts,shd->thd", p, values).to(q.dtype)


def _band(query: Tensor, key: Tensor, window: int | None) -> Tensor:
    """Build the mask of the keys (columns) that the queries (rows) may see by position."""
    distance = query[:, None] - key[None]
    return (distance >= 0) if window is None else (distance >= 0) & (distance < window)


def cost(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, window: int | None = None) -> Cost:
    """Count 4 d FLOPs for each visible pair and head, without the softmax. ``cu_seqlens`` must hold its values."""
    bounds = cu_seqlens.tolist()
    pairs = sum(visible_pairs(end - start, end - start, window) for start, end in pairwise(bounds))
    return Cost(4 * pairs * q.shape[1] * q.shape[2], q.nbytes + k.nbytes + v.nbytes, q.nbytes)


def _examples() -> Sequence[dict[str, Any]]:
    examples = []
    for lengths, heads, kv_heads, size, window in (
        ((1,), 1, 1, 8, None),
        ((5, 1, 37), 6, 2, 16, None),
        ((3, 70, 2), 4, 1, 10, 9),
        ((8, 8), 2, 2, 4, 8),
    ):
        tokens = sum(lengths)
        examples.append(
            {
                "q": 2 * sample(tokens, heads, size),
                "k": sample(tokens, kv_heads, size, seed=1),
                "v": sample(tokens, kv_heads, size, seed=2),
                "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0, dtype=torch.int32),
                "scale": size**-0.5,
                "window": window,
            }
        )
    return examples


def _triton() -> Callable[..., Tensor]:
    from . import flash_attention

    return available(flash_attention.attention)()


def _triton_autograd() -> Callable[..., Tensor]:
    from . import flash_attention

    return available(flash_attention.attention_autograd)()


register(
    Op(
        name="attention",
        reference=reference,
        cost=cost,
        implementations={
            "torch": in_torch(by_document, batch_invariant=True),
            "cpu": gradients.implementation(gradients.attention, by_document),
            "triton": Implementation(
                "triton", _triton, TRITON_TARGETS, batch_invariant=True, autograd=_triton_autograd
            ),
        },
        examples=_examples,
        differentiable=("q", "k", "v"),
        measured_as=("flash_attention",),
        error_ratio=3.0,
        error_note="p and ds are rounded for the products, as in every fused attention; the yardstick here is the "
        "reference, which rounds its result only",
    )
)
