"""``Scaled8``: 8-bit codes, whole numbers or fp8, with a scale for each output; rounded when a model is loaded.

The product is that of ``ops/linear/packed/scaled8.py``: by a Triton kernel on a GPU, elsewhere by torch, which decodes
the codes for each product.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from ...ops.lang.jit import runs_triton
from ...ops.linear.packed.scaled8 import reference, triton_scaled8
from ...ops.opset import OpSet
from ..quantized_layouts import to_fp8, to_int8
from ..staging import Staging, dense_values
from ..storage import WeightFormat
from .dense import Dense
from .weight import Dimension, Kinds, Product, Values, Weight, WeightKind, part_of, shard_bias

EIGHT_BITS = ("fp8", "int8")


class Scaled8(Weight):
    """Buffers ``codes`` int8 ``[O, I]`` (of fp8 the bits) and ``scale`` ``[O]`` float32. ``dense`` has ``dtype``."""

    codes: Tensor
    scale: Tensor

    def __init__(
        self,
        out_features: int,
        in_features: int,
        bias: bool = False,
        *,
        fp8: bool = True,
        ops: OpSet | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(out_features, in_features)
        self.fp8, self.dtype = fp8, dtype or torch.get_default_dtype()
        self.register_buffer("codes", torch.empty(out_features, in_features, dtype=torch.int8, device=device))
        self.register_buffer("scale", torch.empty(out_features, dtype=torch.float32, device=device))
        self.add_bias(bias, device, dtype)

    def load(self, values: Values, staging: Staging) -> None:
        codes, scale = (to_fp8 if self.fp8 else to_int8)(staging.bring(dense_values(values)))
        self.codes.copy_(codes.view(torch.int8))
        self.scale.copy_(scale[:, 0])

    def forward(self, x_TI: Tensor) -> Tensor:
        call = triton_scaled8 if runs_triton(x_TI) and x_TI.is_cuda else reference
        return call(x_TI, self.codes, self.scale, self.bias, self.fp8)

    def product(self) -> Product:
        return lambda x: self.forward(x)

    def dense(self) -> Tensor:
        codes = self.codes.view(torch.float8_e4m3fn) if self.fp8 else self.codes
        return (codes.float() * self.scale[:, None]).to(self.dtype)

    @property
    def format(self) -> WeightFormat:
        return WeightFormat("fp8" if self.fp8 else "int8", 8 * self.nbytes / (self.out_features * self.in_features))

    def shard(self, dim: Dimension, rank: int, n: int) -> Scaled8:
        part = part_of(self.shape[dim == "in"], rank, n)
        codes = self.codes[part] if dim == "out" else self.codes[:, part]
        scale = self.scale[part] if dim == "out" else self.scale
        return self._over(codes.clone(), scale.clone(), shard_bias(self.bias, dim, part, rank))

    def join_with(self, others: Sequence[Weight], *, gated: bool = False) -> Scaled8 | None:
        parts = [self, *(other for other in others if isinstance(other, Scaled8) and other.fp8 == self.fp8)]
        biases = [part.bias for part in parts if part.bias is not None]
        if len(parts) <= len(others) or len(biases) not in (0, len(parts)):
            return None
        bias = torch.cat([bias.detach() for bias in biases]) if biases else None
        joined = self._over(torch.cat([part.codes for part in parts]), torch.cat([part.scale for part in parts]), bias)
        sizes = [part.out_features for part in parts]
        for part, codes, scale in zip(parts, joined.codes.split(sizes), joined.scale.split(sizes), strict=True):
            part.codes, part.scale = codes, scale
        if bias is not None:
            for own, view in zip(biases, bias.split(sizes), strict=True):
                own.data = view
        return joined

    def _over(self, codes: Tensor, scale: Tensor, bias: Tensor | None) -> Scaled8:
        made = Scaled8(codes.shape[0], codes.shape[1], fp8=self.fp8, device="meta", dtype=self.dtype)
        made.codes, made.scale = codes, scale
        made.add_bias(bias)
        return made


def kinds_of_8_bits(quantization: str) -> Kinds:
    """The layers' matrices in ``fp8`` or ``int8``; the head stays dense."""
    kind: WeightKind = partial(Scaled8, fp8=quantization == "fp8")
    return lambda name: Dense if name == "head" else kind
