"""``EagleHead``: one decoder layer that drafts the next tokens of a larger model (EAGLE-3, Li et al. 2025,
arXiv:2503.01840).

Entry i of a sequence has the feature of token i, which is ``fc`` of the target's hidden states in front of three
layers, and the embedding of token i + 1. Its output predicts token i + 2:

    e = input_norm(embed(token[i + 1]))        f = hidden_norm(feature[i])
    x = feature[i] + attention([e, f])         y = x + mlp(mlp_norm(x))         logits = lm_head(norm(y))

Attention reads the entries before it. The target has no hidden state yet for a token that is drafted: the output y of
entry i is then the feature of entry i + 1. Logits are those of a smaller vocabulary, whose token t is token
``t + d2t[t]`` of the target.

A head has what executors ask of a ``Decoder``. Its weights have the names of ``checkpoints/eagle.py``.

Shapes: T tokens, R rows that draw, D width of the head, V vocabulary of the target, W that of the head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..ops.opset import OpSet
from ..ops.position.embed_tokens import placed
from ..spec.eagle import HeadConfig
from .attention import Attention
from .context import AttentionContext, PagedContext
from .features import Features
from .mlp import MLP
from .norm import make_norm
from .rope import Rope
from .weights.dense import Dense
from .weights.weight import Kinds, Weight


class DraftLogits(nn.Module):
    """The norm, the product with the head's vocabulary, and its place in the target's."""

    def __init__(self, head: HeadConfig, ops: OpSet, kind: Any, **where: Any) -> None:
        super().__init__()
        model = head.model
        self.norm = make_norm(model, ops, **where)
        self.lm_head: Weight = kind("lm_head")(head.draft_vocab_size, model.dim, ops=ops, **where)
        self._vocab = model.vocab_size
        places = torch.arange(head.draft_vocab_size, device=where.get("device"))
        self.register_buffer("places_W", places, persistent=False)
        """Tokens of the target, int64 ``[W]``."""

    places_W: Tensor

    def own(self, hidden_RD: Tensor) -> Tensor:
        """Compute logits over the head's vocabulary, ``[R, W]``."""
        return self.lm_head(self.norm(hidden_RD))

    def forward(self, hidden_RD: Tensor) -> Tensor:
        """Compute logits over the target's vocabulary, ``[R, V]``: -inf for tokens that the head cannot draw."""
        own_RW = self.own(hidden_RD)
        if own_RW.shape[1] == self._vocab:
            return own_RW
        return own_RW.new_full((len(own_RW), self._vocab), -torch.inf).index_copy(1, self.places_W, own_RW)

    def ungathered(self) -> None:
        """Return None, as this rank has all logits; see ``Weight.ungathered``."""


class EagleHead(nn.Module):
    """A head; weights are allocated and not initialised.

    Args:
        head: its description.
        layers: layers of the target whose inputs it reads.
        embed: gathers the embeddings of tokens, often the target's.
        ops: operators to compute with.
        kinds: kind of weight of each matrix; ``Dense`` by default.
    """

    def __init__(
        self,
        head: HeadConfig,
        layers: tuple[int, ...],
        *,
        embed: nn.Module,
        ops: OpSet,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        kinds: Kinds | None = None,
    ) -> None:
        super().__init__()
        model = head.model
        where: dict[str, Any] = {"device": device, "dtype": dtype}
        kind = (lambda name: Dense) if kinds is None else kinds
        self.config, self.ops = model, ops
        self._embed = (embed,)  # not a child: it is the target's
        self.fc: Weight = kind("fc")(model.dim, len(layers) * head.target_dim, ops=ops, **where)
        self.input_norm, self.hidden_norm, self.mlp_norm = (make_norm(model, ops, **where) for _ in range(3))
        self.attention = Attention(model, 0, ops, kinds=kinds, inputs=2 * model.dim, **where)
        self.mlp = MLP(model, ops, kinds=kinds, **where)
        self.head = DraftLogits(head, ops, kind, **where)
        self._norm_first = head.norm_before_residual
        self._rope = Rope(model.rope, model.head_dim)
        self.features = Features(layers, self.fc)
        self.layers, self.taps, self.adapters = (), None, None

    @property
    def embed(self) -> nn.Module:
        """Gathers the embeddings of tokens."""
        return self._embed[0]

    @property
    def norm(self) -> nn.Module:
        """The norm in front of the logits."""
        return self.head.norm

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.mlp_norm.weight.device

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, context: AttentionContext, places_T: Tensor | None = None
    ) -> Tensor:
        """Compute outputs ``[T, D]``, in front of the norm, of entries with tokens ``[T]`` int64 at positions ``[T]``,
        which are one less than the tokens'. Arguments are those of ``Decoder.forward``."""
        assert isinstance(context, PagedContext)
        tokens_T = tokens_T if places_T is None else placed(tokens_T, places_T)
        return self.layer(self.embed(tokens_T), self.features.read(context.batch, positions_T), positions_T, context)

    def layer(self, embeds_TD: Tensor, features_TD: Tensor, positions_T: Tensor, context: AttentionContext) -> Tensor:
        """Run the layer: embeddings and features ``[T, D]`` to outputs ``[T, D]``."""
        hidden_TD = self.hidden_norm(features_TD)
        inputs = torch.cat((self.input_norm(embeds_TD.to(hidden_TD.dtype)), hidden_TD), -1)
        rotation = self._rope.cos_sin(positions_T)
        x_TD = hidden_TD if self._norm_first else features_TD
        x_TD = x_TD + self.attention(inputs, rotation, context)
        return x_TD + self.mlp(self.mlp_norm(x_TD))

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Compute logits ``[T, V]`` over the target's vocabulary, float32, of outputs ``[T, D]``."""
        return self.head(hidden_TD).float()

    def capped(self, logits_TV: Tensor) -> Tensor:
        """Return the logits: heads have no cap."""
        return logits_TV

    def new_kv_cache(self, blocks: int, block_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Allocate K and V caches of the one layer; see ``Decoder.new_kv_cache``."""
        shape = (1, blocks, self.config.n_kv_heads, block_size, self.config.head_dim)
        return torch.zeros(shape, dtype=dtype, device=self.device), torch.zeros(shape, dtype=dtype, device=self.device)
