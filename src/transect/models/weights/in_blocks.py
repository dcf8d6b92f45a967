"""Join matrices whose rows are arranged in blocks, such as those of ``GGUFBlocks`` and ``ServingInt4``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def join_blocks(parts: Sequence[Any], block: int, dim: int, *, gated: bool) -> tuple[Tensor, bool] | None:
    """Join the rows of weights with equal arrangement in one storage: (its ``arranged``, True if blocks alternate);
    None if they cannot be joined. The parts' own ``arranged`` become views of it.

    Args:
        block: rows of a block.
        dim: of ``arranged``, along which blocks of rows follow one another.
        gated: blocks of two equal parts may alternate, as a product with a gate needs them.
    """
    biases = [part.bias for part in parts if part.bias is not None]
    if len(biases) not in (0, len(parts)) or any(part.out_features % block for part in parts[:-1]):
        return None
    in_turns = gated and not biases and len({part.shape for part in parts}) == 1
    in_turns = in_turns and parts[-1].out_features % block == 0
    held = [part.arranged for part in parts]
    if in_turns:
        whole = torch.stack(held, dim + 1).flatten(dim, dim + 1)
        before = (slice(None),) * dim
        views: Sequence[Tensor] = [whole[(*before, slice(turn, None, len(parts)))] for turn in range(len(parts))]
    else:
        whole = torch.cat(held, dim)
        views = whole.split([each.shape[dim] for each in held], dim)
    for part, view in zip(parts, views, strict=True):
        part.arranged = view
    return whole, in_turns
