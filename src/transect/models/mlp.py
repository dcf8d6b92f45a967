"""``MLP``: the feed-forward half of a layer, gated (SwiGLU, GeGLU) or plain (GELU).

Shapes: T tokens, D model dim, F ffn dim.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..ops.opset import OpSet
from ..spec.model import ModelConfig
from .weights.dense import Dense
from .weights.projection import Half, Projection
from .weights.weight import Kinds, Weight


class MLP(Half):
    """``down(silu(gate(x)) * up(x))``, or ``down(gelu(up(x)))``: ``[T, D] -> [T, D]``.

    Its projections are ``gate_up`` (of gate and up, or of up alone) and ``down``.
    """

    gate: Weight | None

    def __init__(
        self,
        config: ModelConfig,
        ops: OpSet,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        kinds: Kinds | None = None,
    ) -> None:
        super().__init__()
        self.swiglu = ops.swiglu
        self.gelu = ops.gelu
        self.tanh = config.activation == "gelu_tanh"
        self.silu = config.activation == "silu"

        def matrix(name: str, inputs: int, outputs: int) -> Weight:
            kind = Dense if kinds is None else kinds(f"mlp.{name}")
            return kind(outputs, inputs, config.mlp_bias, ops=ops, device=device, dtype=dtype)

        self.gate = matrix("gate", config.dim, config.ffn_dim) if config.gated_mlp else None
        self.up = matrix("up", config.dim, config.ffn_dim)
        self.gate_up = Projection(up=self.up) if self.gate is None else Projection(gate=self.gate, up=self.up)
        self.down = matrix("down", config.ffn_dim, config.dim)

    def forward(self, x_TD: Tensor) -> Tensor:
        *gate_TF, up_TF = self.gate_up.apart(x_TD)
        if not gate_TF:
            return self.down(self.gelu(up_TF, self.tanh))
        return self.down(self.swiglu(*gate_TF, up_TF) if self.silu else self.gelu(*gate_TF, self.tanh) * up_TF)

    def projections(self) -> dict[str, Weight]:
        """Return the weights, under the names of ``shapes.PROJECTIONS``."""
        return {"gate_up": self.gate_up, "down": self.down}
