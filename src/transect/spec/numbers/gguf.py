"""The block types of GGUF files: sizes of blocks in numbers and bytes, and their forms in files and on GPUs.

A row of a matrix is cut into blocks of 32 (or, for the K types, 256) columns, each block a few bytes of scales followed
by the packed codes. ``formats/ggml_blocks.py`` has the places of the bits.

Source: ``ggml-common.h`` of ggml; MXFP4: OCP Microscaling Formats 1.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

UNIT_ROWS, UNIT_COLUMNS = 16, 256
"""Rows and columns of a unit, in which a GPU holds blocks."""


@dataclass(frozen=True)
class BlockUnits:
    """A block type in GPU memory: the file's bits in units of 16 rows by 256 columns
    (``ops/linear/packed/gguf/gguf_layout.py``)."""

    name: str
    planes: tuple[int, ...]
    """Bits of a code in each plane, the lowest first."""
    group: int = 32
    """Columns that share a scale."""
    byte_scales: int | None = None
    """Number subtracted from a scale that is a byte; None if scales are floats."""
    minimum: bool = False
    offset: int = 0
    """Number subtracted from a code (of types with ``listed``: from the byte that it represents)."""
    listed: tuple[int, ...] | None = None
    """Values of the 16 codes of 4 bits, if they are not consecutive whole numbers."""
    exponents: bool = False
    """True if scales are powers of two."""

    @property
    def index(self) -> int:
        """Number of the type in the kernels."""
        return list(UNITS).index(self.name)

    @property
    def scale_dtype(self) -> str:
        """Dtype of the scales that are not bytes, by its name in torch: bfloat16 has the exponents of float32."""
        return "bfloat16" if self.exponents else "float16"

    @property
    def code_bytes(self) -> int:
        """Bytes of the planes of a unit."""
        return sum(self.planes) * UNIT_ROWS * UNIT_COLUMNS // 8

    @property
    def scale_bytes(self) -> int:
        """Bytes of the scales of a unit, without the floats that multiply them."""
        each = UNIT_ROWS * UNIT_COLUMNS // self.group * (1 + self.minimum)
        return each if self.byte_scales is not None else 2 * each

    @property
    def unit(self) -> int:
        """Bytes of a unit."""
        behind = 2 * UNIT_ROWS * (1 + self.minimum) if self.byte_scales is not None else 0
        return self.code_bytes + self.scale_bytes + behind

    @property
    def bits(self) -> float:
        """Bits of a number."""
        return 8 * self.unit / (UNIT_ROWS * UNIT_COLUMNS)


@dataclass(frozen=True, kw_only=True)
class BlockType:
    """A tensor type of GGUF files: ``block`` numbers in ``nbytes`` bytes.

    Attributes:
        ggml_id: its number in files.
        bits: of a code once unpacked; ``group``: columns that share a scale; ``offset``: taken off a code.
        halves: byte offsets of the float16 numbers in a block.
        packed: False for F32, F16 and BF16, whose block is one number.
        file_type: llama.cpp's number of a file whose matrices are mostly of the type; None if the type is not written.
        smaller: the type that takes its place where rows are not whole blocks.
        tables: the type of embedding and head in files of this type, where rounding hurts most.
        searched: codes are searched for, and heed the importance of columns.
        listed: values of the 16 codes of 4 bits, where they are not whole numbers in turn.
    """

    name: str
    ggml_id: int
    block: int
    nbytes: int
    bits: int
    group: int
    offset: int = 0
    halves: tuple[int, ...] = ()
    packed: bool = True
    file_type: int | None = None
    smaller: str = "F16"
    tables: str = ""
    searched: bool = False
    listed: tuple[int, ...] | None = None

    @property
    def file_bits(self) -> float:
        """Bits of a number in a file."""
        return 8 * self.nbytes / self.block

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row with this many columns.

        Raises:
            ValueError: the columns do not fill whole blocks.
        """
        if columns % self.block:
            raise ValueError(f"a row of {columns} values is not a whole number of {self.name} blocks of {self.block}")
        return columns // self.block * self.nbytes


@dataclass(frozen=True, slots=True)
class BlockMixture:
    """A file with one type for most matrices, and ``finer`` for some value and down matrices."""

    name: str
    most: str
    finer: str
    file_type: int


def _plain(name: str, ggml_id: int, nbytes: int, file_type: int) -> BlockType:
    return BlockType(
        name=name, ggml_id=ggml_id, block=1, nbytes=nbytes, bits=8 * nbytes, group=1, packed=False, file_type=file_type
    )


def _small(name: str, ggml_id: int, nbytes: int, bits: int, offset: int, file_type: int, halves: tuple[int, ...] = (0,),
           searched: bool = False) -> BlockType:  # fmt: skip
    """Describe a type with blocks of 32."""
    tables = "" if bits == 8 else "Q8_0"
    return BlockType(name=name, ggml_id=ggml_id, block=32, nbytes=nbytes, bits=bits, group=32, offset=offset,
                     halves=halves, file_type=file_type, tables=tables, searched=searched)  # fmt: skip


def _k(name: str, ggml_id: int, nbytes: int, bits: int, group: int, offset: int, halves: tuple[int, ...],
       file_type: int | None = None, smaller: str = "F16") -> BlockType:  # fmt: skip
    """Describe a type with blocks of 256, a K type."""
    return BlockType(name=name, ggml_id=ggml_id, block=256, nbytes=nbytes, bits=bits, group=group, offset=offset,
                     halves=halves, file_type=file_type, smaller=smaller, tables="Q6_K",
                     searched=file_type is not None)  # fmt: skip


_E2M1 = (0, 1, 2, 3, 4, 6, 8, 12)
"""Values of MXFP4, doubled; the scale is half as large here."""
_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

BLOCK_TYPES: Mapping[str, BlockType] = {
    each.name: each
    for each in (
        _plain("F32", 0, 4, 0),
        _plain("F16", 1, 2, 1),
        _plain("BF16", 30, 2, 32),
        _small("Q8_0", 8, 34, 8, 128, 7),
        _small("Q4_0", 2, 18, 4, 8, 2, searched=True),
        _small("Q4_1", 3, 20, 4, 0, 3, (0, 2), searched=True),
        _small("Q5_0", 6, 22, 5, 16, 8, searched=True),
        _small("Q5_1", 7, 24, 5, 0, 9, (0, 2), searched=True),
        _k("Q2_K", 10, 84, 4, 16, 0, (80, 82)),
        _k("Q3_K", 11, 110, 4, 16, 4, (108,)),
        _k("Q4_K", 12, 144, 4, 32, 0, (0, 2), 14, "Q5_0"),
        _k("Q5_K", 13, 176, 5, 32, 0, (0, 2), 16, "Q5_1"),
        _k("Q6_K", 14, 210, 6, 16, 32, (208,), 18, "Q8_0"),
        BlockType(
            name="IQ4_NL", ggml_id=20, block=32, nbytes=18, bits=8, group=32, offset=128, halves=(0,), listed=_IQ4_NL
        ),
        BlockType(
            name="MXFP4", ggml_id=39, block=32, nbytes=17, bits=8, group=32, offset=128,
            listed=(*_E2M1, *(-value for value in _E2M1)),
        ),
    )
}  # fmt: skip
"""Block types by name."""

MIXTURES: Mapping[str, BlockMixture] = {
    each.name: each for each in (BlockMixture("Q4_K_M", "Q4_K", "Q6_K", 15), BlockMixture("Q5_K_M", "Q5_K", "Q6_K", 17))
}

WRITABLE = tuple(each.name for each in BLOCK_TYPES.values() if each.file_type is not None)
"""Types that numbers are rounded to."""
MATRIX_TYPES = (*WRITABLE, *MIXTURES)
"""Types of ``--format`` for the matrices of a file."""

UNITS: Mapping[str, BlockUnits] = {
    each.name: each
    for each in (
        BlockUnits("Q4_0", (4,), offset=8),
        BlockUnits("Q4_1", (4,), minimum=True),
        BlockUnits("Q5_0", (4, 1), offset=16),
        BlockUnits("Q5_1", (4, 1), minimum=True),
        BlockUnits("Q8_0", (8,), offset=128),
        BlockUnits("Q2_K", (2,), 16, 0, minimum=True),
        BlockUnits("Q3_K", (2, 1), 16, 32, offset=4),
        BlockUnits("Q4_K", (4,), 32, 0, minimum=True),
        BlockUnits("Q5_K", (4, 1), 32, 0, minimum=True),
        BlockUnits("Q6_K", (4, 2), 16, 128, offset=32),
        BlockUnits("IQ4_NL", (4,), offset=128, listed=BLOCK_TYPES["IQ4_NL"].listed),
        BlockUnits("MXFP4", (4,), offset=128, listed=BLOCK_TYPES["MXFP4"].listed, exponents=True),
    )
}
"""GPU forms of block types by name, in the order of the kernels."""


def block_type(name: str) -> BlockType:
    """Return the type called ``name``.

    Raises:
        ValueError: it is none of ``BLOCK_TYPES``.
    """
    if name not in BLOCK_TYPES:
        raise ValueError(f"unsupported tensor type {name!r}; supported: {', '.join(BLOCK_TYPES)}")
    return BLOCK_TYPES[name]
