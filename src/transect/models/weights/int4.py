r"""``Int4``: a frozen matrix of 4-bit codes in groups, rebuilt for each product: for training over it, and for a CPU.

Each group of G neighbouring weights of a row is stored as codes 0..15 with a scale and a zero:

    scale = (max - min) / 15        zero = min        code = round((w - zero) / scale)

which is (1/2 + 4/G) bytes a weight with 16-bit scales. The product needs the weight again, in the compute dtype, in
both directions: it is rebuilt each time and never kept. To serve on a GPU the same numbers are held in another order
(``int4_serving.py``).
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...ops.linear.packed.int4.int4_dequantize import reference as dequantize_reference
from ...ops.linear.packed.int4.int4_dequantize import triton_dequantize
from ...ops.linear.packed.int4.int4_packing import pack
from ...spec.numbers.int4 import int4_format
from ...spec.numbers.number_format import WeightFormat
from .rebuilt import rebuilt_product
from .weight import Dimension, TrainingPart, Weight, part_of, shard_bias


class Int4(Weight):
    """Buffers: ``codes [O, I / 2]`` uint8 as ``int4_packing.pack`` gives them; ``scale``, ``zero`` ``[O, I / G]``."""

    codes: Tensor
    scale: Tensor
    zero: Tensor

    def __init__(self, codes: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None = None) -> None:
        super().__init__(codes.shape[0], 2 * codes.shape[1])
        self.register_buffer("codes", codes)
        self.register_buffer("scale", scale)
        self.register_buffer("zero", zero)
        self.add_bias(bias)

    @classmethod
    def of(cls, weight: Weight, group: int) -> Int4:
        """Quantize another weight to 4 bits.

        Raises:
            ValueError: see ``quantize``.
        """
        bias = None if weight.bias is None else weight.bias.detach()
        return cls(*quantize(weight.dense().detach(), group), bias)

    @property
    def group(self) -> int:
        """Weights in a group, G."""
        return self.in_features // self.scale.shape[1]

    def dense(self) -> Tensor:
        """Return the weight that the codes represent, in the compute dtype."""
        rebuild = triton_dequantize if self.codes.is_cuda else dequantize_reference
        return rebuild(self.codes, self.scale, self.zero)

    def forward(self, x_TI: Tensor) -> Tensor:
        return rebuilt_product(x_TI, self)

    @property
    def format(self) -> WeightFormat:
        return int4_format(self.group, 8 * self.scale.element_size())

    def shard(self, dim: Dimension, rank: int, n: int) -> Int4:
        if dim == "out":
            part = part_of(self.out_features, rank, n)
            tensors = [t[part].clone() for t in (self.codes, self.scale, self.zero)]
        else:
            part = part_of(self.in_features, rank, n, 2 * self.group, "pairs of groups")
            halves, groups = (slice(part.start // by, part.stop // by) for by in (2, self.group))
            tensors = [self.codes[:, halves].clone(), *(t[:, groups].clone() for t in (self.scale, self.zero))]
        codes, scale, zero = tensors
        return Int4(codes, scale, zero, shard_bias(self.bias, dim, part, rank))

    def training_part(self) -> TrainingPart:
        def fill(out: Tensor) -> None:
            triton_dequantize(self.codes, self.scale, self.zero, out=out)

        return TrainingPart(self.out_features, self.in_features, self.scale, fill)


@torch.no_grad()
def quantize(weight: Tensor, group: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize ``[N, K]`` to packed codes uint8 ``[N, K/2]``, scale and zero ``[N, K/group]`` in ``dtype``, by default
    the weight's.

    The codes are taken with the scales as they are stored, so each weight is off by at most half a scale.

    Raises:
        ValueError: the group is not 32, 64 or 128, or K is not a multiple of two groups.
    """
    k = weight.shape[1]
    if k % (2 * group):
        raise ValueError(f"a matrix of {k} columns has no whole pairs of groups of {group}")
    codes, scale, zero = codes_of(weight, group, dtype)
    return pack(codes, group), scale, zero


@torch.no_grad()
def codes_of(weight: Tensor, group: int, dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize like ``quantize``, with one code in a byte, uint8 ``[N, K]``; a row may have any number of groups."""
    n, k = weight.shape
    dtype = dtype or weight.dtype
    groups = weight.float().view(n, k // group, group)
    low, high = groups.aminmax(dim=-1)
    zero = low.to(dtype)
    scale = ((high - zero.float()) / 15).clamp(min=torch.finfo(torch.float32).tiny).to(dtype)
    codes = ((groups - zero.float()[..., None]) / scale.float()[..., None]).round_().clamp_(0, 15)
    return codes.to(torch.uint8).view(n, k), scale, zero
