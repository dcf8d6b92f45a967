"""Experts on several ranks: what a layer with experts asks of those that share it.

Along the tensor axis all ranks have the same tokens, so each computes its part of the experts (a share of every expert,
or some experts whole) for all of them, and one sum a layer, with that of shared experts in it, makes the result.

With ``Layout.expert`` the data axis shares the experts too, and each rank along it has tokens of its own. Then a layer
gathers the tokens of all, computes what its own experts say, and adds up and hands back (reduce-scatter). This moves
``(n - 1) / n`` of all tokens, twice. An all-to-all would send a token only to the ranks that have one of its k experts:
with n ranks these are ``n (1 - (1 - 1 / n) ** k)`` on average, for k = 8 all but 0.4% of them with two ranks, 90% with
four, 66% with eight. So it saves little where experts are served, and it would have to tell the host how many tokens go
where, which no CUDA graph can. Gathered, every shape follows from the largest number of tokens that a rank has in the
step, which ``meet`` agrees on once, before the layers. A rank without tokens takes part with none of its own
(``idle``).

Training goes the same way, back too: the gradient of what was gathered is a reduce-scatter, and that of what was
scattered a gather. So a rank has the gradients of its own experts for the tokens of all ranks, and those of the router
for its own experts, which ranks add up as they do for all that they share.

Shapes: T tokens of this rank, D model dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from ..models.decoder import Decoder, Layer
from ..models.moe import MoE
from .differentiable import gathered, scattered
from .group import Group
from .mesh import Mesh
from .shards import Shard


class ExpertRanks:
    """A ``models.moe.Spread``: the ranks that share the experts, seen from one of them.

    Attributes:
        first: the first of the experts that this rank has.
        size: the most tokens that a rank has in this step, as ``meet`` has found.
    """

    def __init__(self, mesh: Mesh, shard: Shard) -> None:
        self.tensor = mesh.tensor
        self.data: Group = mesh.data if mesh.layout.expert else Group.alone()
        self.first = shard.experts.start
        self.size = 0

    def meet(self, tokens: int) -> int:
        """Before a step: the most tokens that a rank has in it. All ranks along the data axis call it."""
        if self.data.size > 1:
            self.size = self.data.most(tokens)
        return self.size

    def gather(self, x_TD: Tensor) -> Tensor:
        """The tokens of all ranks along the data axis, those of each filled up to ``size``: ``[ranks * size, D]``."""
        if self.data.size == 1:
            return x_TD
        return gathered(F.pad(x_TD, (0, 0, 0, self.size - len(x_TD))), self.data)

    def own(self, x: Tensor, tokens: int) -> Tensor:
        """The rows of the own ``tokens``, of one for each that ``gather`` gave."""
        begin = self.data.rank * self.size
        return x if self.data.size == 1 else x[begin : begin + tokens]

    def scatter(self, y: Tensor, tokens: int) -> Tensor:
        """``[ranks * size, D]`` of each rank along the data axis -> the sum, of the own ``tokens`` alone."""
        return y if self.data.size == 1 else scattered(y, self.data)[:tokens]

    def sum(self, y_TD: Tensor) -> Tensor:
        """The sum over the ranks along the tensor axis."""
        return self.tensor.all_reduce(y_TD)


def spread_experts(model: Decoder, shard: Shard, mesh: Mesh) -> None:
    """Tell the layers with experts who shares them."""
    if shard.model.moe is None or mesh.tensor.size == shard.expert_ranks == 1:
        return
    spread = ExpertRanks(mesh, shard)
    for moe in moe_layers(model):
        moe.spread = spread


def moe_layers(model: Decoder) -> list[MoE]:
    """The halves of layers that are mixtures of experts."""
    return [layer.mlp for layer in model.layers if isinstance(layer, Layer) and isinstance(layer.mlp, MoE)]


def meeting(model: Decoder) -> ExpertRanks | None:
    """Whom each step has to ``meet`` first; None where ranks along the data axis share no experts."""
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
