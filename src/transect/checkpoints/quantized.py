"""Quantized checkpoints in safetensors: the tensors of a matrix, combined to one tensor of its values.

``config.json`` names the method (``quantization_config``); the files say which matrices it is used on: those that have
scales. The values are made when a weight is read, of the rows that are asked for where the layout allows it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError
from torch import Tensor

from ..models.quantized_layouts import (
    MX_BLOCK,
    PER_WORD,
    awq_values,
    byte_values,
    code_shape,
    gptq_values,
    listed_values,
    mxfp4_values,
    packed_values,
    scale_shape,
    spread,
)
from ..models.stored import BlockCodes, PackedValues, joined_codes, within
from ..spec.numbers.awq import AWQ_METHOD
from ..spec.numbers.codebook import codebook_of
from ..spec.numbers.gguf import UNITS
from ..spec.numbers.gptq import GPTQ_METHOD, zero_step
from ..spec.numbers.layouts import BlockLayout, MatrixLayout
from ..spec.numbers.registry import check_method
from . import quantized_bnb
from .quantized_codes import (
    LISTED,
    Packed,
    all_of,
    block_of,
    checked_codes,
    codes_of,
    groups_of,
    of_method,
    packed_bits,
    side,
)

_SUFFIXES = (
    "weight_scale", "weight_scale_inv", "weight_packed", "weight_shape", "weight_zero_point", "weight_g_idx",
    "input_scale", "k_scale", "v_scale", "qweight", "qzeros", "scales", "g_idx",
)  # fmt: skip
_CODES = ("F8_E4M3", "I8")
_MXFP4 = BlockLayout(UNITS["MXFP4"])


class StoredTensor(Protocol):
    """A tensor of an open file."""

    @property
    def file(self) -> Any: ...
    @property
    def path(self) -> Path: ...


@dataclass(frozen=True)
class QuantizedMatrix:
    """A quantized matrix with the interface of a file and its tensor: ``get_tensor`` and ``get_slice`` return values.
    If a kind of weight can hold it packed, it has a ``layout``, and ``packed(rows, columns)`` reads part of it so."""

    rows: Callable[[slice], Tensor]
    file_path: Path
    tensor: str
    layout: MatrixLayout | None = None
    packed: Packed | None = None
    expert: Callable[[int, slice, slice], Tensor] | None = None
    """Reader of a stack of experts in blocks: some rows and columns of one expert, uint8, as in a GGUF file; None for
    other matrices."""

    def get_tensor(self, name: str) -> Tensor:
        """Return all values, float32."""
        return self._checked(self.rows(slice(None)))

    def get_slice(self, name: str) -> QuantizedMatrix:
        """Return itself: indexing reads."""
        return self

    def __getitem__(self, index: Any) -> Tensor:
        first, *rest = index if isinstance(index, tuple) else (index,)
        kept = () if isinstance(first, int) else (slice(None),)
        return self._checked(self.rows(first)[(*kept, *rest)] if rest else self.rows(first))

    def _checked(self, values: Tensor) -> Tensor:
        if not bool(values.isfinite().all()):
            raise ValueError(f"the scales of {self.tensor!r} hold infinite or NaN numbers")
        return values


def packed_reader(
    stored: StoredTensor, first: int, rows: int, transposed: bool
) -> tuple[MatrixLayout, Packed] | tuple[None, None]:
    """Find the layout of ``rows`` rows from ``first`` on of a quantized matrix, and a reader of its codes.

    Returns (None, None) if it is plain, or if no kind of weight holds it as it is packed.
    """
    matrix = stored.file
    if not isinstance(matrix, QuantizedMatrix) or matrix.layout is None or matrix.packed is None or transposed:
        return None, None
    packed = matrix.packed

    def read(part: slice, columns: slice) -> PackedValues:
        own = within(rows, part)
        try:
            return packed(slice(first + own.start, first + own.stop), columns)
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise ValueError(f"{stored.path} cannot be read: {error}") from None

    return matrix.layout, read


def experts_reader(stack: Sequence[StoredTensor], rows: int) -> tuple[MatrixLayout, Packed] | tuple[None, None]:
    """Do as ``packed_reader`` for the concatenated matrices of all experts, each a tensor of its own of ``rows`` rows.

    All must be packed alike.
    """
    readers = [packed_reader(one, 0, rows, False) for one in stack]
    layout = readers[0][0]
    if layout is None or not layout.stacks(rows):
        return None, None
    if any(each != layout for each, _ in readers):
        return None, None

    def read(part: slice, columns: slice) -> PackedValues:
        wanted, found = within(len(stack) * rows, part), []
        for expert in range(wanted.start // rows, -(-wanted.stop // rows)):
            one = readers[expert][1]
            assert one is not None
            own = slice(max(0, wanted.start - expert * rows), min(rows, wanted.stop - expert * rows))
            found.append(one(own, columns))
        return joined_codes(found)

    return layout, read


def stack_reader(
    stored: StoredTensor, experts: int, first: int, step: int, rows: int
) -> tuple[BlockLayout, Callable[[slice, slice], BlockCodes]] | tuple[None, None]:
    """Do as ``packed_reader`` for a tensor with the concatenated matrices of all experts.

    Each expert has ``rows / experts`` rows, every ``step``-th from ``first`` on.
    """
    matrix = stored.file
    if not isinstance(matrix, QuantizedMatrix) or not isinstance(matrix.layout, BlockLayout) or matrix.expert is None:
        return None, None
    layout, one, each = matrix.layout, matrix.expert, rows // experts

    def read(part: slice, columns: slice) -> BlockCodes:
        wanted, found = within(rows, part), []
        try:
            for expert in range(wanted.start // each, -(-wanted.stop // each)):
                begin, end = max(0, wanted.start - expert * each), min(each, wanted.stop - expert * each)
                near = slice(first + step * begin, first + step * (end - 1) + 1)
                found.append(one(expert, near, columns)[::step])
        except (SafetensorError, OSError, ValueError, RuntimeError) as error:
            raise ValueError(f"{stored.path} cannot be read: {error}") from None
        return BlockCodes(layout, torch.cat(found))

    return layout, read


def with_values(found: dict[str, Any], settings: Mapping[str, Any], make: Callable[..., Any]) -> dict[str, Any]:
    """Return the tensors of a checkpoint where each quantized matrix is one tensor of its values, under the name that
    it would have unquantized. ``make(file, path, name, shape, dtype)`` is a tensor.

    Raises:
        ValueError: tensors that do not fit together; the message names file and tensor.
    """
    check_method(settings)
    out = dict(found)
    for name, stored in found.items():
        try:
            _put(out, found, name, settings, make)
        except ValueError as error:
            if str(stored.path) in str(error):
                raise
            raise ValueError(f"{stored.path}: {error}") from None
    return {name: each for name, each in out.items() if not _is_side(name, found)}


def _put(
    out: dict[str, Any], found: Mapping[str, Any], name: str, settings: Mapping[str, Any], make: Callable[..., Any]
) -> None:
    """Replace the codes ``name`` of a matrix by its values, if they are codes."""
    prefix, _, suffix = name.rpartition(".")
    matrix: tuple[str, tuple[int, ...], Callable[[slice], Tensor]] | None = None
    codes = suffix in ("qweight", "weight_packed", LISTED) or (suffix == "weight" and found[name].dtype in _CODES)
    if codes and len(found[name].shape) != 2:
        raise ValueError(
            f"the codes {name!r} of shape {list(found[name].shape)} are not a matrix; download the file again"
        )
    if suffix == "qweight":
        matrix = (f"{prefix}.weight", *of_method(_WORDS, settings)(found, prefix, settings))
    elif suffix == LISTED:
        matrix = (f"{prefix}.weight", *_listed(found, prefix, settings))
    elif quantized_bnb.is_packed(found, name):
        shape, rows = quantized_bnb.matrix(found, name)
        out[name] = make(QuantizedMatrix(rows, found[name].path, name), found[name].path, name, shape, "F32")
    elif suffix == "weight_packed":
        matrix = (f"{prefix}.weight", *_packed(found, prefix))
    elif suffix == "weight" and found[name].dtype in _CODES:
        matrix = (name, *_scaled(found, prefix, block_of(settings)))
    elif suffix.endswith("_blocks"):
        matrix = (name.removesuffix("_blocks"), *_mxfp4(found, name))
    if matrix is None:
        return
    own, shape, rows = matrix
    out.pop(name)
    if suffix.endswith("_blocks"):
        whole = QuantizedMatrix(
            rows, found[name].path, own, _MXFP4, expert=partial(_expert_blocks, *_stack(found, name))
        )
    else:
        layout, packed = codes_of(found, prefix, suffix, shape, settings)
        whole = QuantizedMatrix(rows, found[name].path, own, layout, packed)
    out[own] = make(whole, found[name].path, own, shape, "F32")


def _is_side(name: str, found: Mapping[str, Any]) -> bool:
    """Return True for scales and other tensors that belong to a matrix."""
    suffix = name.rpartition(".")[2]
    if quantized_bnb.is_side(name):
        return True
    if suffix.endswith("_scales") and f"{name.removesuffix('_scales')}_blocks" in found:
        return True
    return suffix in _SUFFIXES


def _gptq(
    found: Mapping[str, Any], prefix: str, settings: Mapping[str, Any]
) -> tuple[tuple[int, ...], Callable[[slice], Tensor]]:
    qweight = found[f"{prefix}.qweight"]
    words, outputs = qweight.shape
    inputs = words * PER_WORD
    groups = groups_of(settings, inputs, f"{prefix}.qweight")
    qzeros = side(found, prefix, "qzeros", (groups, outputs // PER_WORD))
    scales = side(found, prefix, "scales", (groups, outputs))
    order = found.get(f"{prefix}.g_idx")
    if order is not None:
        order = side(found, prefix, "g_idx", (inputs,))
    step = zero_step(settings)

    def rows(part: slice) -> Tensor:
        g_idx = torch.arange(inputs) // (inputs // groups) if order is None else all_of(order)
        if order is not None and not 0 <= int(g_idx.min()) <= int(g_idx.max()) < groups:
            raise ValueError(f"the tensor {f'{prefix}.g_idx'!r} names groups that do not exist")
        own = slice(*part.indices(outputs))
        codes = qweight.file.get_slice(qweight.name)[:, own]
        wide = slice(own.start // PER_WORD * PER_WORD, -(-own.stop // PER_WORD) * PER_WORD)
        zeros = all_of(qzeros)[:, wide.start // PER_WORD : wide.stop // PER_WORD]
        lead = own.start - wide.start
        if lead or own.stop != wide.stop:  # zeros share words with neighbours
            return gptq_values(qweight.file.get_slice(qweight.name)[:, wide], zeros, all_of(scales)[:, wide], g_idx,
                               zero_step=step)[lead : lead + own.stop - own.start]  # fmt: skip
        return gptq_values(codes, zeros, all_of(scales)[:, own], g_idx, zero_step=step)

    return (outputs, inputs), rows


def _awq(
    found: Mapping[str, Any], prefix: str, settings: Mapping[str, Any]
) -> tuple[tuple[int, ...], Callable[[slice], Tensor]]:
    qweight = found[f"{prefix}.qweight"]
    inputs, words = qweight.shape
    groups = groups_of(settings, inputs, f"{prefix}.qweight")
    qzeros = side(found, prefix, "qzeros", (groups, words))
    scales = side(found, prefix, "scales", (groups, words * PER_WORD))

    def rows(part: slice) -> Tensor:
        own = slice(*part.indices(words * PER_WORD))
        first, last = own.start // PER_WORD, -(-own.stop // PER_WORD)
        codes = qweight.file.get_slice(qweight.name)[:, first:last]
        wide = awq_values(codes, all_of(qzeros)[:, first:last], all_of(scales)[:, first * PER_WORD : last * PER_WORD])
        return wide[own.start - first * PER_WORD : own.stop - first * PER_WORD]

    return (words * PER_WORD, inputs), rows


_WORDS = {GPTQ_METHOD.name: _gptq, AWQ_METHOD.name: _awq}
"""Functions that return the shape of a matrix in words and a reader of its rows, by the checkpoint's method."""


def _listed(
    found: Mapping[str, Any], prefix: str, settings: Mapping[str, Any]
) -> tuple[tuple[int, ...], Callable[[slice], Tensor]]:
    """Return the shape and a reader of codes of a codebook; a row may end within a byte, as ``weight_shape`` tells."""
    codes, codebook = found[f"{prefix}.{LISTED}"], codebook_of(settings)
    outputs, inputs = (int(size) for size in all_of(side(found, prefix, "weight_shape", (2,))).tolist())
    if codes.shape != code_shape(codebook, outputs, inputs):
        raise ValueError(
            f"{codes.path}: {prefix}.weight_shape says {[outputs, inputs]}, and the codes are {list(codes.shape)}"
        )
    scale, table = side(found, prefix, "weight_scale", scale_shape(codebook, outputs, inputs)), byte_values(codebook)

    def rows(part: slice) -> Tensor:
        packed = checked_codes(codes, codebook, codes.file.get_slice(codes.name)[part])
        return listed_values(packed, all_of(scale)[part], table, codebook.group, inputs)

    return (outputs, inputs), rows


def _packed(found: Mapping[str, Any], prefix: str) -> tuple[tuple[int, ...], Callable[[slice], Tensor]]:
    packed = found[f"{prefix}.weight_packed"]
    scale = side(found, prefix, "weight_scale")
    shape = found.get(f"{prefix}.weight_shape")
    bits = packed_bits(found, prefix)
    per_word = 32 // bits
    outputs, inputs = packed.shape[0], packed.shape[1] * per_word
    if shape is not None:
        told = [int(size) for size in all_of(shape).reshape(-1).tolist()]
        if len(told) != 2 or told[0] != outputs or not inputs - per_word < told[1] <= inputs:
            raise ValueError(
                f"{packed.path}: {prefix}.weight_shape says {told}, and the codes are {list(packed.shape)}"
            )
        inputs = told[1]
    if len(scale.shape) != 2 or scale.shape[0] != outputs or not scale.shape[1] or inputs % scale.shape[1]:
        raise ValueError(
            f"{packed.path}: the tensor {prefix + '.weight_scale'!r} of shape {list(scale.shape)} does not fit a "
            f"matrix [{outputs}, {inputs}] in groups"
        )
    zero, order = found.get(f"{prefix}.weight_zero_point"), found.get(f"{prefix}.weight_g_idx")
    groups = scale.shape[1]
    if zero is not None and zero.shape not in ((outputs, groups), (-(-outputs // per_word), groups)):
        raise ValueError(
            f"{zero.path}: the tensor {zero.name!r} of shape {list(zero.shape)} does not fit scales of shape "
            f"{[outputs, groups]}; download it again"
        )
    if order is not None:
        order = side(found, prefix, "weight_g_idx", (inputs,))

    def rows(part: slice) -> Tensor:
        values = packed_values(
            all_of(packed),
            all_of(scale),
            None if zero is None else all_of(zero),
            None if order is None else all_of(order),
            inputs,
            bits,
        )
        return values[part]

    return (outputs, inputs), rows


def _scaled(
    found: Mapping[str, Any], prefix: str, block: tuple[int, int] | None
) -> tuple[tuple[int, ...], Callable[[slice], Tensor]]:
    codes = found[f"{prefix}.weight"]
    inverse = f"{prefix}.weight_scale_inv" in found
    scale = side(found, prefix, "weight_scale_inv" if inverse else "weight_scale")
    outputs, inputs = codes.shape
    zero = found.get(f"{prefix}.weight_zero_point")
    if zero is not None and bool(all_of(zero).float().any()):
        raise ValueError(
            f"{zero.path}: the tensor {zero.name!r} holds zero points, and 8 bits are read without: take a checkpoint "
            "that was quantized symmetrically"
        )
    try:
        spread(torch.ones(scale.shape), outputs, inputs, block)
    except ValueError as error:
        raise ValueError(f"{scale.path}: {scale.name}: {error}; download it again") from None

    def rows(part: slice) -> Tensor:
        wide = spread(all_of(scale), outputs, inputs, block)
        values = codes.file.get_slice(codes.name)[part].float()
        return values * (wide if wide.shape[0] == 1 else wide[part])

    return (outputs, inputs), rows


def _mxfp4(found: Mapping[str, Any], name: str) -> tuple[tuple[int, ...], Callable[..., Tensor]]:
    """Return the shape and a reader of gpt-oss's experts: ``[E, O, I / 32, 16]`` -> ``[E, I, O]``, as they are
    unquantized."""
    blocks = found[name]
    if len(blocks.shape) != 4 or blocks.shape[3] != MX_BLOCK // 2:
        raise ValueError(
            f"{blocks.path}: the tensor {name!r} of shape {list(blocks.shape)} is not a stack of MXFP4 blocks"
        )
    experts, outputs, groups, _ = blocks.shape
    return (experts, groups * MX_BLOCK, outputs), partial(_mxfp4_expert, *_stack(found, name))


def _stack(found: Mapping[str, Any], name: str) -> tuple[Any, Any]:
    """Return the blocks of a stack of experts, and their scales."""
    blocks = found[name]
    prefix, _, last = name.rpartition(".")
    return blocks, side(found, prefix, f"{last.removesuffix('_blocks')}_scales", blocks.shape[:3])


def _mxfp4_expert(blocks: Any, scales: Any, part: Any) -> Tensor:
    return mxfp4_values(*_mxfp4_parts(blocks, scales, part)).mT


def _expert_blocks(blocks: Any, scales: Any, expert: int, rows: slice, columns: slice) -> Tensor:
    """Convert blocks to ggml's form: the exponent, then codes n and n + 16 in a byte; here neighbours share one."""
    part = within(blocks.shape[2] * MX_BLOCK, columns)
    if part.start % MX_BLOCK or part.stop % MX_BLOCK:
        raise ValueError(
            f"the tensor {blocks.name!r} packs {MX_BLOCK} numbers of a row together, and a cut at columns {part.start} "
            f"and {part.stop} would split them; take fewer parts"
        )
    codes, exponents = _mxfp4_parts(
        blocks, scales, (expert, rows, slice(part.start // MX_BLOCK, part.stop // MX_BLOCK))
    )
    each = torch.stack([codes & 15, codes >> 4], dim=-1).flatten(-2)
    both = each[..., : MX_BLOCK // 2] | each[..., MX_BLOCK // 2 :] << 4
    return torch.cat([exponents[..., None], both], -1).flatten(1)


def _mxfp4_parts(blocks: Any, scales: Any, part: Any) -> tuple[Tensor, Tensor]:
    codes, exponents = (each.file.get_slice(each.name)[part] for each in (blocks, scales))
    if bool((exponents == 255).any()):  # NaN
        raise ValueError(f"the scales of {blocks.name!r} hold infinite or NaN numbers")
    return codes, exponents
