"""``FusedStack``: all layers of a ``Decoder`` over a paged cache in fewer kernels, each with more to do.

What it computes is what ``Decoder.run_layers`` computes, up to the rounding of the sums that it orders otherwise:

* one kernel reads the rows of the embedding and of the table of angles (``embed_tokens``);
* one product for q, k and v, and one for gate and up, where their weights can be joined (``Projection.join``);
* one kernel adds the residual and normalises (``add_rms_norm``), one rotates q and k, normalises their heads where the
  model does, and writes k and v to the cache (``rotary_kv_write``);
* the gate's SiLU in the epilogue of the gate-up product for many rows, one kernel after it for few;
* in decode steps, where that was measured to be quicker, residual add and norm are part of the products on both sides
  of them (``ops/linear/stream_products.py``); in 8 bits they, and the gate, round what they leave in any step;
* where only some tokens' hidden states are wanted (the last of each prompt), the last layer computes keys and values
  for all tokens, and the rest for those.

Nothing here reads a tensor on the host, and every shape follows from those of the inputs, so a call can be captured in
a CUDA graph.

Shapes: T tokens, D model dim, H query heads, K key heads, d head size, F ffn dim.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from ..ops.linear.stream_products import ResidualStream, StreamProducts
from ..ops.position import embed_tokens
from ..spec.model import ModelConfig
from .context import AttentionContext, PagedContext, Wanted
from .decoder import Decoder, Layer
from .embedding import Embedding
from .layer_kv_scales import KVScales
from .moe import MoE
from .norm import RMSNorm
from .weights.weight import Chain, Product, StreamProduct, Unsummed, Weight

HeadNorms = tuple[()] | tuple[Tensor, Tensor, float]
"""Weights of the norms of queries' and of keys' heads, and their epsilon; nothing where heads have none."""


@dataclass(frozen=True, slots=True)
class Fusions:
    """Fusions that can be switched off, to measure the gain of each."""

    embed: bool = True
    qkv: bool = True
    gate_up: bool = True
    add_norm: bool = True
    rotary_write: bool = True

    @classmethod
    def all(cls, on: bool) -> Fusions:
        """Return settings with all fusions on, or all off."""
        return cls(on, on, on, on, on)


def refusal(config: ModelConfig) -> str | None:
    """Return the reason why a model cannot run on ``FusedStack``, as a sentence; None if it can."""
    if config.norm != "rmsnorm" or not config.gated_mlp or config.position != "rope":
        return "the fused layers are for RMSNorm, gated MLPs and rotary positions"
    beyond = [what for what in config.beyond_stacks if what not in ("experts", "attention sinks")]
    return f"the fused layers do not have {beyond[0]}" if beyond else None


class FusedStack:
    """``Decoder.stack`` for paged batches; other contexts go through the layers one by one.

    Args:
        model: its weights may still be on ``meta`` (then nothing is allocated). They are joined if they were not.
        max_positions: positions that the table of angles covers; longer sequences must not come.

    Raises:
        ValueError: ``refusal`` says why.
    """

    def __init__(self, model: Decoder, *, max_positions: int, fusions: Fusions | None = None) -> None:
        config = model.config
        reason = refusal(config)
        if reason is not None:
            raise ValueError(reason)
        assert model.rope is not None
        self._run_layers, self._in_turn = model.run_layers, model.in_turn
        self._rows = None if model.adapters is None else model.adapters.rows
        self._taps = lambda: model.taps
        assert isinstance(model.norm, RMSNorm)
        self._embed, self._norm = model.embed, model.norm
        self._config = config
        self._ops = model.ops
        self._fusions = fusions or Fusions()
        streams = self._ops.stream_products if self._fusions == Fusions() else None
        self._layers = [
            _FusedLayer(layer, index, config, self._fusions, streams) for index, layer in enumerate(_layers(model))
        ]
        streamed = {None if layer.on_stream is None else layer.on_stream.qkv.leaves for layer in self._layers}
        self._on_stream = self._layers[0].on_stream if len(streamed) == 1 else None
        """The first layer's products on the residual stream, if all layers have such; they decide which steps use
        them."""
        self._chains = [_chain(layer, after) for layer, after in pairwise(self._layers)] + [None]
        self._offloaded = lambda: model.offloaded is not None
        """Return True if layers stream, so that none may read the weights of the next."""
        device = model.norm.weight.device
        self._rotations = torch.cat(model.rope.cos_sin(torch.arange(max_positions, device=device)), dim=-1)
        """Cosines, then sines, for each position."""

    def __call__(self, x_TD: Tensor, positions_T: Tensor, context: AttentionContext) -> Tensor:
        if not isinstance(context, PagedContext):
            return self._run_layers(x_TD, positions_T, context)
        x_TD, branch_TD, unsummed = self._run(x_TD, self._rotations.index_select(0, positions_T), context)
        if branch_TD is None:
            return x_TD
        return x_TD + (branch_TD if unsummed is None else unsummed.sum(branch_TD))

    def hidden(
        self, tokens: Tensor, positions_T: Tensor, context: AttentionContext, places_T: Tensor | None = None
    ) -> Tensor:
        """Compute the hidden states after the model's last norm from token ids; arguments as of ``Decoder.forward``."""
        if not isinstance(context, PagedContext):
            x_TD = self._embed(tokens if places_T is None else embed_tokens.placed(tokens, places_T))
            return self._norm(self._run_layers(x_TD, positions_T, context))
        if isinstance(self._embed, Embedding):
            begin = self._ops.embed_tokens if self._fusions.embed else embed_tokens.reference
            x_TD, rotations_Td = begin(tokens, positions_T, self._embed.weight, self._rotations, places_T)
        elif self._fusions.embed and (part := getattr(self._embed, "part", tuple)()):
            rows, first, total = part
            x_TD, rotations_Td = self._ops.embed_tokens(tokens, positions_T, rows, self._rotations, places_T, first)
            x_TD = total(x_TD)
        else:  # a rank has a part of the table
            x_TD = self._embed(tokens if places_T is None else embed_tokens.placed(tokens, places_T))
            rotations_Td = self._rotations.index_select(0, positions_T)
        x_TD, branch_TD, unsummed = self._run(x_TD, rotations_Td, context)
        return self._add_norm(x_TD, branch_TD, self._norm, unsummed)[1]

    def _run(
        self, x_TD: Tensor, rotations_Td: Tensor, context: PagedContext
    ) -> tuple[Tensor, Tensor | None, Unsummed | None]:
        """Run all layers. Returns the residual stream, the last branch that is not yet added to it, and that branch's
        all-reduce if it is still to be done."""
        cos, sin = rotations_Td.chunk(2, dim=-1)
        branch_TD: Tensor | None = None
        unsummed: Unsummed | None = None
        wanted = context.wanted
        number = None if wanted is None else len(wanted.tokens_R)
        if self._on_stream is not None and self._on_stream.qkv.takes(x_TD, self._layers[0].sizes, number):
            return (*self._run_streams(x_TD, (cos, sin), context), None)
        taps = self._taps()
        for layer in self._in_turn(self._layers):
            x_TD, normed_TD = self._add_norm(x_TD, branch_TD, layer.attention_norm, unsummed)
            if taps is not None:
                taps.take(layer.index, x_TD)
            last = None if layer is not self._layers[-1] else wanted
            attended_THd = self._attend(layer, layer.qkv(normed_TD), (cos, sin), context, last)
            if last is not None:
                if self._rows is not None:  # while this gathers, the next kernel may read them
                    self._rows.only(last.tokens_R)
                x_TD = x_TD.index_select(0, last.tokens_R)
                if not len(x_TD):
                    return x_TD, None, None
            branch_TD = layer.o(attended_THd.flatten(-2))
            x_TD, normed_TD = self._add_norm(x_TD, branch_TD, layer.mlp_norm, layer.o_unsummed)
            branch_TD = layer.down(self._gated(layer, normed_TD)) if layer.experts is None else layer.experts(normed_TD)
            unsummed = layer.down_unsummed
        return x_TD, branch_TD, unsummed

    def _run_streams(
        self, x_TD: Tensor, rotation: tuple[Tensor, Tensor], context: PagedContext
    ) -> tuple[Tensor, Tensor | None]:
        """Run the layers like ``_run``, by products that begin and end at the residual stream."""
        first = self._layers[0].attention_norm
        stream = ResidualStream(x_TD, first(x_TD), None, first.eps)
        chains = self._chains if len(x_TD) == 1 and not self._offloaded() else [None] * len(self._layers)
        qkv: Tensor | None = None
        taps = self._taps()
        for layer, after, chain in zip(self._in_turn(self._layers), [*self._layers[1:], None], chains, strict=True):
            products, norm = layer.on_stream, layer.mlp_norm
            assert products is not None
            if taps is not None:
                taps.take(layer.index, x_TD, reused=True)
            if qkv is None:
                qkv = products.qkv.linear(stream)
            last = None if after is not None else context.wanted
            attended_THd = self._attend(layer, qkv, rotation, context, last)
            if last is not None:
                x_TD = x_TD.index_select(0, last.tokens_R)
                if not len(x_TD):
                    return x_TD, None
            if after is not None and chain is not None:
                then = after.attention_norm
                weights, eps = (norm.weight, then.weight), (norm.eps, then.eps)
                qkv, x_TD = chain(attended_THd.flatten(-2), x_TD, weights, eps)
                continue
            qkv = None
            stream = products.o.add(attended_THd.flatten(-2), x_TD, norm.weight, norm.eps)
            gated_TF = products.gate_up.gated(stream)
            x_TD = stream.total
            if after is None:
                return x_TD, products.down.plain(gated_TF)
            norm = after.attention_norm
            stream = products.down.add(gated_TF, x_TD, norm.weight, norm.eps)
            x_TD = stream.total
        raise AssertionError("a decoder has layers")

    def _add_norm(
        self, x_TD: Tensor, branch_TD: Tensor | None, norm: RMSNorm, unsummed: Unsummed | None
    ) -> tuple[Tensor, Tensor]:
        """Return (x + branch, its norm)."""
        if branch_TD is None:
            return x_TD, norm(x_TD)
        if unsummed is not None:
            found = unsummed.add_norm(branch_TD, x_TD, norm.weight, norm.eps)
            if found is not None:
                return found[1], found[0]
            branch_TD = unsummed.sum(branch_TD)
        if self._fusions.add_norm:
            normed_TD, x_TD = self._ops.add_rms_norm(branch_TD, x_TD, norm.weight, norm.eps)
            return x_TD, normed_TD
        x_TD = x_TD + branch_TD
        return x_TD, norm(x_TD)

    def _attend(
        self,
        layer: _FusedLayer,
        qkv: Tensor | Sequence[Tensor],
        rotation: tuple[Tensor, Tensor],
        context: PagedContext,
        wanted: Wanted | None,
    ) -> Tensor:
        """Compute attention of all tokens ``[T, H, d]``, or of the wanted ones."""
        scales, q_norm, k_norm = layer.kv_scales, layer.q_norm, layer.k_norm
        norms: HeadNorms = () if q_norm is None or k_norm is None else (q_norm.weight, k_norm.weight, q_norm.eps)
        if scales is None:
            return self._attend_to(layer, qkv, rotation, context, wanted, norms)
        if isinstance(qkv, Tensor) and not norms:
            scaled: Tensor | Sequence[Tensor] = scales.joined(qkv)
        else:
            q, k, v = self._parts(qkv)
            if norms and self._fusions.rotary_write:  # in its one kernel, which rounds once as it does without scales
                norms, v = (*scales.norms(*norms[:2]), norms[2]), scales.of_values(v)
            else:  # heads are normalised before they are divided
                if q_norm is not None and k_norm is not None:
                    q, k, norms = q_norm(q), k_norm(k), ()
                q, k, v = scales.before(q, k, v)
            scaled = [part.flatten(-2) for part in (q, k, v)]
        return scales.after(self._attend_to(layer, scaled, rotation, context, wanted, norms))

    def _parts(self, qkv: Tensor | Sequence[Tensor]) -> list[Tensor]:
        """Split the product into q ``[T, H, d]``, k and v ``[T, K, d]``."""
        config = self._config
        sizes = (config.q_dim, config.kv_dim, config.kv_dim)
        parts = qkv.split(sizes, dim=-1) if isinstance(qkv, Tensor) else qkv
        return [part.unflatten(-1, (-1, config.head_dim)) for part in parts]

    def _attend_to(
        self,
        layer: _FusedLayer,
        qkv: Tensor | Sequence[Tensor],
        rotation: tuple[Tensor, Tensor],
        context: PagedContext,
        wanted: Wanted | None,
        norms: HeadNorms,
    ) -> Tensor:
        """Rotate q and k, write k and v to the cache, and attend; ``norms``: norms of heads that remain to be
        applied."""
        config = self._config
        q_THd, k_TKd, v_TKd = self._parts(qkv)
        k_cache, v_cache = context.caches(layer.index)
        if self._fusions.rotary_write:
            kept = {} if context.whole is None else {"k_out": k_TKd}
            q_THd = self._ops.rotary_kv_write(
                q_THd, k_TKd, v_TKd, *rotation, k_cache, v_cache, context.batch, *norms, **kept
            )
        else:
            if norms and layer.q_norm is not None and layer.k_norm is not None:
                q_THd, k_TKd = layer.q_norm(q_THd), layer.k_norm(k_TKd)
            q_THd, k_TKd = self._ops.rotary(q_THd, k_TKd, *rotation)
            self._ops.kv_cache_write(k_TKd, v_TKd, k_cache, v_cache, context.batch)
        scale, window, how = config.attention_scale, layer.window, layer.scores
        if wanted is None:
            return context.attend_written(layer.index, q_THd, k_TKd, v_TKd, scale, window, **how)
        q_RHd = q_THd.index_select(0, wanted.tokens_R)
        if not len(q_RHd):
            return q_RHd
        return self._ops.paged_attention(q_RHd, k_cache, v_cache, wanted.batch, scale, window, **how)

    def _gated(self, layer: _FusedLayer, x_TD: Tensor) -> Tensor:
        """Compute ``silu(gate(x)) * up(x)``."""
        if layer.gated is not None:
            return layer.gated(x_TD)
        return self._ops.swiglu(*(product(x_TD) for product in layer.gate_up_apart))


class _FusedLayer:
    """One layer's norms and products, resolved once."""

    def __init__(
        self, layer: Layer, index: int, config: ModelConfig, fusions: Fusions, streams: StreamProducts | None
    ) -> None:
        attention, mlp = layer.attention, layer.mlp
        self.index = index
        self.window = config.layer_window(index)
        assert isinstance(layer.attention_norm, RMSNorm) and isinstance(layer.mlp_norm, RMSNorm)
        self.attention_norm, self.mlp_norm = layer.attention_norm, layer.mlp_norm
        self.q_norm, self.k_norm = attention.q_norm, attention.k_norm
        self._attention = attention
        self.scores: dict[str, Tensor] = {} if attention.sinks is None else {"sinks": attention.sinks}
        """Modifications of attention scores, by the names of ``PagedContext.attend``."""
        qkv = attention.qkv
        self.experts: MoE | None = mlp if isinstance(mlp, MoE) else None
        self.qkv = qkv.product() if fusions.qkv else _together(qkv.products())
        self.o, self.o_unsummed = _ended(attention.o, fusions)
        self.down_unsummed: Unsummed | None = None
        self.gated: Product | None = None
        self.gate_up_apart: list[Product] = []
        self.sizes: list[tuple[int, int, bool]] = []
        """Sizes of its products, in the form that ``StreamProducts`` takes."""
        self.on_stream: _StreamLayer | None = None
        if isinstance(mlp, MoE):
            return
        gate_up = mlp.gate_up
        # Parts are asked for their own products only where these run: one that is joined may need a copy for that.
        self.gated = gate_up.gated_product() if fusions.gate_up else None
        self.gate_up_apart = gate_up.products() if self.gated is None else []
        self.down, self.down_unsummed = _ended(mlp.down, fusions)
        projections = (qkv, attention.o, gate_up, mlp.down)
        self.sizes = [(*weight.shape, weight is gate_up) for weight in projections]
        self.on_stream = None if streams is None else _StreamLayer.of(projections, streams)

    @property
    def kv_scales(self) -> KVScales | None:
        """Scales of its attention, which may be set after the stack is built."""
        return self._attention.kv_scales


def _ended(weight: Weight, fusions: Fusions) -> tuple[Product, Unsummed | None]:
    """Return a product that ends at the residual stream, and its sum over ranks where that is apart."""
    unsummed = weight.unsummed() if fusions.add_norm else None
    return (weight.product(), None) if unsummed is None else (unsummed.product, unsummed)


def _together(products: Sequence[Product]) -> Callable[[Tensor], Sequence[Tensor]]:
    """Combine several products of one input, each a kernel of its own."""
    return lambda x: [product(x) for product in products]


class _StreamLayer(NamedTuple):
    """A layer's products that begin and end at the residual stream."""

    qkv: StreamProduct
    o: StreamProduct
    gate_up: StreamProduct
    down: StreamProduct

    @classmethod
    def of(cls, projections: Sequence[Weight], streams: StreamProducts) -> _StreamLayer | None:
        """Build the layer's products; None if a projection has no such product, if a product other than the first has a
        bias, or if they are of several kinds."""
        found = [weight.stream_product(streams) for weight in projections]
        if any(product is None for product in found) or any(product.biased for product in found[1:] if product):
            return None
        if len({product.leaves for product in found if product}) > 1:  # they read what the others leave of a stream
            return None
        return cls(*(product for product in found if product is not None))


def _chain(layer: _FusedLayer, after: _FusedLayer) -> Chain | None:
    """Return the products between the attention of two layers in one launch; None if there is no such kernel."""
    own = layer.on_stream
    if own is None or after.on_stream is None:
        return None
    return own.o.chain((own.gate_up, own.down, after.on_stream.qkv))


def _layers(model: Decoder) -> list[Layer]:
    return [layer for layer in model.layers if isinstance(layer, Layer)]
