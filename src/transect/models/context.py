"""Where a step's keys and values are, and how attention reaches them: all that training and serving differ in.

The model hands each layer's q, k and v to an ``AttentionContext`` and gets the attended values back. ``VarlenContext``
keeps nothing: packed documents that see only themselves (training, whole prompts), with gradients. ``PagedContext``
writes k and v into the paged cache and attends through block tables (serving).

Shapes: T tokens of the step, H query heads, K key heads, d head size.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ..ops.opset import OpSet, resolve_ops
from ..ops.paged_batch import PagedBatch


class AttentionContext(Protocol):
    """What ``Attention`` needs to know about the batch."""

    def attend(
        self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """Causal attention of one layer -> ``[T, H, d]``."""
        ...


class VarlenContext:
    """Packed documents: document i is the tokens from ``cu_seqlens[i]`` to before ``cu_seqlens[i + 1]``.

    ``cu_seqlens`` ``[documents + 1]`` int32 on the device of the model, first 0, last T. ``ops`` defaults to the torch
    set for that device; pass ``model.ops`` to run what the model runs.
    """

    def __init__(self, cu_seqlens: Tensor, ops: OpSet | None = None) -> None:
        if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype != torch.int32:
            raise ValueError(
                "cu_seqlens must be a vector of int32, 0 and then where each document ends, not "
                f"{cu_seqlens.dtype} of shape {list(cu_seqlens.shape)}"
            )
        self.cu_seqlens = cu_seqlens
        self.ops = ops or resolve_ops(cu_seqlens.device)

    def positions(self) -> Tensor:
        """The position of each token in its document, ``[T]`` int64."""
        starts, lengths = self.cu_seqlens[:-1].long(), self.cu_seqlens.diff().long()
        index = torch.arange(int(self.cu_seqlens[-1]), device=self.cu_seqlens.device)
        return index - starts.repeat_interleave(lengths)

    def attend(
        self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """See ``AttentionContext.attend``."""
        return self.ops.attention(q_THd, k_TKd, v_TKd, self.cu_seqlens, scale, window)


class PagedContext:
    """A ragged batch over a paged KV cache.

    ``k_cache`` and ``v_cache`` ``[n_layers, n_blocks, K, block_size, d]``. Row b of the batch is one sequence:
    ``block_tables_BN[b]`` int32 its blocks in order, ``seq_lens_B[b]`` int32 its tokens with this step's; its tokens of
    this step, ``query_starts_B1[b]`` to before ``query_starts_B1[b + 1]`` (int32), are its last. ``ops`` as in
    ``VarlenContext``; ``max_query_len`` as in ``PagedBatch``. Slots that no row owns are never looked at.
    """

    def __init__(
        self,
        k_cache: Tensor,
        v_cache: Tensor,
        block_tables_BN: Tensor,
        query_starts_B1: Tensor,
        seq_lens_B: Tensor,
        ops: OpSet | None = None,
        *,
        max_query_len: int | None = None,
    ) -> None:
        if k_cache.ndim != 5 or k_cache.shape != v_cache.shape:
            raise ValueError(
                "k_cache and v_cache must be [layers, blocks, kv heads, block size, head size], not "
                f"{list(k_cache.shape)} and {list(v_cache.shape)}"
            )
        self.k_cache = k_cache
        self.v_cache = v_cache
        self.batch = PagedBatch(
            block_tables_BN, query_starts_B1, seq_lens_B, k_cache.shape[3], max_query_len=max_query_len
        )
        self.ops = ops or resolve_ops(k_cache.device)

    def positions(self) -> Tensor:
        """The position of each token in its sequence, ``[T]`` int64."""
        return self.batch.positions_T

    def attend(
        self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, scale: float, window: int | None
    ) -> Tensor:
        """See ``AttentionContext.attend``; k and v are written to the cache first."""
        k_cache, v_cache = self.k_cache[layer], self.v_cache[layer]
        self.ops.kv_cache_write(k_TKd, v_TKd, k_cache, v_cache, self.batch)
        return self.ops.paged_attention(q_THd, k_cache, v_cache, self.batch, scale, window)
