"""Define the peers of ``flash_attention.py``: torch's attention, in its several forms."""

from __future__ import annotations

import functools
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel


def of_one_length(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
    """Reshape to ``[documents, heads, n, d]`` if all documents have n tokens, else return None. While a CUDA graph is
    recorded the lengths cannot be read: they are then assumed equal, as they were in the call before it."""
    documents = len(cu_seqlens) - 1
    if not (q.is_cuda and torch.cuda.is_current_stream_capturing()):
        bounds = cu_seqlens.tolist()
        if len({end - start for start, end in pairwise(bounds)}) != 1 or bounds[-1] != q.shape[0]:
            return None
    first, second, third = (x.unflatten(0, (documents, -1)).transpose(1, 2) for x in (q, k, v))
    return first, second, third


def torchs(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = True, window: int | None = None
) -> Tensor:
    """Call torch's scaled_dot_product_attention, once for each document if their lengths differ."""
    attend: Any = functools.partial(F.scaled_dot_product_attention, scale=scale, enable_gqa=True)
    dense: Any = None if window is not None else of_one_length(q, k, v, cu_seqlens)
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


def equal_documents(compute: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return a peer from ``compute(q, k, v, scale, causal)`` on ``[documents, heads, n, d]``."""

    def peer(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens: Tensor,
        scale: float,
        causal: bool = True,
        window: int | None = None,
    ) -> Tensor:
        dense = None if window is not None else of_one_length(q, k, v, cu_seqlens)
        if dense is None:
            raise ValueError("this peer takes documents of one length and no window: compare with the peer 'torch'")
        return compute(*dense, scale, causal).transpose(1, 2).flatten(0, 1)

    return peer


def fused(backend: SDPBackend) -> Callable[..., Tensor]:
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


def flex(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """Call torch's flex_attention, compiled."""
    attend, block_mask = _compiled_flex()
    mask = block_mask(_not_later, None, None, q.shape[2], k.shape[2], q.device) if causal else None
    out: Tensor = attend(q, k, v, block_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
    return out


def unfused(q: Tensor, k: Tensor, v: Tensor, scale: float, causal: bool) -> Tensor:
    """Compute two products and a softmax, with all scores in memory."""
    group = q.shape[1] // k.shape[1]
    scores = q * scale @ k.repeat_interleave(group, 1).transpose(-1, -2)
    if causal:
        position = torch.arange(q.shape[2], device=q.device)
        scores = scores.masked_fill_(position[:, None] < position[None], -torch.inf)
    return scores.softmax(-1) @ v.repeat_interleave(group, 1)
