"""Tables with more rows than their files, for added tokens."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from ..models.staging import dense_values
from ..models.stored import Stored, StoredWeights


def grown_tables(weights: StoredWeights, rows: int) -> StoredWeights:
    """Yield the weights with an embedding and a head of ``rows`` rows.

    A new row is the mean of those that are there.
    """
    for name, stored in weights:
        if name in ("embed.weight", "head.weight") and stored.shape[0] < rows:
            yield name, Stored((rows, *stored.shape[1:]), partial(_read, stored, rows))
        else:
            yield name, stored


def _read(stored: Stored, wanted: int, rows: slice, columns: slice) -> Tensor:
    table = dense_values(stored.read())
    mean = table.float().mean(0, keepdim=True).to(table.dtype)
    return torch.cat([table, mean.expand(wanted - table.shape[0], -1)])[rows, columns]
