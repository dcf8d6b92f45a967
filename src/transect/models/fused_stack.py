"""``FusedStack``: all layers of a ``Decoder`` over a paged cache in fewer kernels, each with more to do.

What it computes is what ``Decoder.run_layers`` computes, up to the rounding of the sums that it orders otherwise:

* one kernel reads the rows of the embedding and of the table of angles (``embed_tokens``);
* one product for q, k and v, and one for gate and up: their weights lie one after another in one storage, and the
  modules' own ``weight`` are views of it, so nothing is held twice and ``state_dict`` looks as ever;
* one kernel adds the residual and normalises (``add_rms_norm``), one rotates q and k, normalises their heads where the
  model does, and writes k and v to the cache (``rotary_kv_write``);
* the gate's SiLU in the epilogue of the gate-up product for many rows, one kernel after it for few;
* in decode steps, where that was measured to be quicker, residual add and norm are part of the products on both sides
  of them (``stream_products.py``);
* where only some tokens' hidden states are wanted (the last of each prompt), the last layer computes keys and values
  for all tokens, and the rest for those.

Nothing here reads a tensor on the host, and every shape follows from those of the inputs, so a call can be captured in
a CUDA graph.

Shapes: T tokens, D model dim, H query heads, K key heads, d head size, F ffn dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..ops.linear.stream_products import Stream, StreamProducts
from ..ops.position import embed_tokens
from .config import ModelConfig
from .context import AttentionContext, PagedContext, Wanted
from .decoder import Decoder, Layer
from .linear import Linear
from .norm import RMSNorm


@dataclass(frozen=True, slots=True)
class Fusions:
    """Each can be switched off, to see what it is worth."""

    embed: bool = True
    qkv: bool = True
    gate_up: bool = True
    add_norm: bool = True
    rotary_write: bool = True

    @classmethod
    def all(cls, on: bool) -> Fusions:
        """All of them, or none."""
        return cls(on, on, on, on, on)


def unsuitable(config: ModelConfig) -> str | None:
    """Why a model cannot run on ``FusedStack``, as a sentence; None if it can."""
    if config.norm != "rmsnorm" or not config.gated_mlp or config.position != "rope":
        return "the fused layers are for RMSNorm, gated MLPs and rotary positions"
    return None


class FusedStack:
    """``Decoder.stack`` for paged batches; other contexts go through the layers one by one.

    Args:
        model: its weights may still be on ``meta`` (then nothing is allocated); ``join_weights`` has been called.
        max_positions: positions that the table of angles covers; longer sequences must not come.

    Raises:
        ValueError: ``unsuitable`` says why.
    """

    def __init__(self, model: Decoder, *, max_positions: int, fusions: Fusions | None = None) -> None:
        config = model.config
        reason = unsuitable(config)
        if reason is not None:
            raise ValueError(reason)
        assert model.rope is not None
        self._run_layers = model.run_layers
        assert isinstance(model.norm, RMSNorm)
        self._embed, self._norm = model.embed, model.norm
        self._config = config
        self._ops = model.ops
        self._fusions = fusions or Fusions()
        self._layers = [_FusedLayer(layer, index, config) for index, layer in enumerate(_layers(model))]
        plain = self._fusions == Fusions() and all(layer.plain for layer in self._layers)
        self._streams = self._ops.stream_products if plain else None
        device = model.norm.weight.device
        self._rotations = torch.cat(model.rope.cos_sin(torch.arange(max_positions, device=device)), dim=-1)
        """Of each position, cosines and then sines."""

    def __call__(self, x_TD: Tensor, positions_T: Tensor, context: AttentionContext) -> Tensor:
        if not isinstance(context, PagedContext):
            return self._run_layers(x_TD, positions_T, context)
        x_TD, branch_TD = self._run(x_TD, self._rotations.index_select(0, positions_T), context)
        return x_TD if branch_TD is None else x_TD + branch_TD

    def hidden(
        self, tokens: Tensor, positions_T: Tensor, context: AttentionContext, places_T: Tensor | None = None
    ) -> Tensor:
        """From token ids to the hidden states after the model's last norm; arguments as of ``Decoder.forward``."""
        if not isinstance(context, PagedContext):
            x_TD = self._embed(tokens if places_T is None else embed_tokens.placed(tokens, places_T))
            return self._norm(self._run_layers(x_TD, positions_T, context))
        begin = self._ops.embed_tokens if self._fusions.embed else embed_tokens.reference
        x_TD, rotations_Td = begin(tokens, positions_T, self._embed.weight, self._rotations, places_T)
        return self._add_norm(*self._run(x_TD, rotations_Td, context), self._norm)[1]

    def _run(self, x_TD: Tensor, rotations_Td: Tensor, context: PagedContext) -> tuple[Tensor, Tensor | None]:
        """The residual stream, and what is still to be added to it."""
        cos, sin = rotations_Td.chunk(2, dim=-1)
        branch_TD: Tensor | None = None
        wanted = context.wanted
        if wanted is None and self._streams is not None and self._streams.takes(x_TD, self._layers[0].sizes):
            return self._run_streams(self._streams, x_TD, (cos, sin), context)
        for layer in self._layers:
            x_TD, normed_TD = self._add_norm(x_TD, branch_TD, layer.attention_norm)
            last = None if layer is not self._layers[-1] else wanted
            attended_THd = self._attend(layer, normed_TD, (cos, sin), context, last)
            if last is not None:
                x_TD = x_TD.index_select(0, last.tokens_R)
                if not len(x_TD):
                    return x_TD, None
            branch_TD = layer.o(attended_THd.flatten(-2))
            x_TD, normed_TD = self._add_norm(x_TD, branch_TD, layer.mlp_norm)
            branch_TD = layer.down(self._gated(layer, normed_TD))
        return x_TD, branch_TD

    def _run_streams(
        self, products: StreamProducts, x_TD: Tensor, rotation: tuple[Tensor, Tensor], context: PagedContext
    ) -> tuple[Tensor, Tensor]:
        """As ``_run``, by products that begin and end at the residual stream; all tokens are wanted."""
        first = self._layers[0].attention_norm
        stream = Stream(x_TD, first(x_TD), None, first.eps)
        for layer, after in zip(self._layers, [*self._layers[1:], None], strict=True):
            attended_THd = self._attend(layer, stream, rotation, context, None)
            norm = layer.mlp_norm
            stream = products.add(attended_THd.flatten(-2), layer.o.weight, x_TD, norm.weight, norm.eps)
            gated_TF = products.gate_up(stream, layer.gate_up)
            x_TD = stream.total
            if after is None:
                return x_TD, products.product(gated_TF, layer.down.weight)
            norm = after.attention_norm
            stream = products.add(gated_TF, layer.down.weight, x_TD, norm.weight, norm.eps)
            x_TD = stream.total
        raise AssertionError("a decoder has layers")

    def _add_norm(self, x_TD: Tensor, branch_TD: Tensor | None, norm: RMSNorm) -> tuple[Tensor, Tensor]:
        """(x + branch, its norm)."""
        if branch_TD is None:
            return x_TD, norm(x_TD)
        if self._fusions.add_norm:
            normed_TD, x_TD = self._ops.add_rms_norm(branch_TD, x_TD, norm.weight, norm.eps)
            return x_TD, normed_TD
        x_TD = x_TD + branch_TD
        return x_TD, norm(x_TD)

    def _attend(
        self,
        layer: _FusedLayer,
        x_TD: Tensor | Stream,
        rotation: tuple[Tensor, Tensor],
        context: PagedContext,
        wanted: Wanted | None,
    ) -> Tensor:
        """Attention of all tokens ``[T, H, d]``, or of those that are wanted."""
        config, attention = self._config, layer.attention
        if isinstance(x_TD, Stream):
            assert self._streams is not None
            joined = self._streams.linear(x_TD, layer.qkv, layer.qkv_bias)
            parts = joined.split((config.q_dim, config.kv_dim, config.kv_dim), dim=-1)
        elif self._fusions.qkv:
            joined = self._ops.linear(x_TD, layer.qkv, layer.qkv_bias)
            parts = joined.split((config.q_dim, config.kv_dim, config.kv_dim), dim=-1)
        else:
            parts = (attention.q(x_TD), attention.k(x_TD), attention.v(x_TD))
        q_THd, k_TKd, v_TKd = (part.unflatten(-1, (-1, config.head_dim)) for part in parts)
        k_cache, v_cache = context.k_cache[layer.index], context.v_cache[layer.index]
        q_norm, k_norm = attention.q_norm, attention.k_norm
        if self._fusions.rotary_write:
            head_norm = () if q_norm is None or k_norm is None else (q_norm.weight, k_norm.weight, q_norm.eps)
            kept = {} if context.whole is None else {"k_out": k_TKd}
            q_THd = self._ops.rotary_kv_write(
                q_THd, k_TKd, v_TKd, *rotation, k_cache, v_cache, context.batch, *head_norm, **kept
            )
        else:
            if q_norm is not None and k_norm is not None:
                q_THd, k_TKd = q_norm(q_THd), k_norm(k_TKd)
            q_THd, k_TKd = self._ops.rotary(q_THd, k_TKd, *rotation)
            self._ops.kv_cache_write(k_TKd, v_TKd, k_cache, v_cache, context.batch)
        scale, window = config.attention_scale, layer.window
        if wanted is None:
            return context.attend_written(layer.index, q_THd, k_TKd, v_TKd, scale, window)
        q_RHd = q_THd.index_select(0, wanted.tokens_R)
        if not len(q_RHd):
            return q_RHd
        return self._ops.paged_attention(q_RHd, k_cache, v_cache, wanted.batch, scale, window)

    def _gated(self, layer: _FusedLayer, x_TD: Tensor) -> Tensor:
        """``silu(gate(x)) * up(x)``."""
        if self._fusions.gate_up:
            return self._ops.gate_up(x_TD, layer.gate_up, layer.gate_up_bias)
        assert layer.gate is not None
        return self._ops.swiglu(layer.gate(x_TD), layer.up(x_TD))


class _FusedLayer:
    """One layer's modules and joined weights."""

    def __init__(self, layer: Layer, index: int, config: ModelConfig) -> None:
        attention, mlp = layer.attention, layer.mlp
        self.index = index
        self.window = config.layer_window(index)
        assert isinstance(layer.attention_norm, RMSNorm) and isinstance(layer.mlp_norm, RMSNorm)
        self.attention_norm, self.mlp_norm = layer.attention_norm, layer.mlp_norm
        self.attention = attention
        self.o, self.gate, self.up, self.down = attention.o, mlp.gate, mlp.up, mlp.down
        assert mlp.gate is not None
        self.qkv, self.qkv_bias = _joined((attention.q, attention.k, attention.v))
        self.gate_up, self.gate_up_bias = _joined((mlp.gate, mlp.up))
        plain = all(type(module) is Linear and module.bias is None for module in (self.o, self.down))
        self.plain = plain and self.gate_up_bias is None
        """Whether its products after q, k and v are of weights and nothing else."""
        # Whatever stands in the place of a Linear need not have a weight.
        weights = (self.qkv, self.o.weight, self.gate_up, self.down.weight) if self.plain else ()
        self.sizes = [(*weight.shape, weight is self.gate_up) for weight in weights]
        """Of its products, as ``StreamProducts`` asks for them; none where they are not plain."""


def join_weights(model: Decoder, device: torch.device | str | None = None) -> None:
    """Lay q, k, v of each layer in one storage, and gate and up: the modules' weights become views of it.

    Weights on ``meta`` are given memory on ``device`` that is not filled; others keep their values, and at most one
    layer's are held twice meanwhile. All else that is on ``meta`` gets memory too. Without ``device``: where they are.
    """
    for layer in _layers(model):
        groups: list[tuple[Linear, ...]] = [(layer.attention.q, layer.attention.k, layer.attention.v)]
        if layer.mlp.gate is not None:
            groups.append((layer.mlp.gate, layer.mlp.up))
        for modules in groups:
            _join(modules, "weight", device)
            if modules[0].bias is not None:
                _join(modules, "bias", device)
    for module in model.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            if parameter.is_meta and device is not None:
                setattr(module, name, _parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device=device)))
    model.tie_weights()


def _join(modules: Sequence[Linear], name: str, device: torch.device | str | None) -> None:
    parts = [getattr(module, name).data for module in modules]
    if parts[0].is_meta and device is not None:
        rows = sum(part.shape[0] for part in parts)
        whole = torch.empty((rows, *parts[0].shape[1:]), dtype=parts[0].dtype, device=device)
    else:
        whole = torch.cat(parts)
    for module, view in zip(modules, whole.split([part.shape[0] for part in parts]), strict=True):
        setattr(module, name, _parameter(view))


def _parameter(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)


def _joined(modules: Sequence[Linear]) -> tuple[Tensor, Tensor | None]:
    """The one tensor that the weights are parts of, and the biases'."""

    def whole(parts: Sequence[Tensor]) -> Tensor:
        first = parts[0].data
        rows = sum(part.shape[0] for part in parts)
        at = first.data_ptr()
        for part in parts:
            if part.data_ptr() != at:
                raise ValueError("the weights are not joined: call join_weights before FusedStack")
            at += part.nbytes
        return first.as_strided((rows, *first.shape[1:]), first.stride())

    bias = None if modules[0].bias is None else whole([module.bias for module in modules if module.bias is not None])
    return whole([module.weight for module in modules]), bias


def _layers(model: Decoder) -> list[Layer]:
    return [layer for layer in model.layers if isinstance(layer, Layer)]
