"""``Attention``: projections to queries, keys and values, positions, attention through the context, projection back.

Shapes: T tokens, D model dim, H query heads, K key heads, d head size.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops.opset import OpSet
from .config import ModelConfig
from .context import AttentionContext
from .linear import Linear
from .norm import RMSNorm


class Attention(nn.Module):
    """Causal self-attention of one layer; grouped key heads, optional biases, QK-norm and window by configuration."""

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
        self.layer = layer
        self.head_dim = config.head_dim
        self.scale = config.attention_scale
        self.window = config.layer_window(layer)
        self.rotary = ops.rotary

        def linear(inputs: int, outputs: int, bias: bool) -> Linear:
            return Linear(inputs, outputs, bias, op=ops.linear, device=device, dtype=dtype)

        def head_norm() -> RMSNorm | None:
            if not config.qk_norm:
                return None
            return RMSNorm(config.head_dim, config.norm_eps, op=ops.rms_norm, device=device, dtype=dtype)

        self.q = linear(config.dim, config.q_dim, config.qkv_bias)
        self.k = linear(config.dim, config.kv_dim, config.qkv_bias)
        self.v = linear(config.dim, config.kv_dim, config.qkv_bias)
        self.o = linear(config.q_dim, config.dim, config.o_bias)
        self.q_norm = head_norm()
        self.k_norm = head_norm()

    def forward(self, x_TD: Tensor, rotation: tuple[Tensor, Tensor] | None, context: AttentionContext) -> Tensor:
        """``rotation`` is cos and sin ``[T, d/2]``, or None where positions are not rotary."""
        q_THd = self.q(x_TD).unflatten(-1, (-1, self.head_dim))
        k_TKd = self.k(x_TD).unflatten(-1, (-1, self.head_dim))
        v_TKd = self.v(x_TD).unflatten(-1, (-1, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_THd, k_TKd = self.q_norm(q_THd), self.k_norm(k_TKd)
        if rotation is not None:
            q_THd, k_TKd = self.rotary(q_THd, k_TKd, *rotation)
        out_THd = context.attend(self.layer, q_THd, k_TKd, v_TKd, self.scale, self.window)
        return self.o(out_THd.flatten(-2))
