"""Tensor parallelism: kinds of ``Weight`` around a shard, and a vocabulary that is sharded over ranks.

Matrices that are cut by their outputs need no kind of their own: each rank's is just smaller, and what comes out of it
goes straight into this rank's heads or feed-forward units. These two do:

* ``SummedShard`` around a matrix that is cut by its inputs (o, down): its product ends in an all-reduce;
* ``GatheredShard`` around the rows of the head that a rank has: the logits of all ranks are gathered, so each of them
  draws from the whole vocabulary, and all draw the same token. GPUs that share memory leave them where they are for
  most draws (``spread_logits.py``). This is for inference: gathered logits have no gradient, and training takes
  ``split_loss.py``.

The matrix inside may be of any kind. In training ``parallelize.py`` adds what the backward pass needs where a layer's
cut part begins; with sequence parallelism a sum ends in the rank's own rows.

Shapes: T tokens, I inputs, O outputs, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..models.decoder import Decoder
from ..models.embedding import Embedding
from ..models.staging import Staging
from ..models.weights.as_stored import WeightAround
from ..models.weights.dense import Dense
from ..models.weights.weight import Kinds, Product, Ungathered, Unsummed, Values, Weight, WeightKind
from ..ops.opset import OpSet
from ..spec.layouts.shards import Shard, vocabulary_share
from ..spec.numbers.layouts import MatrixLayout
from .differentiable import scattered, summed
from .group import Group


class ShardKind(WeightAround):
    """Common base of the kinds around a shard."""

    @property
    def batch_invariant(self) -> bool:  # type: ignore[override]
        return self.inner.batch_invariant

    def load(self, values: Values, staging: Staging) -> None:
        self.inner.load(values, staging)

    def takes(self, layout: MatrixLayout) -> bool:
        return self.inner.takes(layout)

    def forward(self, x_TI: Tensor) -> Tensor:
        return self._after(self.inner(x_TI))

    def product(self) -> Product:
        inner, after = self.inner.product(), self._after
        return lambda x: after(inner(x))

    def _after(self, y: Tensor) -> Tensor:
        raise NotImplementedError


class RankSeams:
    """``Seams`` of the ranks of a tensor group: the four collectives of ``differentiable.py``, without its graph.

    Args:
        sequence: between the shared parts of layers each rank has its own rows.
    """

    def __init__(self, group: Group, sequence: bool) -> None:
        self.group, self.sequence = group, sequence

    def enter(self, x: Tensor) -> Tensor:
        return self.group.all_gather(x).flatten(0, 1) if self.sequence else x

    def leave(self, x: Tensor) -> Tensor:
        return self.group.reduce_scatter(x) if self.sequence else self.group.all_reduce(x)

    def leave_back(self, g: Tensor) -> Tensor:
        return self.enter(g)

    def enter_back(self, g: Tensor) -> Tensor:
        return self.leave(g)


class SummedShard(ShardKind):
    """``[O, I / ranks]`` of a matrix ``[O, I]``. The bias is whole on every rank, and added after the sum."""

    def __init__(self, inner: Weight, group: Group, bias: Tensor | None, sequence: bool = False) -> None:
        super().__init__(inner.out_features, inner.in_features)
        self.inner, self.group, self.sequence = inner, group, sequence
        self.add_bias(bias)

    def seams(self) -> RankSeams:
        return RankSeams(self.group, self.sequence)

    def _after(self, y: Tensor) -> Tensor:
        y = _total(y, self.group, self.sequence)
        return y if self.bias is None else y + self.bias

    def unsummed(self) -> Unsummed | None:
        sums = self.group.sums
        if sums is None or sums.exact or self.bias is not None:
            return None

        def add_norm(y: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor] | None:
            return sums.add_norm(y, residual, weight, eps) if sums.takes(y, norm=True) else None

        return Unsummed(self.inner.product(), self.group.all_reduce, add_norm)


class GatheredShard(ShardKind):
    """Some rows of the head ``[V, I]``. Its product has all V outputs, on every rank."""

    def __init__(self, inner: Weight, group: Group, vocab_size: int) -> None:
        super().__init__(vocab_size, inner.in_features)
        self.inner, self.group = inner, group
        self.add_bias(None)
        self._each = vocabulary_share(vocab_size, group.size)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape of the rows that this rank has."""
        return self.inner.shape

    def tie(self, table: nn.Parameter) -> bool:
        return self.inner.tie(table)

    def ungathered(self) -> Ungathered | None:
        spread = self.group.logits
        return None if spread is None else Ungathered(self.inner.product(), spread)

    def _after(self, y: Tensor) -> Tensor:
        if y.shape[1] < self._each:
            y = torch.nn.functional.pad(y, (0, self._each - y.shape[1]))
        parts_RTV = self.group.all_gather(y)
        return torch.cat(parts_RTV.unbind(), dim=1)[:, : self.out_features]


class ShardedEmbedding(nn.Module):
    """The rows of a table that belong to ``tokens``; rows of other ranks arrive by an all-reduce.

    Args:
        table: a module that gathers rows of this rank's part.
        sequence: a rank gets its own rows of the result alone.
    """

    def __init__(self, table: nn.Module, group: Group, tokens: slice, sequence: bool = False) -> None:
        super().__init__()
        self.table, self.group, self.sequence = table, group, sequence
        self.start, self.count = tokens.start, tokens.stop - tokens.start

    def forward(self, index_T: Tensor) -> Tensor:
        own_T = index_T - self.start
        inside_T = (own_T >= 0) & (own_T < self.count)
        rows_TD = self.table(own_T.clamp(0, self.count - 1))
        return _total(torch.where(inside_T[:, None], rows_TD, 0), self.group, self.sequence)

    def part(self) -> tuple[Tensor, int, Product] | None:
        """Return this rank's rows, the index of the first, and the all-reduce of their product; None if not
        available."""
        if self.sequence or not isinstance(self.table, Embedding):
            return None
        return self.table.weight, self.start, self.group.all_reduce

    @property
    def weight(self) -> nn.Parameter | None:
        """Table of plain numbers, for a head that shares it; None for other tables."""
        return getattr(self.table, "weight", None)

    @property
    def shape(self) -> tuple[int, ...]:
        """(rows, numbers of a row)."""
        return self.table.shape  # type: ignore[return-value]

    @property
    def bits(self) -> float:
        """Bits of a number."""
        return self.table.bits  # type: ignore[return-value]

    def load(self, values: Values, staging: Staging) -> None:
        """Copy the values of a file, of this shape."""
        self.table.load(values, staging)  # type: ignore[operator]


def _total(y: Tensor, group: Group, sequence: bool) -> Tensor:
    """Return the sum of all ranks' y, or this rank's rows of it."""
    if sequence:
        return scattered(y, group)
    return summed(y, group) if y.requires_grad else group.all_reduce(y)


def sharded_kinds(kinds: Kinds | None, shard: Shard, group: Group, *, sequence: bool = False) -> Kinds:
    """Return the kinds of a model that is ``shard.local``, with the kinds above around matrices that need one.

    Args:
        kinds: inner kinds of the matrices; None if all are dense.
        sequence: True if each rank has only its own rows (tokens) between layers.
    """
    inner_kind: Kinds = kinds or _dense

    def kind(name: str) -> WeightKind:
        made = inner_kind(name)
        if group.size == 1:
            return made
        if name in ("attention.o", "mlp.down"):
            return _wrapped(made, lambda inner, bias: SummedShard(inner, group, bias, sequence))
        if name == "mlp.experts_down" and shard.rank and shard.expert_ranks == 1:
            return _without_bias(made)  # their sums have that of rank 0
        if name == "head":
            rows = shard.vocabulary.stop - shard.vocabulary.start
            return _wrapped(made, lambda inner, bias: GatheredShard(inner, group, shard.model.vocab_size), rows)
        return made

    return kind


def _dense(name: str) -> WeightKind:
    return Dense


def sharded_norms(model: Decoder, shard: Shard, group: Group) -> None:
    """Make norms over all heads of q, or of k, include those of the other ranks."""
    if group.size == 1 or not shard.model.qk_norm_whole:
        return
    for layer in model.layers:
        for norm in (layer.attention.q_norm, layer.attention.k_norm):  # type: ignore[union-attr]
            norm.op = partial(_norm_of_all, group)  # type: ignore[union-attr]


def _norm_of_all(group: Group, x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Compute RMSNorm of rows that are divided equally between the ranks of a group, ``[T, part]``. Repeated key heads
    all occur equally often, so the mean is that of all."""
    wide = x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    squares = group.all_reduce(wide.square().sum(-1, keepdim=True))
    scaled = wide * torch.rsqrt(squares / (group.size * x.shape[-1]) + eps)
    return (scaled * weight.to(wide.dtype)).to(x.dtype)


def _without_bias(kind: WeightKind) -> WeightKind:
    def make(out_features: int, in_features: int, bias: bool = False, **how: Any) -> Weight:
        return kind(out_features, in_features, False, **how)

    return make


def _wrapped(
    kind: WeightKind, around: Callable[[Weight, Tensor | None], Weight], rows: int | None = None
) -> WeightKind:
    """Return a kind whose weights are ``around`` weights of ``kind``, with ``rows`` outputs if given and without a
    bias."""

    def make(
        out_features: int,
        in_features: int,
        bias: bool = False,
        *,
        ops: OpSet,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> Weight:
        inner = kind(rows or out_features, in_features, False, ops=ops, device=device, dtype=dtype)
        return around(inner, torch.empty(out_features, device=device, dtype=dtype) if bias else None)

    return make
