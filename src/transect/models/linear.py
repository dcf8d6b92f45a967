"""``Linear``: every weight matrix of a model is one of these.

Whatever changes how weights are stored or where (quantization, tensor parallelism, LoRA) replaces ``Linear`` modules by
modules with the same call, and nothing else of the model.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Linear(nn.Module):
    """``x [T, in] -> x W^T + b [T, out]`` with ``weight [out, in]`` and ``bias [out]`` or None.

    Weights are allocated and not initialised: they are either loaded or drawn by ``Decoder.init_weights``.
    """

    bias: nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        op: Callable[..., Tensor],
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.in_features = in_features
        self.out_features = out_features
        self.op = op
        self.weight = nn.Parameter(torch.empty(out_features, in_features, device=device, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(out_features, device=device, dtype=dtype)) if bias else None

    def forward(self, x_TI: Tensor) -> Tensor:
        return self.op(x_TI, self.weight, self.bias)

    def extra_repr(self) -> str:
        return f"{self.in_features} -> {self.out_features}, bias={self.bias is not None}"
