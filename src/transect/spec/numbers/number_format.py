"""``NumberFormat``: a number format without a tensor. Options, help, accounts of memory and pages derive from it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ..fields import Fields


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """A format of a matrix, and the bits of a number in it, including scales (Q4_1 is 5, Q8_0 is 8.5)."""

    name: str
    bits: float

    def bytes(self, *shape: int) -> float:
        """Return the bytes of a matrix."""
        return math.prod(shape) * self.bits / 8


SCALE_BITS = {"float16": 16, "bfloat16": 16, "float32": 32}
"""Bits of the dtypes of a codebook's scales."""


@dataclass(frozen=True, slots=True)
class Codebook:
    """Numbers as codes of a short list of values: ``number = scale * values[code]``.

    Attributes:
        values: the numbers that the codes 0, 1, ... stand for, ascending; at most 256.
        group: neighbours of a row that share a scale; the last group of a row may be shorter.
        scale_dtype: the dtype of scales, by its name in torch.
    """

    values: tuple[float, ...]
    group: int
    scale_dtype: str = "float16"

    def __post_init__(self) -> None:
        if not 2 <= len(self.values) <= 256 or list(self.values) != sorted(set(self.values)):
            raise ValueError(f"a codebook has 2 to 256 different values in ascending order, not {self.values}")
        if self.scale_dtype not in SCALE_BITS:
            raise ValueError(f"scales of a codebook are {', '.join(SCALE_BITS)}, not {self.scale_dtype!r}")
        if self.group % (8 // self.code_bits):
            raise ValueError(f"groups of {self.group} codes of {self.code_bits} bits are not whole bytes")

    @property
    def code_bits(self) -> int:
        """Bits of a code in memory and in files: 1, 2, 4 or 8."""
        return next(bits for bits in (1, 2, 4, 8) if len(self.values) <= 2**bits)

    @property
    def bits(self) -> float:
        """Bits of a number, including its part of the scale."""
        return self.code_bits + SCALE_BITS[self.scale_dtype] / self.group


@dataclass(frozen=True, slots=True, kw_only=True)
class Rounding:
    """The use of a format for ``--quantization``: the matrices of the layers are rounded when a model is loaded.

    Attributes:
        words: the format in a sentence about weights.
        native_bits: bits of a number on the C++ kernels; None if they do not take the format.
        kept_on_cpu: plain torch on a CPU holds the codes. If not, it holds the values that they stand for.
    """

    words: str
    native_bits: float | None = None
    kept_on_cpu: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheUse:
    """The use of a format for ``--kv-cache-dtype``.

    Attributes:
        words: a phrase for help texts.
        dtype: of the cache, by its name in torch.
        head_bits: bits that each head of a token takes besides: its scale.
        scaled: keys and values are divided by the checkpoint's scales where it has any.
        native: the C++ kernels read such a cache.
    """

    words: str
    dtype: str
    head_bits: int = 0
    scaled: bool = False
    native: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class FrozenBase:
    """The use of a format for ``lora.base_format``, the frozen matrices of ``qlora``.

    Attributes:
        words: the format in an account of memory; ``{group}`` is the setting ``lora.group``.
        weight: ``(group, bits of a float in the compute dtype)`` to the format of a matrix.
        grouped: rows must be cut into pairs of groups of ``lora.group`` numbers.
    """

    words: str
    weight: Callable[[int, int], WeightFormat]
    grouped: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class FileUse:
    """The use of a format for ``transect quantize --format``: a checkpoint in safetensors.

    Attributes:
        words: kind of file, for the table of the docs.
        read_by: other programs that load it.
        settings: ``quantization_config`` of config.json for groups of this size (None if it has none).
        scale_dtype: of codes in groups: the dtype of scales, by its name in torch; empty for a scale for each row.
        symmetric: codes in groups have no zeros of their own.
        kv_scales: the checkpoint may have scales of a KV cache in fp8.
    """

    words: str
    read_by: str
    settings: Callable[[int | None], dict[str, Any]]
    scale_dtype: str = ""
    symmetric: bool = True
    kv_scales: bool = False

    @property
    def grouped(self) -> bool:
        """True if codes have a scale for each group of ``--group-size`` numbers, and can be calibrated."""
        return bool(self.scale_dtype)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False, repr=False)
class NumberFormat:
    """A format, by the name that users type. There is one object for each: compare with ``is``.

    Attributes:
        summary: storage of a number, in a phrase.
        bits: bits of a number, scales of groups included; those of whole rows, a rounding error, are left out.
        accuracy: the cost in accuracy, in a phrase, and what else sets the format apart.
        other_names: names that are read as ``name``.
        largest: the largest number of a code, for formats of 8 bits.
        methods: names of the checkpoints' quantization methods that hold the format.
        codebook: values of the codes, for a format that needs no code of its own to be rounded to, held, written
            and read.
    """

    name: str
    summary: str
    bits: float
    accuracy: str = ""
    other_names: tuple[str, ...] = ()
    largest: float = 0
    methods: tuple[str, ...] = ()
    rounding: Rounding | None = None
    cache: CacheUse | None = None
    base: FrozenBase | None = None
    file: FileUse | None = None
    codebook: Codebook | None = None

    def __repr__(self) -> str:
        return f"NumberFormat({self.name!r})"


@dataclass(frozen=True, slots=True)
class Method:
    """A ``quant_method`` of config.json that can be read.

    ``check`` takes a ``quantization_config``, once as typed fields and once as it is, and raises ValueError if it
    cannot be read; the message says what can.
    """

    name: str
    check: Callable[[Fields, Mapping[str, Any]], None] = lambda read, settings: None
