"""``NF4``: a frozen matrix in 4-bit NormalFloat with double quantization, rebuilt for each product: to train over it.

``spec/numbers/nf4.py`` has the layout. Codes, scales and values are those of bitsandbytes. The weight is made again, in
the compute dtype, in both directions, and never kept, as that of ``int4.py`` is.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ...spec.numbers.nf4 import BLOCK, CODES, NESTED_BLOCK, nf4_format
from ...spec.numbers.number_format import WeightFormat
from .rebuilt import rebuilt_product
from .weight import TrainingPart, Weight


class NF4State(NamedTuple):
    """A matrix of N numbers in NF4: ``codes [N / 2]`` uint8, two in a byte; ``scales [N / 64]`` uint8 with
    ``nested [N / 64 / 256]`` and ``offset []``, float32. The last blocks may be shorter."""

    codes: Tensor
    scales: Tensor
    nested: Tensor
    offset: Tensor


class NF4(Weight):
    """Buffers as in ``NF4State``; products are computed in ``dtype``."""

    codes: Tensor
    scales: Tensor
    nested: Tensor
    offset: Tensor
    like: Tensor

    def __init__(self, shape: tuple[int, int], state: NF4State, dtype: torch.dtype, bias: Tensor | None = None) -> None:
        super().__init__(*shape)
        for name, tensor in state._asdict().items():
            self.register_buffer(name, tensor)
        self.register_buffer("like", torch.empty(0, dtype=dtype, device=state.codes.device), persistent=False)
        self.add_bias(bias)

    @classmethod
    def of(cls, weight: Weight) -> NF4:
        """Quantize another weight to NF4.

        Raises:
            ValueError: it has an odd number of numbers.
        """
        bias = None if weight.bias is None else weight.bias.detach()
        dense = weight.dense().detach()
        return cls(weight.shape, quantize(dense), dense.dtype, bias)

    def dense(self) -> Tensor:
        """Return the weight that the codes represent, in the compute dtype."""
        return dequantize(NF4State(self.codes, self.scales, self.nested, self.offset), self.shape).to(self.like.dtype)

    def forward(self, x_TI: Tensor) -> Tensor:
        return rebuilt_product(x_TI, self)

    @property
    def format(self) -> WeightFormat:
        return nf4_format()

    def training_part(self) -> TrainingPart:
        def fill(out: Tensor) -> None:
            out.copy_(self.dense())

        return TrainingPart(self.out_features, self.in_features, self.like, fill)


@torch.no_grad()
def quantize(weight: Tensor) -> NF4State:
    """Quantize a matrix of any float dtype to NF4.

    Raises:
        ValueError: it has an odd number of numbers, which have no whole bytes.
    """
    numbers = weight.reshape(-1).float()
    if numbers.numel() % 2:
        raise ValueError(f"a matrix of {list(weight.shape)} numbers has no whole bytes of 4-bit codes")
    largest, scaled = _scaled(numbers, BLOCK)
    codes = torch.bucketize(scaled, _borders(_table(CODES, weight)), out_int32=True).to(torch.uint8)
    offset = largest.mean()
    nested, shares = _scaled(largest - offset, NESTED_BLOCK)
    scales = _nearest(shares, _table(dynamic_map(), weight)).to(torch.uint8)
    return NF4State(codes[::2] << 4 | codes[1::2], scales, nested, offset)


def dequantize(state: NF4State, shape: tuple[int, int]) -> Tensor:
    """Return the values of the codes, ``[O, I]`` float32."""
    pairs = _table(CODES, state.codes)
    both = torch.stack([pairs.repeat_interleave(16), pairs.repeat(16)], 1)  # a byte's two numbers
    values = both[state.codes.int()].view(-1)
    scales = _table(dynamic_map(), state.codes)[state.scales.int()]
    scales = scales * state.nested.repeat_interleave(NESTED_BLOCK)[: len(scales)] + state.offset
    if len(values) % BLOCK:
        return (values * scales.repeat_interleave(BLOCK)[: len(values)]).view(shape)
    return values.view(-1, BLOCK).mul_(scales[:, None]).view(shape)


def _scaled(numbers: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """Return the largest magnitude of each block, and all numbers over those of their blocks, in [-1, 1]."""
    spare = -len(numbers) % block
    blocks = torch.nn.functional.pad(numbers, (0, spare)).view(-1, block)
    largest = blocks.abs().amax(1)
    scaled = (blocks * (1 / largest.clamp(min=1e-38))[:, None]).clamp_(-1, 1)
    return largest, scaled.view(-1)[: len(numbers)]


def _nearest(numbers: Tensor, values: Tensor) -> Tensor:
    """Return the index of the nearest of ascending values; the lower one if two are equally near."""
    above = torch.bucketize(numbers, values).clamp(1, len(values) - 1)
    return torch.where(values[above] - numbers < numbers - values[above - 1], above, above - 1)


def _table(values: Any, like: Tensor) -> Tensor:
    return torch.from_numpy(np.asarray(values, np.float32)).to(like.device)


def _borders(values: Tensor) -> Tensor:
    """Return the midpoints between neighbours; a number on a midpoint is rounded down."""
    return (values[:-1] + values[1:]) / 2


def dynamic_map() -> np.ndarray:
    """Return the 256 numbers that a scale's code may represent, float32, ascending.

    With each exponent from 1e-6 to 1 the number of steps doubles: 1, 2, 4, ... 64 midpoints of equal parts of [0.1, 1],
    of both signs; and 0 and 1.
    """
    found = [0.0, 1.0]
    low, high = np.float32(0.1), np.float32(1)
    for exponent in range(7):
        parts = 2**exponent
        step = (high - low) / np.float32(parts)
        at = np.arange(parts + 1)
        # Each half from its own end, rounded to float32 once: values are to be those of bitsandbytes, to the bit.
        edges = np.where(
            at < (parts + 1) // 2,
            np.float64(low) + np.float64(step) * at,
            np.float64(high) - np.float64(step) * (parts - at),
        ).astype(np.float32)
        middles = (edges[:-1] + edges[1:]) / np.float32(2)
        steps = np.float32(10.0 ** (exponent - 6)) * middles
        found += [*steps.tolist(), *(-steps).tolist()]
    return np.array(sorted(found), np.float32)
