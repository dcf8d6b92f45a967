"""Hidden states between the layers of a model, for heads that draft its next tokens (EAGLE-3, ``eagle.py``).

A stack calls ``take`` with the residual stream in front of each layer in ``layers``. ``Features`` combines the states
of a step to one vector a token, and keeps it beside the token's keys and values: in the same block, at the same offset.
So whatever holds for a block (the prefix cache, forks, copies, preemption) holds for the features in it.

Shapes: T tokens of a step, D model dim, E width of a feature.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ..ops.attention.paged.batch import PagedBatch
from .context import AttentionContext, PagedContext


class LayerTaps:
    """Hidden states of a pass, as its stack reaches some layers.

    Args:
        layers: numbers of the layers whose inputs are taken, ascending.
    """

    def __init__(self, layers: Sequence[int]) -> None:
        self.layers = tuple(layers)
        self.states: list[Tensor] = []
        """Inputs ``[T, D]`` of the layers of the newest pass."""

    def take(self, layer: int, x_TD: Tensor, *, reused: bool = False) -> None:
        """Take the residual stream in front of a layer, if it is one of ``layers``. ``reused``: a later layer may write
        to this memory."""
        if layer in self.layers:
            x_TD = x_TD.clone() if reused else x_TD
            self.states = [x_TD] if layer == self.layers[0] else [*self.states, x_TD]

    def keep(self, context: AttentionContext) -> None:
        """Finish a pass."""

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy what belongs to blocks of the KV cache, as they are copied. ``copies``: (from, to) of each."""


class Features(LayerTaps):
    """A feature of each cached token.

    Args:
        combine: function of the states of a step, concatenated ``[T, 3 D]``, to features ``[T, E]``.
    """

    def __init__(self, layers: Sequence[int], combine: Callable[[Tensor], Tensor]) -> None:
        super().__init__(layers)
        self._combine = combine
        self.kept: Tensor | None = None
        """Features ``[blocks, block size, E]``; None until there is a KV cache, and nothing is kept."""

    def allocate(self, blocks: int, block_size: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        """Make room beside a KV cache; ``blocks`` of it. Steps that have padding write it to the last block."""
        self.kept = torch.zeros(blocks, block_size, width, dtype=dtype, device=device)

    def keep(self, context: AttentionContext) -> None:
        """Combine the states of a pass, and write the features of its tokens."""
        states, self.states = self.states, []
        if self.kept is None or not isinstance(context, PagedContext):
            return
        features_TE = self._combine(torch.cat(states, -1))
        # The halves of a feature are written as keys and values of one head are.
        half = self.kept.shape[-1] // 2
        first, second = (part[:, None] for part in features_TE.split((half, half), -1))
        places = self.kept[..., :half].unsqueeze(1), self.kept[..., half:].unsqueeze(1)
        context.ops.kv_cache_write(first, second, *places, context.batch)

    def read(self, batch: PagedBatch, positions_T: Tensor) -> Tensor:
        """Return the features ``[T, E]`` of a step's tokens. A CUDA graph may hold this."""
        assert self.kept is not None
        rows_T = _rows(batch, len(positions_T))
        blocks_T = batch.block_tables[rows_T, positions_T.long() // batch.block_size]
        return self.kept[blocks_T.long(), positions_T.long() % batch.block_size]

    def write(self, features_RE: Tensor, tables_RN: Tensor, positions_R: Tensor) -> None:
        """Write the features that a head expects at positions whose tokens the model has not computed.

        ``tables_RN`` int32: the block table of each; ``positions_R`` int64. Positions below 1, which have no such
        feature, are padding.
        """
        assert self.kept is not None
        size, before_R = self.kept.shape[1], positions_R.clamp(min=0)
        blocks_R = tables_RN.gather(1, (before_R // size)[:, None])[:, 0].long()
        blocks_R = torch.where(positions_R > 0, blocks_R, self.kept.shape[0] - 1)
        self.put(features_RE, blocks_R, before_R % size)

    def put(self, features_RE: Tensor, blocks_R: Tensor, offsets_R: Tensor) -> None:
        """Write features to these blocks and offsets, int64."""
        assert self.kept is not None
        self.kept[blocks_R, offsets_R] = features_RE.to(self.kept.dtype)

    def copy(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy features; see ``LayerTaps.copy``."""
        if copies and self.kept is not None:
            pairs = torch.tensor(copies).to(self.kept.device)
            self.kept[pairs[:, 1]] = self.kept[pairs[:, 0]]


def _rows(batch: PagedBatch, tokens: int) -> Tensor:
    """Return the row of each of a step's tokens, int64; any row for tokens of no row."""
    starts_B1 = batch.query_starts
    index_T = torch.arange(tokens, dtype=starts_B1.dtype, device=starts_B1.device)
    if batch.decodes_only(tokens):
        return index_T.long()
    rows_T = torch.searchsorted(starts_B1[1:].contiguous(), index_T, right=True)
    return rows_T.clamp(max=batch.num_rows - 1)
