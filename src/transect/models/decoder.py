"""``Decoder``: the one model definition, for training and serving, for every architecture of ``ModelConfig``.

Tokens of all sequences of a batch lie flat in one axis; what belongs together is the business of the
``AttentionContext``. Each layer is pre-norm: ``x + attention(norm(x))``, then ``x + mlp(norm(x))``.

Shapes: T tokens, D model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..ops.opset import OpSet, resolve_ops
from ..ops.position.embed_tokens import placed
from .attention import Attention
from .config import ModelConfig
from .context import AttentionContext
from .embedding import Embedding
from .linear import Linear
from .mlp import MLP
from .norm import LayerNorm, RMSNorm, make_norm
from .rope import Rope

Stack = Callable[[Tensor, Tensor, AttentionContext], Tensor]
"""``(x_TD, positions_T, context) -> x_TD``: all layers, before the final norm; of ``context.wanted`` tokens alone."""


class Layer(nn.Module):
    """One decoder layer."""

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        ops: OpSet,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.attention_norm = make_norm(config, ops, device=device, dtype=dtype)
        self.attention = Attention(config, layer, ops, device=device, dtype=dtype)
        self.mlp_norm = make_norm(config, ops, device=device, dtype=dtype)
        self.mlp = MLP(config, ops, device=device, dtype=dtype)

    def forward(self, x_TD: Tensor, rotation: tuple[Tensor, Tensor] | None, context: AttentionContext) -> Tensor:
        x_TD = x_TD + self.attention(self.attention_norm(x_TD), rotation, context)
        return x_TD + self.mlp(self.mlp_norm(x_TD))


class Decoder(nn.Module):
    """A decoder-only transformer.

    Weights are allocated and not initialised: load them, or draw them with ``init_weights``. With ``device="meta"``
    nothing is allocated. ``ops`` is what the model computes with; by default plain torch on ``device``.

    ``stack`` runs all layers and may be replaced by a callable that does the same in one go; one that has ``hidden``
    does what is before and after them too, as ``forward``.
    """

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        ops: OpSet | None = None,
    ) -> None:
        super().__init__()
        ops = ops or resolve_ops(device or "cpu")
        self.config = config
        self.ops = ops
        self.embed = Embedding(config.vocab_size, config.dim, device=device, dtype=dtype)
        self.position_embed: Embedding | None = None
        self.rope: Rope | None = None
        if config.position == "learned":
            self.position_embed = Embedding(config.max_position, config.dim, device=device, dtype=dtype)
        else:
            self.rope = Rope(config.rope, config.head_dim)
        self.layers = nn.ModuleList(
            Layer(config, layer, ops, device=device, dtype=dtype) for layer in range(config.n_layers)
        )
        self.norm = make_norm(config, ops, device=device, dtype=dtype)
        head_device = "meta" if config.tied_embeddings else device
        self.head = Linear(config.dim, config.vocab_size, op=ops.linear, device=head_device, dtype=dtype)
        self.tie_weights()
        self.stack: Stack = self.run_layers

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, context: AttentionContext, places_T: Tensor | None = None
    ) -> Tensor:
        """tokens and positions ``[T]`` int64 -> hidden states after the final norm ``[T, D]``, or ``[R, D]`` of the R
        tokens of ``context.wanted``. With ``places_T`` ``[T]`` int32, ``tokens_T`` is a vector of any length, and token
        t stands at ``places_T[t]`` of it; below 0 there is none, and what comes out for it means nothing."""
        whole = getattr(self.stack, "hidden", None)
        if whole is not None:
            return whole(tokens_T, positions_T, context, places_T)
        x_TD = self.embed(tokens_T if places_T is None else placed(tokens_T, places_T))
        if self.position_embed is not None:
            x_TD = x_TD + self.position_embed(positions_T)
        return self.norm(self.stack(x_TD, positions_T, context))

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Hidden states ``[T, D]`` of ``forward`` -> logits ``[T, V]``, float32 (float64 for a float64 model)."""
        logits_TV = self.head(hidden_TD)
        return logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()

    def run_layers(self, x_TD: Tensor, positions_T: Tensor, context: AttentionContext) -> Tensor:
        """The default ``stack``: one layer after another."""
        rotation = None if self.rope is None else self.rope.cos_sin(positions_T)
        for layer in self.layers:
            x_TD = layer(x_TD, rotation, context)
        wanted = context.wanted
        return x_TD if wanted is None else x_TD.index_select(0, wanted.tokens_R)

    def new_kv_cache(self, blocks: int, block_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K and V caches ``[layers, blocks, kv heads, block size, head size]`` for a ``PagedContext``; not filled.

        A fused ``stack`` may want another memory layout under the same shape; it then has a ``new_cache`` of its own.
        """
        config = self.config
        shape = (config.n_layers, blocks, config.n_kv_heads, block_size, config.head_dim)
        layout = getattr(self.stack, "new_cache", None)
        if layout is not None:
            return layout(shape, dtype)
        device = self.norm.weight.device
        return torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)

    def tie_weights(self) -> None:
        """Make ``head`` share ``embed``'s table where the configuration says so; again after weights are replaced."""
        if self.config.tied_embeddings:
            self.head.weight = self.embed.weight

    @torch.no_grad()
    def init_weights(self, std: float = 0.02, generator: torch.Generator | None = None) -> Decoder:
        """Draw all weights for training from scratch: matrices and tables normal with ``std``, biases 0, norms 1."""
        for module in self.modules():
            if isinstance(module, (Linear, Embedding)):
                if module is self.head and self.config.tied_embeddings:
                    continue
                module.weight.normal_(0.0, std, generator=generator)
            elif isinstance(module, (RMSNorm, LayerNorm)):
                module.weight.fill_(1.0)
            bias = getattr(module, "bias", None)
            if bias is not None:
                bias.zero_()
        return self
