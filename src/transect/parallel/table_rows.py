"""``TableRows``: the gradient of a table that embedding and head share, whose two parts are sent separately.

The head's part is dense, and the first gradient of a backward pass. The embedding's part has one row for each token,
and is the last. Added up before they travel, the largest gradient of a small model would have nothing beside it on its
way. So the head's part travels as soon as it is there, and at the end the ranks exchange rows:

    dW = sum over ranks of the head's part + sum over the tokens t of all ranks of g_t, in row id_t

Every rank adds the same rows in the same order, so all get the same bits. Where the ranks have more tokens than the
table has rows, a dense sum of the embedding's parts sends less, and takes their place.

Shapes: ids ``[T]`` int64 and gradients ``[T, D]``, in the model's dtype, of one rank; a table ``[V, D]``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..models.decoder import Decoder
from ..models.embedding import Embedding
from .group import Group


class TableRows:
    """One rank's rows. It replaces the row gathering of ``embed``.

    Args:
        name: of the table's parameter.
    """

    def __init__(self, name: str, embed: Embedding) -> None:
        self.name = name
        self._anchor = torch.empty(0, device=embed.weight.device, requires_grad=True)
        self._ids: list[Tensor] = []
        self._gradients: list[Tensor] = []
        self._apart = False
        embed.lookup = self._look_up

    @contextmanager
    def apart(self) -> Iterator[None]:
        """Enclose a forward and backward pass whose rows are kept here, not added to the weight's gradient."""
        self._apart = True
        try:
            yield
        finally:
            self._apart = False

    @property
    def count(self) -> int:
        """Number of rows kept."""
        return sum(len(ids) for ids in self._ids)

    def clear(self) -> None:
        """Drop the rows."""
        self._ids, self._gradients = [], []

    def exchange(self, group: Group, counts: Sequence[int], like: Tensor, dtype: torch.dtype) -> _Rows | Tensor | None:
        """Return the rows of all ranks, for ``add``. All ranks call it; None if no rank has a row.

        Args:
            counts: rows of each rank. like: the table. dtype: that sums are made in.
        """
        most = max(counts)
        if not most:
            return None
        vocab, dim = like.shape
        ids = torch.zeros(most, dtype=torch.int64, device=like.device)
        gradients = torch.zeros(most, dim, dtype=like.dtype, device=like.device)  # what is not filled adds nothing
        if self._ids:
            torch.cat(self._ids, out=ids[: self.count])
            torch.cat(self._gradients, out=gradients[: self.count])
        if most * group.size > vocab:
            return group.all_reduce(_summed(gradients.to(dtype), ids, vocab))
        ids, gradients = group.all_gather(ids).flatten(), group.all_gather(gradients).flatten(0, 1)
        order = ids.argsort(stable=True)
        return _Rows(ids[order], gradients[order].to(dtype))

    @staticmethod
    def add(table_VD: Tensor, rows: _Rows | Tensor | None) -> None:
        """Add the result of ``exchange`` to the sum of the head's parts, in place."""
        if isinstance(rows, Tensor):
            table_VD.add_(rows)
        elif rows is not None:
            rows.add_to(table_VD)

    def _look_up(self, index_T: Tensor, weight: Tensor) -> Tensor:
        if not self._apart:
            return F.embedding(index_T, weight)
        found: Tensor = _LookUp.apply(self._anchor, weight.detach(), index_T, self._take)  # type: ignore[no-untyped-call]
        return found

    def _take(self, index_T: Tensor, gradient_TD: Tensor) -> None:
        self._ids.append(index_T.flatten())
        self._gradients.append(gradient_TD.reshape(-1, gradient_TD.shape[-1]))


def shared_table(model: Decoder, trained: Mapping[str, nn.Parameter]) -> TableRows | None:
    """Return the table that embedding and head of a model share, if it is trained and whole; else None."""
    name, embed = "embed.weight", model.embed
    if type(embed) is not Embedding or trained.get(name) is not embed.weight:  # cut, adapted or frozen
        return None
    return TableRows(name, embed) if getattr(model.head, "weight", None) is embed.weight else None


class _Rows:
    """Rows of all ranks, sorted by token."""

    def __init__(self, ids: Tensor, gradients: Tensor) -> None:
        new = torch.ones_like(ids)
        new[1:] = ids[1:] != ids[:-1]
        place = new.cumsum(0) - 1
        self.ids, self.sums = ids, _summed(gradients, place, len(ids))[place]

    def add_to(self, table_VD: Tensor) -> None:
        """Add the sums to their rows. Entries of the same token write equal numbers, so their order does not matter."""
        table_VD.index_copy_(0, self.ids, table_VD[self.ids] + self.sums)


def _summed(gradients: Tensor, ids: Tensor, rows: int) -> Tensor:
    """Sum the gradients of each id, ``[rows, D]`` in their dtype."""
    found: Tensor = torch.ops.aten.embedding_dense_backward(gradients, ids, rows, -1, False)
    return found


class _LookUp(torch.autograd.Function):
    """Rows of a table; the backward pass records their gradients. ``anchor`` makes autograd request them."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, weight: Tensor, index_T: Tensor, take: Callable[..., None]) -> Tensor:  # type: ignore[override]
        ctx.save_for_backward(index_T)
        ctx.take = take
        return F.embedding(index_T, weight)

    @staticmethod
    def backward(ctx: Any, gradient_TD: Tensor) -> tuple[None, None, None, None]:  # type: ignore[override]
        (index_T,) = ctx.saved_tensors
        ctx.take(index_T, gradient_TD)
        return None, None, None, None
