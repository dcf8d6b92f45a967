"""How many bits a number of a model takes: what costs and memory are computed from (no torch).

A ``Weight`` says its own ``WeightFormat``; ``weights/measure.py`` makes the ``Storage`` of a model that is there. What
is here does the same for a model that is not, so that floors and memory can be planned without a tensor.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ..formats.nf4 import BITS as NF4_BITS

SCALE_BITS = 16
"""Bits of a group's scale, and of its zero, where a model in 4 bits is served."""
SERVING_GROUP = 128
"""Numbers of a row that share a scale and a zero, where a model in 4 bits is served."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a checkpoint packs a matrix, where a kind of weight can hold it so."""

    format: Literal["fp8", "int8", "int4", "gguf"]
    blocks: bool = False
    """In fp8: a scale for each 128 outputs by 128 inputs, else for each output."""
    group: int = 0
    """In int4: inputs that share a scale and a zero."""
    ordered: bool = False
    """In int4: the inputs of a group are not neighbours (act-order)."""
    rounds_inputs: bool = True
    """In 8 bits: who made it expects activations to be rounded too."""
    block_type: str = ""
    """In gguf: the type of the blocks."""
    bits: float = 0
    """In gguf: of a number, as a GPU holds the blocks."""


Layouts = tuple[tuple[str, Layout], ...]
"""The layout of each matrix of a layer that most layers have packed, by its name there (``attention.q``), and of the
``head``."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A format of numbers, and the bits that one takes in it, scales included (Q4_1 is 5, Q8_0 is 8.5)."""

    name: str
    bits: float

    def bytes(self, *shape: int) -> float:
        """Bytes of a matrix."""
        return math.prod(shape) * self.bits / 8


def dense_format(bits: int) -> WeightFormat:
    """Numbers side by side, nothing packed."""
    return WeightFormat(f"dense {bits}-bit", bits)


def int4_format(group: int = SERVING_GROUP, scale_bits: float = SCALE_BITS) -> WeightFormat:
    """4-bit codes, with a scale and a zero of ``scale_bits`` for each ``group`` of them."""
    return WeightFormat(f"int4, groups of {group}", 4 + 2 * scale_bits / group)


def nf4_format() -> WeightFormat:
    """4-bit NormalFloat with double quantization."""
    return WeightFormat("nf4, double quantization", NF4_BITS)


@dataclass(frozen=True, slots=True)
class Storage:
    """Bits that one number takes, block scales included."""

    linear: float = 16
    """The matrices of the layers."""
    embed: float = 16
    """The embedding table."""
    head: float = 16
    """The output head, as it is read; with tied embeddings the embedding table, or a copy packed differently."""
    norm: float = 16
    """Norm weights and biases."""
    activation: float = 16
    kv: float = 16
    head_copied: bool = False
    """Tied embeddings, but the head is held a second time in its own format."""
    matrices: tuple[tuple[str, float], ...] = ()
    """Matrices of a layer that are not held as ``linear`` says, by their names in it (``mlp.down``)."""
    streamed: float = 0
    """Bytes of matrices that every step brings over the host link, because they live elsewhere."""

    def of(self, name: str) -> float:
        """Bits of a number of the matrix ``name`` of a layer, such as ``attention.q``."""
        return dict(self.matrices).get(name, self.linear)


def storage_for(element: int, quantization: str | None = None, *, native: bool = False) -> Storage:
    """The storage of a model whose numbers have ``element`` bytes, those of its cache too.

    Args:
        quantization: of the layers' matrices, as in ``EngineConfig``.
        native: it runs on the C++ CPU kernels, which have a scale (and a zero, but in fp8) for each 32 numbers.
    """
    bits = 8.0 * element
    linear = int4_format(32 if native else SERVING_GROUP).bits if quantization == "int4" else bits
    if quantization in ("fp8", "int8"):  # a scale for each row is a rounding error
        linear = 8.0 + (0 if not native else 1 if quantization == "fp8" else 2)
    return Storage(linear=linear, embed=bits, head=bits, norm=bits, activation=32 if native else bits, kv=bits)
