r"""A frozen base in 4 bits under adapters (Dettmers et al. 2023, arXiv:2305.14314, here with affine groups).

Each group of G neighbouring weights of a row is stored as codes 0..15 with a scale and a zero:

    scale = (max - min) / 15        zero = min        code = round((w - zero) / scale)

which is (1/2 + 4/G) bytes a weight with 16-bit scales. The product needs the weight again, in the compute dtype, in
both directions: it is rebuilt each time and never kept. Of norms, embeddings and the head nothing is quantized.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..models.decoder import Decoder
from ..models.linear import Linear
from ..ops.linear.packed.int4_dequantize import reference as dequantize_reference
from ..ops.linear.packed.int4_dequantize import triton_dequantize
from ..ops.linear.packed.int4_packing import pack


class Int4Linear(nn.Module):
    """The call of ``Linear``, over a frozen 4-bit weight. Buffers: ``codes [N, K/2]`` uint8, ``scale``, ``zero``."""

    codes: Tensor
    scale: Tensor
    zero: Tensor

    def __init__(self, linear: Linear, group: int) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        codes, scale, zero = quantize(linear.weight.detach(), group)
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.register_buffer("zero", zero)

    def dense_weight(self) -> Tensor:
        """The weight that the codes stand for, ``[out, in]`` in the compute dtype."""
        rebuild = triton_dequantize if self.codes.is_cuda else dequantize_reference
        return rebuild(self.codes, self.scale, self.zero)

    def forward(self, x_TI: Tensor) -> Tensor:
        out: Tensor = _Product.apply(x_TI, self)
        return out if self.bias is None else out + self.bias


class _Product(torch.autograd.Function):
    """``x W^T`` with the gradient of x alone; W lives only within each direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, module: Int4Linear) -> Tensor:
        ctx.module = module
        return x @ module.dense_weight().mT

    @staticmethod
    def backward(ctx: Any, *upstream: Tensor) -> tuple[Tensor, None]:
        return upstream[0] @ ctx.module.dense_weight(), None


@torch.no_grad()
def quantize(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """``[N, K]`` -> packed codes uint8 ``[N, K/2]``, scale and zero ``[N, K/group]`` in the weight's dtype.

    The codes are taken with the scales as they are stored, so each weight is off by at most half a scale.

    Raises:
        ValueError: the group is not 32, 64 or 128, or K is not a multiple of two groups.
    """
    n, k = weight.shape
    if k % (2 * group):
        raise ValueError(
            f"a matrix of {k} columns has no whole pairs of groups of {group}: set lora.group to 32, 64 or 128"
        )
    groups = weight.float().view(n, k // group, group)
    low, high = groups.aminmax(dim=-1)
    zero = low.to(weight.dtype)
    scale = ((high - zero.float()) / 15).clamp(min=torch.finfo(torch.float32).tiny).to(weight.dtype)
    codes = ((groups - zero.float()[..., None]) / scale.float()[..., None]).round_().clamp_(0, 15)
    return pack(codes.to(torch.uint8).view(n, k), group), scale, zero


def quantize_layers(model: Decoder, group: int) -> None:
    """Replace every ``Linear`` of the layers by its 4-bit form, one at a time."""
    for layer in model.layers:
        for part in (layer.attention, layer.mlp):
            for name, child in list(part.named_children()):  # type: ignore[union-attr]
                if isinstance(child, Linear):
                    setattr(part, name, Int4Linear(child, group))
