"""``Stored``: a weight of a model in a file, under its canonical name; read on demand, whole or in part.

``checkpoints/hf.py``, ``checkpoints/gguf.py`` and ``checkpoints/dummy.py`` make them; ``checkpoints/load.py`` fills a
model from them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..formats.ggml_blocks import QuantizedTensor
from ..spec.numbers.layouts import BlockLayout, GroupLayout, ListedLayout, MatrixLayout, ScaledLayout

Values = Tensor | QuantizedTensor
"""Values of a matrix in a file."""
ALL = slice(None)


@dataclass(frozen=True, slots=True)
class Codes8:
    """A matrix ``[O, I]`` of 8 bits: codes int8 (of fp8 the bits), scale float32 ``[O]`` or ``[O / 128, I / 128]``."""

    ROWS: ClassVar = ("codes", "scale")
    """Tensors with the rows of the matrix, or with some for each of its blocks of rows."""
    layout: ScaledLayout
    codes: Tensor
    scale: Tensor

    @property
    def nbytes(self) -> int:
        """Memory of codes and scales."""
        return self.codes.nbytes + self.scale.nbytes


@dataclass(frozen=True, slots=True)
class Codes4:
    """A matrix ``[O, I]`` of 4 bits: ``scale code + zero``. Codes uint8 ``[O, I]``, one in a byte; scale and zero
    float32 ``[O, G]``, for I / G neighbours each; ``order`` int64 ``[I]``: input of each column of the codes, None if
    they are in order."""

    ROWS: ClassVar = ("codes", "scale", "zero")
    layout: GroupLayout
    codes: Tensor
    scale: Tensor
    zero: Tensor
    order: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in a file, which stores two codes in a byte."""
        return self.codes.numel() // 2 + self.scale.nbytes


@dataclass(frozen=True, slots=True)
class BlockCodes:
    """A matrix ``[O, I]`` in a block type of GGUF files: uint8 ``[O, bytes of a row]``, as stored."""

    ROWS: ClassVar = ("blocks",)
    layout: BlockLayout
    blocks: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks."""
        return self.blocks.nbytes


@dataclass(frozen=True, slots=True)
class ListedCodes:
    """A matrix ``[O, I]`` in codes of a codebook: uint8 ``[O, bytes of a row]``, the first code in the lowest bits;
    scale ``[O, G]``."""

    ROWS: ClassVar = ("codes", "scale")
    layout: ListedLayout
    codes: Tensor
    scale: Tensor

    @property
    def nbytes(self) -> int:
        """Memory of codes and scales."""
        return self.codes.nbytes + self.scale.nbytes


PackedValues = Codes8 | Codes4 | BlockCodes | ListedCodes
"""A matrix as packed in a checkpoint."""
P = TypeVar("P", bound=PackedValues)


@dataclass(frozen=True, slots=True)
class Stored:
    """A matrix ``[rows, columns]`` or a vector.

    ``reader(rows, columns)`` takes two slices without a step; a vector has rows alone. A matrix that a checkpoint packs
    has a ``layout`` and ``codes``, which reads it packed; ``read`` gives its values all the same.
    """

    shape: tuple[int, ...]
    reader: Callable[[slice, slice], Values]
    layout: MatrixLayout | None = None
    codes: Callable[[slice, slice], PackedValues] | None = None

    def read(self, rows: slice = ALL, columns: slice = ALL) -> Values:
        """Return the values of the whole, or of contiguous rows and columns, without reading the rest of the file. They
        may be a view of the mapped file.

        Raises:
            ValueError: the file is damaged, or packs numbers together that ``columns`` would cut apart.
        """
        return self.reader(rows, columns)


StoredWeights = Iterator[tuple[str, Stored]]
"""Iterator over every weight of a model once, by canonical name. A weight may be read until the iterator is closed."""


def stored_tensor(values: Tensor) -> Stored:
    """Wrap a tensor in memory as a stored weight."""
    if values.ndim == 1:
        return Stored(tuple(values.shape), lambda rows, _columns: values[rows])
    return Stored(tuple(values.shape), lambda rows, columns: values[rows, columns])


def read_all(weights: StoredWeights) -> Iterator[tuple[str, Values]]:
    """Yield every weight's values, one at a time."""
    return ((name, stored.read()) for name, stored in weights)


def joined_rows(parts: Sequence[Values]) -> Values:
    """Concatenate parts of one matrix along its rows."""
    first = parts[0]
    if len(parts) == 1:
        return first
    if isinstance(first, Tensor):
        return torch.cat([part for part in parts if isinstance(part, Tensor)])
    blocks = np.concatenate([part.blocks for part in parts if isinstance(part, QuantizedTensor)])
    return QuantizedTensor(first.type_name, (len(blocks), *first.shape[1:]), blocks)


def joined_codes(parts: Sequence[P]) -> P:
    """Concatenate matrices that are packed alike along their rows; those of 4 bits share the order of their inputs."""
    first = parts[0]
    whole: dict[str, Any] = {name: torch.cat([getattr(part, name) for part in parts]) for name in first.ROWS}
    return replace(first, **whole)


def within(size: int, part: slice) -> slice:
    """Return a slice with its bounds filled in."""
    start, stop, step = part.indices(size)
    assert step == 1
    return slice(start, stop)


def is_whole(size: int, part: slice) -> bool:
    """Return True if a slice covers all of ``size``."""
    return within(size, part) == slice(0, size)
