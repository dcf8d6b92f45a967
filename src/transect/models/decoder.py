"""``Decoder``: the one model definition, for training and serving, for every architecture of ``ModelConfig``.

Tokens of all sequences of a batch lie flat in one axis; what belongs together is the business of the
``AttentionContext``. Each layer is ``x + attention(norm(x))``, then ``x + mlp(norm(x))``; some families
put norms after attention and MLP, or both before and after.

Shapes: T tokens, D model dim, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeVar

import torch
from torch import Tensor, nn

from ..ops.attention.paged.cache_codes import stored_width
from ..ops.opset import OpSet, resolve_ops
from ..ops.position.embed_tokens import placed
from ..spec.model import ModelConfig
from .attention import Attention
from .context import AttentionContext
from .embedding import Embedding
from .mlp import MLP
from .moe import ExpertRouter, MoE, SharedRouter
from .norm import LayerNorm, RMSNorm, make_norm
from .rope import Rope
from .stored import StoredWeights, stored_tensor
from .streaming.stream import LayerStream
from .weights.dense import Dense
from .weights.projection import Projection
from .weights.row_adapted import RowAdapters
from .weights.weight import Kinds, Weight, draw_normal

if TYPE_CHECKING:
    from .features import LayerTaps

Stack = Callable[[Tensor, Tensor, AttentionContext], Tensor]
"""``(x_TD, positions_T, context) -> x_TD``: all layers, before the final norm; only for ``context.wanted`` tokens."""
Part = TypeVar("Part")


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
        kinds: Kinds | None = None,
    ) -> None:
        super().__init__()
        before, after = config.norm_order != "post", config.norm_order != "pre"
        none = nn.Identity()
        self.attention_norm = make_norm(config, ops, device=device, dtype=dtype) if before else none
        self.attention_post_norm = make_norm(config, ops, device=device, dtype=dtype) if after else none
        self.scale = config.residual_scale
        self.attention = Attention(config, layer, ops, device=device, dtype=dtype, kinds=kinds)
        self.mlp_norm = make_norm(config, ops, device=device, dtype=dtype) if before else none
        self.mlp_post_norm = make_norm(config, ops, device=device, dtype=dtype) if after else none
        moe = config.layer_moe(layer)
        self.mlp: MLP | MoE
        if moe is None:
            self.mlp = MLP(config, ops, device=device, dtype=dtype, kinds=kinds)
        else:
            self.mlp = MoE(config, moe, ops, device=device, dtype=dtype, kinds=kinds)

    def forward(self, x_TD: Tensor, rotation: tuple[Tensor, Tensor] | None, context: AttentionContext) -> Tensor:
        return self.add_mlp(self.add_attention(x_TD, rotation, context))

    def add_attention(self, x_TD: Tensor, rotation: tuple[Tensor, Tensor] | None, context: AttentionContext) -> Tensor:
        """Add the attention block's output to the residual stream."""
        return self._add(x_TD, self.attention_post_norm(self.attention(self.attention_norm(x_TD), rotation, context)))

    def add_mlp(self, x_TD: Tensor) -> Tensor:
        """Add the MLP block's output to the residual stream."""
        return self._add(x_TD, self.mlp_post_norm(self.mlp(self.mlp_norm(x_TD))))

    def _add(self, x_TD: Tensor, branch_TD: Tensor) -> Tensor:
        return x_TD + (branch_TD if self.scale == 1.0 else self.scale * branch_TD)


class Decoder(nn.Module):
    """A decoder-only transformer.

    Weights are allocated and not initialised: load them, or draw them with ``init_weights``. With ``device="meta"``
    nothing is allocated. ``ops`` is what the model computes with; by default plain torch on ``device``. ``kinds`` says
    what kind of ``Weight`` each matrix is; by default ``Dense``.

    ``stack`` runs all layers and may be replaced by a callable that does the same in one go; one that has ``hidden``
    does what is before and after them too, as ``forward``. A stack takes what it has for each layer through
    ``in_turn``, so that layers may be elsewhere until then (``offloaded``, see ``streaming/``).
    """

    def __init__(
        self,
        config: ModelConfig,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        ops: OpSet | None = None,
        kinds: Kinds | None = None,
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
        self.local_rope = None if config.local_rope is None else Rope(config.local_rope, config.head_dim)
        self.layers = nn.ModuleList(
            Layer(config, layer, ops, device=device, dtype=dtype, kinds=kinds) for layer in range(config.n_layers)
        )
        self.norm = make_norm(config, ops, device=device, dtype=dtype)
        head = Dense if kinds is None else kinds("head")
        head_device = "meta" if config.tied_embeddings and head is Dense else device
        self.head: Weight = head(config.vocab_size, config.dim, ops=ops, device=head_device, dtype=dtype)
        self.head_tied = False
        """True if the head is the embedding's table itself, not a copy in another format."""
        self.tie_weights()
        self.offloaded: LayerStream | None = None
        self.adapters: RowAdapters | None = None
        """Slots for adapters, where each row of a step may have another one."""
        self.taps: LayerTaps | None = None
        """Takes the hidden states in front of some layers, for a head that drafts."""
        self.stack: Stack = self.run_layers

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, context: AttentionContext, places_T: Tensor | None = None
    ) -> Tensor:
        """Compute the hidden states after the final norm from tokens and positions ``[T]`` int64 -> ``[T, D]``, or
        ``[R, D]`` of the R tokens of ``context.wanted``. With ``places_T`` ``[T]`` int32, ``tokens_T`` is a vector of
        any length, and token t is ``tokens_T[places_T[t]]``; a negative index marks padding, whose output is
        undefined."""
        whole = getattr(self.stack, "hidden", None)
        if whole is not None:
            hidden_TD = whole(tokens_T, positions_T, context, places_T)
        else:
            x_TD = self.begin(tokens_T if places_T is None else placed(tokens_T, places_T), positions_T)
            hidden_TD = self.finish(self.stack(x_TD, positions_T, context))
        if self.taps is not None:
            self.taps.keep(context)
        return hidden_TD

    def begin(self, tokens_T: Tensor, positions_T: Tensor) -> Tensor:
        """Run the part before the layers: tokens and positions ``[T]`` int64 -> ``[T, D]``."""
        x_TD = self.embed(tokens_T)
        if self.config.embed_scale != 1.0:  # rounded as the makers round it; a number, as a CUDA graph copies no tensor
            x_TD = x_TD * torch.tensor(self.config.embed_scale, dtype=x_TD.dtype).item()
        return x_TD if self.position_embed is None else x_TD + self.position_embed(positions_T)

    def finish(self, x_TD: Tensor) -> Tensor:
        """Run the part between the layers and the head: ``[T, D] -> [T, D]``."""
        hidden_TD = self.norm(x_TD)
        return hidden_TD if self.config.logit_scale == 1.0 else hidden_TD * self.config.logit_scale

    def logits(self, hidden_TD: Tensor) -> Tensor:
        """Compute logits ``[T, V]`` from hidden states ``[T, D]`` of ``forward``, in float32 (float64 for a float64
        model)."""
        logits_TV = self.head(hidden_TD)
        return self.capped(logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float())

    def capped(self, logits_TV: Tensor) -> Tensor:
        """Apply the model's cap on logits, if it has one, in the head's dtype."""
        cap = self.config.logit_softcap
        if cap is None:
            return logits_TV
        wide_TV = logits_TV if logits_TV.dtype == torch.float64 else logits_TV.float()
        return (cap * torch.tanh(wide_TV / cap)).to(logits_TV.dtype)

    def run_layers(self, x_TD: Tensor, positions_T: Tensor, context: AttentionContext) -> Tensor:
        """Run the layers one after another: the default ``stack``."""
        taps, turns = self.taps, self.in_turn(list(self.layers))
        for index, (layer, rotation) in enumerate(zip(turns, self.rotations(positions_T), strict=True)):
            if taps is not None:
                taps.take(index, x_TD)
            x_TD = layer(x_TD, rotation, context)
        wanted = context.wanted
        return x_TD if wanted is None else x_TD.index_select(0, wanted.tokens_R)

    def in_turn(self, layers: Sequence[Part]) -> Iterable[Part]:
        """Yield a stack's part for each layer in order; a layer's matrices are on the device until the next layer is
        yielded."""
        return layers if self.offloaded is None else self.offloaded.turns(layers)

    def rotations(self, positions_T: Tensor) -> list[tuple[Tensor, Tensor] | None]:
        """Return cos and sin for each layer; None for a layer that does not rotate."""
        if self.rope is None:
            return [None] * len(self.layers)
        angles = self.rope.cos_sin(positions_T)
        local = angles if self.local_rope is None else self.local_rope.cos_sin(positions_T)
        config = self.config
        ropes = [config.layer_rope(layer) for layer in range(config.n_layers)]
        return [None if rope is None else angles if rope is config.rope else local for rope in ropes]

    def new_kv_cache(self, blocks: int, block_size: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Allocate K and V caches ``[layers, blocks, kv heads, block size, head size]`` for a ``PagedContext``, not
        filled. In int8 a head is longer by its scale (``ops/attention/paged/cache_codes.py``).

        A fused ``stack`` may want another memory layout under the same shape; it then has a ``new_cache`` of its own.
        """
        config = self.config
        width = stored_width(config.head_dim, dtype)
        shape = (config.n_layers, blocks, config.n_kv_heads, block_size, width)
        layout = getattr(self.stack, "new_cache", None)
        if layout is not None:
            return layout(shape, dtype)
        device = self.norm.weight.device
        return torch.empty(shape, dtype=dtype, device=device), torch.empty(shape, dtype=dtype, device=device)

    def tie_weights(self) -> None:
        """Make ``head`` share ``embed``'s table if the configuration ties them and the head's kind can; to be repeated
        after weights are replaced."""
        table = getattr(self.embed, "weight", None)
        if self.config.tied_embeddings and table is not None:
            self.head_tied = self.head.tie(table)

    def _apply(self, fn: Callable[..., Tensor], recurse: bool = True) -> Decoder:
        super()._apply(fn, recurse)
        self.tie_weights()
        return self

    @property
    def device(self) -> torch.device:
        """Device of the weights."""
        return self.norm.weight.device

    @property
    def nbytes(self) -> int:
        """Memory of all weights; a table that the head shares is counted once."""
        return sum(t.nbytes for t in (*self.parameters(), *self.buffers()))

    @property
    def device_nbytes(self) -> int:
        """Memory of the weights on the device: like ``nbytes``, with slots in place of streamed layers."""
        stream = self.offloaded
        if stream is None:
            return self.nbytes
        stays = [t.nbytes for t in (*self.parameters(), *self.buffers()) if t not in stream]
        return sum(stays) + stream.slot_bytes

    def weights(self) -> Iterator[tuple[str, Weight]]:
        """Yield every matrix by its canonical name, without ``.weight``: ``layers.0.attention.q``, ..., ``head``. Inner
        weights (an adapter's base) are not yielded."""
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            for where, half in (("attention", layer.attention), ("mlp", layer.mlp)):
                for name, child in half.named_children():
                    if isinstance(child, Weight) and not isinstance(child, Projection):
                        yield f"layers.{index}.{where}.{name}", child
        yield "head", self.head

    def projections(self) -> Iterator[tuple[str, Weight]]:
        """Yield every product that a step computes, by name: ``layers.0.qkv``, ``layers.0.o``, ..., ``head``."""
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            attention, mlp = layer.attention, layer.mlp
            for name, weight in {"qkv": attention.qkv, "o": attention.o, **mlp.projections()}.items():
                yield f"layers.{index}.{name}", weight
        yield "head", self.head

    def replace(self, name: str, weight: Weight) -> None:
        """Replace a weight, given by its canonical name."""
        owner, _, child = name.rpartition(".")
        setattr(self.get_submodule(owner), child, weight)

    def join(self) -> None:
        """Lay the matrices that share an input in one storage, if their kinds can; see ``Projection.join``."""
        for _, weight in self.projections():
            weight.join()

    @torch.no_grad()
    def init_weights(self, std: float = 0.02, generator: torch.Generator | None = None) -> Decoder:
        """Draw all weights for training from scratch: matrices and tables normal with ``std``, biases 0, norms 1. They
        are drawn on the generator's device, so they do not depend on the model's device."""
        for module in self.modules():
            self._draw(module, std, generator)
        return self

    @torch.no_grad()
    def drawn_weights(self, std: float = 0.02, generator: torch.Generator | None = None) -> StoredWeights:
        """Yield the same numbers as stored weights, in this order. One module at a time has memory, on the generator's
        device, so each weight must be read before the next. The model must be on ``meta``, and is used up."""
        device = torch.device("cpu") if generator is None else generator.device
        for name, module in list(self.named_modules()):
            if isinstance(module, Projection) or (module is self.head and self.head_tied):
                continue
            if not module._parameters:
                continue
            module.to_empty(device=device, recurse=False)
            self._draw(module, std, generator)
            for leaf, parameter in module.named_parameters(recurse=False):
                yield f"{name}.{leaf}", stored_tensor(parameter.detach())
            module.to_empty(device="meta", recurse=False)

    def _draw(self, module: nn.Module, std: float, generator: torch.Generator | None) -> None:
        """Draw a module's own weights, as for ``init_weights``."""
        if isinstance(module, Projection):
            return
        if isinstance(module, Embedding):
            draw_normal(module.weight, std, generator)
        elif isinstance(module, Weight) and not (module is self.head and self.head_tied):
            module.draw(std, generator)
        elif isinstance(module, (ExpertRouter, SharedRouter)):
            draw_normal(module.weight, std, generator)
        elif isinstance(module, (RMSNorm, LayerNorm)):
            module.weight.fill_(1.0 - getattr(module, "offset", 0.0))
        elif isinstance(module, Attention) and module.sinks is not None:
            module.sinks.zero_()
        bias = getattr(module, "bias", None)
        if bias is not None:
            bias.zero_()
        if isinstance(module, ExpertRouter) and module.score_bias is not None:
            module.score_bias.zero_()
