"""Layouts of matrices in checkpoints that kinds of weight can hold. A weight defines which it takes.

A layout says its bits. The tensors that go with each are in ``models/stored.py``: ``Codes8``, ``Codes4``,
``BlockCodes`` and ``ListedCodes``.
"""

from __future__ import annotations

from dataclasses import dataclass

from .fp8 import FP8
from .gguf import BlockUnits
from .int4 import INT4, int4_format
from .int8 import INT8
from .number_format import Codebook, NumberFormat

SCALE_BLOCK = 128
"""Outputs, and inputs, that share a scale in fp8 with scales of blocks."""


@dataclass(frozen=True, slots=True)
class MatrixLayout:
    """Any of the layouts below."""

    @property
    def label(self) -> str:
        """The format in the start-up line."""
        raise NotImplementedError

    @property
    def bits(self) -> float:
        """Bits of a number in memory, including scales; scales of rows and blocks of 8 bits are excluded."""
        raise NotImplementedError

    @property
    def batch_invariant(self) -> bool:
        """True if the rows of a product with a matrix in this packing can be independent of each other."""
        return False

    def stacks(self, rows: int) -> bool:
        """Return True if packed matrices of ``rows`` rows each can be concatenated along their rows: a stack of
        experts."""
        return True


@dataclass(frozen=True, slots=True)
class ScaledLayout(MatrixLayout):
    """8 bits, ``fp8`` or whole numbers, with a scale for each output or, with ``blocks``, for each block.

    A block is ``SCALE_BLOCK`` outputs by as many inputs.

    ``rounds_inputs``: the maker of the checkpoint expects activations to be rounded too.
    """

    fp8: bool
    blocks: bool = False
    rounds_inputs: bool = True

    @property
    def format(self) -> NumberFormat:
        """The format of the codes."""
        return FP8 if self.fp8 else INT8

    @property
    def label(self) -> str:
        return self.format.name

    @property
    def bits(self) -> float:
        return 8.0

    @property
    def batch_invariant(self) -> bool:
        return self.rounds_inputs

    def stacks(self, rows: int) -> bool:
        return not self.blocks or rows % SCALE_BLOCK == 0


@dataclass(frozen=True, slots=True)
class GroupLayout(MatrixLayout):
    """4-bit codes with a scale and a zero for each ``group`` inputs.

    ``ordered``: the inputs of a group are not neighbours (act-order).
    """

    group: int
    ordered: bool = False

    @property
    def label(self) -> str:
        return INT4.name

    @property
    def bits(self) -> float:
        return int4_format(self.group).bits

    @property
    def batch_invariant(self) -> bool:
        return True

    def stacks(self, rows: int) -> bool:
        return not self.ordered


@dataclass(frozen=True, slots=True)
class BlockLayout(MatrixLayout):
    """Blocks of a GGUF file; ``units`` is their form on a GPU."""

    units: BlockUnits

    @property
    def label(self) -> str:
        return "gguf"

    @property
    def bits(self) -> float:
        return self.units.bits


@dataclass(frozen=True, slots=True)
class ListedLayout(MatrixLayout):
    """Codes of a codebook."""

    codebook: Codebook

    @property
    def label(self) -> str:
        return f"{len(self.codebook.values)} values"

    @property
    def bits(self) -> float:
        return self.codebook.bits
