"""The normalisation layers of a decoder, as modules over ``ops/norm/rms_norm.py`` and ``ops/norm/layer_norm.py``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from ..ops.opset import OpSet
from ..spec.model import ModelConfig


class RMSNorm(nn.Module):
    """``x [..., D] -> [..., D]``, scaled by ``weight [D]`` plus ``offset``."""

    def __init__(
        self,
        dim: int,
        eps: float,
        *,
        op: Callable[..., Tensor],
        offset: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.op = op
        self.offset = offset
        self.weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        if self.offset:  # 1 + weight would be rounded in half precision
            wide = torch.float64 if x.dtype == torch.float64 else torch.float32
            return self.op(x.to(wide), self.weight.to(wide) + self.offset, self.eps).to(x.dtype)
        return self.op(x, self.weight, self.eps)


class LayerNorm(nn.Module):
    """``x [..., D] -> [..., D]``, scaled by ``weight [D]`` and shifted by ``bias [D]``."""

    def __init__(
        self,
        dim: int,
        eps: float,
        *,
        op: Callable[..., Tensor],
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.op = op
        self.weight = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(dim, device=device, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        return self.op(x, self.weight, self.bias, self.eps)


def make_norm(
    config: ModelConfig,
    ops: OpSet,
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> RMSNorm | LayerNorm:
    """Build the norm over the model width that the configuration asks for."""
    if config.norm == "layernorm":
        return LayerNorm(config.dim, config.norm_eps, op=ops.layer_norm, device=device, dtype=dtype)
    return RMSNorm(config.dim, config.norm_eps, op=ops.rms_norm, offset=config.norm_offset, device=device, dtype=dtype)
