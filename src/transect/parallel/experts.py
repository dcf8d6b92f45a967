"""Experts on several ranks: the collectives of a layer whose experts ranks share.

The ranks of the tensor axis have the same tokens. Each computes its part of the experts (a share of every expert, or
some whole experts) for all tokens, and one all-reduce a layer sums the results, shared experts included.

With ``Layout.expert`` the ranks of the data axis share the experts too, each with its own tokens. There are two ways:

* **gather**: all-gather the tokens, compute this rank's experts for all of them, reduce-scatter the results. This moves
  ``(n - 1) / n`` of all tokens twice. All shapes follow from the largest number of tokens of a rank in the step, on
  which the ranks agree once, before the layers (``meet``), so a CUDA graph can capture them. Serving always gathers. A
  rank without tokens takes part with none of its own (``idle``).
* **all-to-all** (``exchange.py``): send a token only to ranks that have one of its k experts. Of n ranks these are
  ``n (1 - (1 - 1 / n) ** k)`` on average. It moves and holds less, but the host must know the number of tokens for each
  rank, and waits for it in every layer.

Training chooses all-to-all if it moves enough less (``way_of``), unless the run names a way. The backward pass of each
way is its reverse, so a rank has the gradients of its own experts for the tokens of all ranks. The router's gradients
are those of the rank's experts (gather) or of its tokens (all-to-all); the ranks sum them like all shared parameters.

Shapes: T tokens of this rank, D model dim.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.decoder import Decoder, Layer
from ..models.moe import MoE
from ..spec.layouts.shards import Shard
from .differentiable import gathered, scattered
from .exchange import Exchange, sent_share
from .group import Group
from .mesh import Mesh

Way = Literal["auto", "gather", "all_to_all"]
WORTH = 0.75
"""Largest share of a gather's bytes at which an all-to-all is chosen."""


def way_of(ranks: int, per_token: int, asked: Way = "auto") -> Way:
    """Choose the collective that brings tokens to experts in training: ``gather`` or ``all_to_all``."""
    if asked != "auto":
        return asked
    return "all_to_all" if sent_share(ranks, per_token) <= WORTH else "gather"


class ExpertRanks:
    """A ``models.moe.ExpertShards``: the ranks that share the experts, seen from one of them.

    Attributes:
        first: the first of the experts that this rank has.
        size: the most tokens that a rank has in this step, as ``meet`` has found.
        exchanges: True if tokens go only to the ranks of their experts.
    """

    def __init__(self, mesh: Mesh, shard: Shard, way: Way = "gather") -> None:
        self.tensor = mesh.tensor
        self.data: Group = mesh.data if mesh.layout.expert else Group.alone()
        self.first = shard.experts.start
        self.size = 0
        assert shard.model.moe is not None
        self.held = shard.model.moe.experts // shard.expert_ranks
        self.exchanges = way == "all_to_all" and self.data.size > 1

    def exchange(self, experts_Tk: Tensor) -> Exchange:
        """Plan the exchange of this rank's tokens with these experts ``[T, k]``. All ranks along the data axis call
        it."""
        return Exchange(experts_Tk, self.held, self.data)

    def meet(self, tokens: int) -> int:
        """Find the most tokens of a rank before a step. All ranks along the data axis call it."""
        if self.data.size > 1:
            self.size = self.data.most(tokens)
        return self.size

    def gather(self, x_TD: Tensor) -> Tensor:
        """Return the tokens of all ranks along the data axis, each padded to ``size``: ``[ranks * size, D]``."""
        if self.data.size == 1:
            return x_TD
        return gathered(F.pad(x_TD, (0, 0, 0, self.size - len(x_TD))), self.data)

    def own(self, x: Tensor, tokens: int) -> Tensor:
        """Return the rows of this rank's own ``tokens``, out of rows for all tokens of ``gather``."""
        begin = self.data.rank * self.size
        return x if self.data.size == 1 else x[begin : begin + tokens]

    def scatter(self, y: Tensor, tokens: int) -> Tensor:
        """Sum ``[ranks * size, D]`` over the ranks along the data axis, and return the rows of this rank's ``tokens``
        tokens."""
        return y if self.data.size == 1 else scattered(y, self.data)[:tokens]

    def sum(self, y_TD: Tensor) -> Tensor:
        """Return the sum over the ranks along the tensor axis."""
        return self.tensor.all_reduce(y_TD)


def spread_experts(model: Decoder, shard: Shard, mesh: Mesh, way: Way = "gather") -> None:
    """Set the ranks that share the experts of each layer; ``way``: collective that brings tokens to experts."""
    if shard.model.moe is None or mesh.tensor.size == shard.expert_ranks == 1:
        return
    spread = ExpertRanks(mesh, shard, way)
    for moe in moe_layers(model):
        moe.spread = spread


def moe_layers(model: Decoder) -> list[MoE]:
    """Return the blocks of layers that are mixtures of experts."""
    return [layer.mlp for layer in model.layers if isinstance(layer, Layer) and isinstance(layer.mlp, MoE)]


def meeting(model: Decoder) -> ExpertRanks | None:
    """Return the ``ExpertRanks`` that each step has to ``meet`` first; None if ranks along the data axis share no
    experts."""
    for moe in moe_layers(model):
        if isinstance(moe.spread, ExpertRanks) and moe.spread.data.size > 1:
            return moe.spread
    return None


def idle(model: Decoder, like: Tensor) -> None:
    """Take part in a step in which this rank has no tokens. ``like``: of the dtype and device of hidden states."""
    nothing_0D = torch.empty(0, model.config.dim, dtype=like.dtype, device=like.device)
    for layer in model.in_turn(list(model.layers)):
        if isinstance(layer, Layer) and isinstance(layer.mlp, MoE):
            layer.mlp(nothing_0D)
