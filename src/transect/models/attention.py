"""``Attention``: projections to queries, keys and values, positions, attention through the context, projection back.

Shapes: T tokens, D model dim, H query heads, K key heads, d head size.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..ops.opset import OpSet
from ..spec.model import ModelConfig
from .context import AttentionContext
from .layer_kv_scales import KVScales
from .norm import RMSNorm
from .weights.dense import Dense
from .weights.projection import Half, Projection
from .weights.weight import Kinds, Weight


class Attention(Half):
    """Causal self-attention of one layer; grouped key heads, optional biases, QK-norm and window by configuration.

    Its projections are ``qkv`` (of q, k and v) and ``o``. ``sinks`` ``[H]`` are the scores of attention sinks, or None.
    ``inputs``: width of its inputs, if that is not the model's.
    """

    sinks: nn.Parameter | None

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        ops: OpSet,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        kinds: Kinds | None = None,
        inputs: int | None = None,
    ) -> None:
        super().__init__()
        inputs = inputs or config.dim
        self.layer = layer
        self.head_dim = config.head_dim
        self.scale = config.attention_scale
        self.window = config.layer_window(layer)
        self.rotary = ops.rotary

        def matrix(name: str, inputs: int, outputs: int, bias: bool) -> Weight:
            kind = Dense if kinds is None else kinds(f"attention.{name}")
            return kind(outputs, inputs, bias, ops=ops, device=device, dtype=dtype)

        def head_norm(width: int) -> RMSNorm | None:
            if not config.qk_norm:
                return None
            size = width if config.qk_norm_whole else config.head_dim
            offset = config.norm_offset
            return RMSNorm(size, config.norm_eps, op=ops.rms_norm, offset=offset, device=device, dtype=dtype)

        self.q = matrix("q", inputs, config.q_dim, config.qkv_bias)
        self.k = matrix("k", inputs, config.kv_dim, config.qkv_bias)
        self.v = matrix("v", inputs, config.kv_dim, config.qkv_bias)
        self.qkv = Projection(q=self.q, k=self.k, v=self.v)
        self.o = matrix("o", config.q_dim, config.dim, config.o_bias)
        self.q_norm = head_norm(config.q_dim)
        self.k_norm = head_norm(config.kv_dim)
        self.norm_whole = config.qk_norm_whole
        self.softcap = config.attention_softcap
        self.chunk = config.layer_chunk(layer)
        rotates = config.layer_rope(layer) is not None
        self.l2_eps = config.norm_eps if config.qk_l2_norm and rotates else None
        self.temperature = None if rotates else config.attention_temperature
        sinks = torch.empty(config.n_heads, device=device, dtype=dtype) if config.attention_sinks else None
        self.register_parameter("sinks", None if sinks is None else nn.Parameter(sinks))
        self.kv_scales: KVScales | None = None
        """Divisors of keys and values for a cache in fp8 (``layer_kv_scales.py``)."""

    def forward(self, x_TD: Tensor, rotation: tuple[Tensor, Tensor] | None, context: AttentionContext) -> Tensor:
        """Compute attention for ``x_TD``. ``rotation`` is cos and sin ``[T, d/2]``, or None if positions are not
        rotary."""
        q_TE, k_TE, v_TE = self.qkv.apart(x_TD)
        if self.q_norm is not None and self.k_norm is not None and self.norm_whole:
            q_TE, k_TE = self.q_norm(q_TE), self.k_norm(k_TE)
        q_THd, k_TKd, v_TKd = (part.unflatten(-1, (-1, self.head_dim)) for part in (q_TE, k_TE, v_TE))
        if self.q_norm is not None and self.k_norm is not None and not self.norm_whole:
            q_THd, k_TKd = self.q_norm(q_THd), self.k_norm(k_TKd)
        if rotation is not None:
            q_THd, k_TKd = self.rotary(q_THd, k_TKd, *rotation)
        if self.l2_eps is not None:
            q_THd, k_TKd = (_by_root_mean_square(x, self.l2_eps) for x in (q_THd, k_TKd))
        if self.temperature is not None:
            q_THd = (q_THd * _sharper(context.positions(), *self.temperature)[:, None, None]).to(q_THd.dtype)
        how: dict[str, Any] = {}
        if self.softcap is not None:
            how["softcap"] = self.softcap
        if self.sinks is not None:
            how["sinks"] = self.sinks
        if self.chunk is not None:
            how["chunk"] = self.chunk
        if self.kv_scales is not None:
            q_THd, k_TKd, v_TKd = self.kv_scales.before(q_THd, k_TKd, v_TKd)
        out_THd = context.attend(self.layer, q_THd, k_TKd, v_TKd, self.scale, self.window, **how)
        if self.kv_scales is not None:
            out_THd = self.kv_scales.after(out_THd)
        return self.o(out_THd.flatten(-2))


def _by_root_mean_square(x_THd: Tensor, eps: float) -> Tensor:
    """Divide each head by its root mean square, in float32."""
    wide = x_THd if x_THd.dtype == torch.float64 else x_THd.float()
    return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x_THd.dtype)


def _sharper(positions_T: Tensor, scale: float, floor: int) -> Tensor:
    """Return the factors of queries, ``[T]`` float32; see ``ModelConfig.attention_temperature``."""
    return torch.log1p(torch.floor((positions_T.float() + 1) / floor)) * scale + 1
