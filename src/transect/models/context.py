"""Location of a step's keys and values, and attention over them: the only difference between training and serving.

The model hands each layer's q, k and v to an ``AttentionContext`` and gets the attended values back. ``VarlenContext``
keeps nothing: packed documents that see only themselves (training, whole prompts), with gradients. ``PagedContext``
writes k and v into the paged cache and attends through block tables (serving).

Shapes: T tokens of the step, H query heads, K key heads, d head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from ..ops.attention.packed.attention import by_document
from ..ops.attention.paged.batch import PagedBatch
from ..ops.opset import OpSet, resolve_ops


class AttentionContext(Protocol):
    """Description of a batch for ``Attention``."""

    def positions(self) -> Tensor:
        """Return the position of each token in its sequence, ``[T]`` int64."""
        ...

    @property
    def wanted(self) -> Wanted | None:
        """Tokens whose hidden states are needed; None for all."""
        ...

    def attend(
        self,
        layer: int,
        q_THd: Tensor,
        k_TKd: Tensor,
        v_TKd: Tensor,
        scale: float,
        window: int | None,
        *,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        chunk: int | None = None,
    ) -> Tensor:
        """Compute causal attention of one layer -> ``[T, H, d]``; ``softcap``, ``sinks`` and ``chunk`` (the layer's) as
        in ``ModelConfig``."""
        ...


@dataclass(frozen=True, slots=True)
class Wanted:
    """The R of a step's T tokens whose hidden states the model is to return, each the last of its sequence.

    The last layer then computes keys and values for all tokens, and everything else for these.
    """

    tokens_R: Tensor
    """int32 or int64: index into the step's tokens."""
    batch: PagedBatch
    """The sequences of these tokens, a row of one query for each."""


@dataclass(frozen=True, slots=True)
class WholePrompts:
    """Start of the sequences whose first token is part of the step: none of their tokens is cached."""

    row: int
    """First row of these sequences; all later rows are of this kind."""
    token: int
    """First token of these sequences."""


class VarlenContext:
    """Packed documents: document i is the tokens from ``cu_seqlens[i]`` to before ``cu_seqlens[i + 1]``.

    ``cu_seqlens`` ``[documents + 1]`` int32 on the device of the model, first 0, last T. ``ops`` defaults to the torch
    set for that device; pass ``model.ops`` to run what the model runs.
    """

    wanted = None

    def __init__(self, cu_seqlens: Tensor, ops: OpSet | None = None) -> None:
        if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2 or cu_seqlens.dtype != torch.int32:
            raise ValueError(
                "cu_seqlens must be a vector of int32, 0 and then where each document ends, not "
                f"{cu_seqlens.dtype} of shape {list(cu_seqlens.shape)}"
            )
        self.cu_seqlens = cu_seqlens
        self.ops = ops or resolve_ops(cu_seqlens.device)

    def positions(self) -> Tensor:
        """Return the position of each token in its document, ``[T]`` int64."""
        starts, lengths = self.cu_seqlens[:-1].long(), self.cu_seqlens.diff().long()
        index = torch.arange(int(self.cu_seqlens[-1]), device=self.cu_seqlens.device)
        return index - starts.repeat_interleave(lengths)

    def attend(
        self,
        layer: int,
        q_THd: Tensor,
        k_TKd: Tensor,
        v_TKd: Tensor,
        scale: float,
        window: int | None,
        *,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        chunk: int | None = None,
    ) -> Tensor:
        """Attend within each document; see ``AttentionContext.attend``."""
        if softcap is not None or sinks is not None or chunk is not None:
            how: dict[str, Any] = {"softcap": softcap, "sinks": sinks, "chunk": chunk}
            return by_document(q_THd, k_TKd, v_TKd, self.cu_seqlens, scale, window, **how)
        return self.ops.attention(q_THd, k_TKd, v_TKd, self.cu_seqlens, scale, window)


class PagedContext:
    """A ragged batch over a paged KV cache.

    ``k_cache`` and ``v_cache`` ``[n_layers, n_blocks, K, block_size, d]``. Row b of the batch is one sequence:
    ``block_tables_BN[b]`` int32 its blocks in order, ``seq_lens_B[b]`` int32 its tokens with this step's; its tokens of
    this step, ``query_starts_B1[b]`` to before ``query_starts_B1[b + 1]`` (int32), are its last. ``ops`` as in
    ``VarlenContext``; ``max_query_len`` and ``fresh`` as in ``PagedBatch``. Slots that no row owns are never looked at.

    ``whole``: rows whose keys and values are all in this step attend to those, not to the cache. ``wanted``: see there.
    ``chunk_rows``: as in ``PagedBatch``. ``positions_T`` int64: the tokens' positions, where they have been computed
    already; a CUDA graph needs them given, because the batch reads lengths on the host for that.
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
        whole: WholePrompts | None = None,
        wanted: Wanted | None = None,
        chunk_rows: int | None = None,
        positions_T: Tensor | None = None,
        fresh: bool = False,
    ) -> None:
        if k_cache.ndim != 5 or k_cache.shape != v_cache.shape:
            raise ValueError(
                "k_cache and v_cache must be [layers, blocks, kv heads, block size, head size], not "
                f"{list(k_cache.shape)} and {list(v_cache.shape)}"
            )
        self.k_cache = k_cache
        self.v_cache = v_cache
        self._asked: tuple[int, tuple[Tensor, Tensor]] | None = None
        self.batch = PagedBatch(
            block_tables_BN,
            query_starts_B1,
            seq_lens_B,
            k_cache.shape[3],
            max_query_len=max_query_len,
            fresh=fresh,
            chunk_rows=chunk_rows,
        )
        self.ops = ops or resolve_ops(k_cache.device)
        self.whole = whole
        self.wanted = wanted
        self._positions_T = positions_T
        if whole is not None:
            row, token = whole.row, whole.token
            self._whole_starts = query_starts_B1[row:] - token
            self._others = PagedBatch(
                block_tables_BN[:row],
                query_starts_B1[: row + 1],
                seq_lens_B[:row],
                k_cache.shape[3],
                max_query_len=1 if row == token else token,
            )

    def positions(self) -> Tensor:
        """Return the position of each token in its sequence, ``[T]`` int64."""
        return self.batch.positions_T if self._positions_T is None else self._positions_T

    def caches(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of one layer, ``[n_blocks, K, block_size, d]`` each; a layer asks twice."""
        if self._asked is None or self._asked[0] != layer:
            self._asked = layer, (self.k_cache[layer], self.v_cache[layer])
        return self._asked[1]

    def attend(
        self,
        layer: int,
        q_THd: Tensor,
        k_TKd: Tensor,
        v_TKd: Tensor,
        scale: float,
        window: int | None,
        *,
        softcap: float | None = None,
        sinks: Tensor | None = None,
        chunk: int | None = None,
    ) -> Tensor:
        """Write k and v to the cache, then attend; see ``AttentionContext.attend``."""
        self.ops.kv_cache_write(k_TKd, v_TKd, *self.caches(layer), self.batch)
        given = {"softcap": softcap, "sinks": sinks, "chunk": chunk}
        how = {name: value for name, value in given.items() if value is not None}
        return self.attend_written(layer, q_THd, k_TKd, v_TKd, scale, window, **how)

    def attend_written(
        self, layer: int, q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, scale: float, window: int | None, **how: Any
    ) -> Tensor:
        """Attend like ``attend`` with k and v that are already in the cache. ``how``: ``softcap``, ``sinks`` and
        ``chunk``, if the model has them; with them whole prompts go through the cache too."""
        caches = self.caches(layer)
        if self.whole is None or how:
            return self.ops.paged_attention(q_THd, *caches, self.batch, scale, window, **how)
        first = self.whole.token
        prompts = (x[first:] for x in (q_THd, k_TKd, v_TKd)) if first else (q_THd, k_TKd, v_TKd)
        attended = self.ops.attention(*prompts, self._whole_starts, scale, window)
        if not first:
            return attended
        return torch.cat((self.ops.paged_attention(q_THd[:first], *caches, self._others, scale, window), attended))
