"""``MLP``: the feed-forward half of a layer, gated (SwiGLU) or plain (GELU).

Shapes: T tokens, D model dim, F ffn dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..ops.opset import OpSet
from .config import ModelConfig
from .linear import Linear


class MLP(nn.Module):
    """``down(silu(gate(x)) * up(x))``, or ``down(gelu(up(x)))``: ``[T, D] -> [T, D]``."""

    gate: Linear | None

    def __init__(
        self,
        config: ModelConfig,
        ops: OpSet,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.swiglu = ops.swiglu
        self.gelu = ops.gelu
        self.tanh = config.activation == "gelu_tanh"

        def linear(inputs: int, outputs: int) -> Linear:
            return Linear(inputs, outputs, config.mlp_bias, op=ops.linear, device=device, dtype=dtype)

        self.gate = linear(config.dim, config.ffn_dim) if config.gated_mlp else None
        self.up = linear(config.dim, config.ffn_dim)
        self.down = linear(config.ffn_dim, config.dim)

    def forward(self, x_TD: Tensor) -> Tensor:
        if self.gate is not None:
            return self.down(self.swiglu(self.gate(x_TD), self.up(x_TD)))
        return self.down(self.gelu(self.up(x_TD), self.tanh))
