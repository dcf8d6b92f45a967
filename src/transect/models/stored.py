"""``Stored``: a weight of a model as a file holds it, under its canonical name; read when asked, whole or in part.

``checkpoints/`` makes them (``hf.py``, ``gguf.py``, ``dummy.py``) and reads them into a model (``load.py``).
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
    """Tensors that have the rows of the matrix, or some for each of its blocks of rows."""
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
    float32 ``[O, G]``, of I / G neighbours each; ``order`` int64 ``[I]``: the input that a column of the codes is for,
    None if that is its own."""

    ROWS: ClassVar = ("codes", "scale", "zero")
    layout: GroupLayout
    codes: Tensor
    scale: Tensor
    zero: Tensor
    order: Tensor | None = None

    @property
    def nbytes(self) -> int:
        """Bytes in a file, which has two codes in one."""
        return self.codes.numel() // 2 + self.scale.nbytes


@dataclass(frozen=True, slots=True)
class BlockCodes:
    """A matrix ``[O, I]`` in a block type of GGUF files: uint8 ``[O, bytes of a row]``, as the file has them."""

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
"""A matrix as a checkpoint packs it."""
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
        """Return the values, of the whole or of some neighbouring rows and columns: nothing else is read of the file.
        They may be a view of the mapped file.

        Raises:
            ValueError: the file is damaged, or packs numbers together that ``columns`` would cut apart.
        """
        return self.reader(rows, columns)


StoredWeights = Iterator[tuple[str, Stored]]
"""Every weight of a model once, by canonical name. One may be read until the iterator is closed."""


def stored_tensor(values: Tensor) -> Stored:
    """Return a tensor in memory as a weight that is stored."""
    if values.ndim == 1:
        return Stored(tuple(values.shape), lambda rows, _columns: values[rows])
    return Stored(tuple(values.shape), lambda rows, columns: values[rows, columns])


def read_all(weights: StoredWeights) -> Iterator[tuple[str, Values]]:
    """Every weight's values, one at a time."""
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
    """True if a slice takes all of ``size``."""
    return within(size, part) == slice(0, size)
