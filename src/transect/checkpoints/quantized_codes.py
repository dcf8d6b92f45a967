"""Quantized checkpoints in safetensors as they are packed: codes and scales, for kinds of weight that hold such."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..models.quantized_layouts import AWQ_ORDER, PER_WORD, code_numbers, gptq_zeros, words_to_codes
from ..models.stored import Codes4, Codes8, ListedCodes, PackedValues, within
from ..spec.fields import Fields
from ..spec.numbers.awq import AWQ_METHOD
from ..spec.numbers.codebook import codebook_of
from ..spec.numbers.gptq import GPTQ_METHOD, zero_step
from ..spec.numbers.int4 import GROUPS
from ..spec.numbers.layouts import SCALE_BLOCK, GroupLayout, ListedLayout, MatrixLayout, ScaledLayout
from ..spec.numbers.number_format import Codebook
from ..spec.numbers.registry import listed

Packed = Callable[[slice, slice], PackedValues]
T = TypeVar("T")
LISTED = "weight_codes"
"""End of the name of a codebook's codes; ``weight_scale`` is beside them."""
BLOCK = SCALE_BLOCK
NONE = (None, None)


def codes_of(
    found: Mapping[str, Any], prefix: str, suffix: str, shape: tuple[int, ...], settings: Mapping[str, Any]
) -> tuple[MatrixLayout, Packed] | tuple[None, None]:
    """Find the layout of a matrix, and a reader of its codes; (None, None) if no kind of weight holds it so.

    Args:
        found: all tensors, by name.
        prefix, suffix: of the name of its codes.
        shape: (outputs, inputs).
        settings: ``quantization_config`` of config.json.
    """
    outputs, inputs = shape
    if suffix == "weight":
        return _bytes(found, prefix, outputs, inputs, settings)
    if suffix == LISTED:
        return _listed(found, prefix, inputs, settings)
    if suffix == "weight_packed" and packed_bits(found, prefix) == 8:
        return _packed_bytes(found, prefix, outputs, inputs)
    if suffix == "weight_packed":
        scale = found[f"{prefix}.weight_scale"]
        order = found.get(f"{prefix}.weight_g_idx")
        return _words(found, prefix, outputs, inputs, scale.shape[1], order, _packed_parts)
    groups, order = found[f"{prefix}.scales"].shape[0], found.get(f"{prefix}.g_idx")
    return _words(found, prefix, outputs, inputs, groups, order, partial(_parts_of(settings), settings))


def _bytes(
    found: Mapping[str, Any], prefix: str, outputs: int, inputs: int, settings: Mapping[str, Any]
) -> tuple[MatrixLayout, Packed] | tuple[None, None]:
    stored = found[f"{prefix}.weight"]
    name = f"{prefix}.weight_scale_inv" if f"{prefix}.weight_scale_inv" in found else f"{prefix}.weight_scale"
    scale = found[name]
    blocks = prod(scale.shape) not in (1, outputs) or (len(scale.shape) == 2 and scale.shape[1] > 1)
    fp8 = stored.dtype == "F8_E4M3"
    if blocks and (not fp8 or block_of(settings) != (BLOCK, BLOCK)):
        return NONE
    layout = ScaledLayout(fp8, blocks, _rounds_inputs(settings))

    def read(rows: slice, columns: slice) -> Codes8:
        own, across = within(outputs, rows), within(inputs, columns)
        codes = stored.file.get_slice(stored.name)[own, across].contiguous().view(torch.int8)
        if fp8 and bool((codes & 0x7F == 0x7F).any()):
            raise ValueError(f"the codes of {f'{prefix}.weight'!r} hold NaN; download the file again")
        wide = all_of(scale).float()
        if not bool(wide.isfinite().all()):
            raise ValueError(f"the scales of {f'{prefix}.weight'!r} hold infinite or NaN numbers")
        if blocks:
            if own.start % BLOCK or (own.stop % BLOCK and own.stop != outputs) or across.start % BLOCK:
                raise ValueError(
                    f"the matrix {prefix!r} has scales of blocks of {BLOCK}, which a cut at rows {own.start} to "
                    f"{own.stop} and columns {across.start} to {across.stop} would part: take fewer parts"
                )
            wide = wide[own.start // BLOCK : -(-own.stop // BLOCK), across.start // BLOCK : -(-across.stop // BLOCK)]
        else:
            wide = wide.reshape(-1).expand(outputs)[own]
        return Codes8(layout, codes, wide.contiguous())

    return layout, read


def packed_bits(found: Mapping[str, Any], prefix: str) -> int:
    """Return the bits of a code of compressed-tensors' packed words: 8 if there are twice as many words as for 4."""
    shape = found.get(f"{prefix}.weight_shape")
    told = [] if shape is None else all_of(shape).reshape(-1).tolist()
    words = found[f"{prefix}.weight_packed"].shape[1]
    return 8 if len(told) == 2 and 4 * words - 4 < told[1] <= 4 * words else 4


def _packed_bytes(
    found: Mapping[str, Any], prefix: str, outputs: int, inputs: int
) -> tuple[MatrixLayout, Packed] | tuple[None, None]:
    """Read words of four codes, if they have one scale for an output and no zero, and thus stay in 8 bits."""
    stored, scale = found[f"{prefix}.weight_packed"], found[f"{prefix}.weight_scale"]
    if scale.shape != (outputs, 1) or any(f"{prefix}.weight_{name}" in found for name in ("zero_point", "g_idx")):
        return NONE
    layout = ScaledLayout(fp8=False, rounds_inputs=False)

    def read(rows: slice, columns: slice) -> Codes8:
        codes = words_to_codes(stored.file.get_slice(stored.name)[within(outputs, rows)], 8)[:, :inputs] - 128
        wide = all_of(scale).float().reshape(-1)[rows]
        if not bool(wide.isfinite().all()):
            raise ValueError(f"the scales of {f'{prefix}.weight'!r} hold infinite or NaN numbers")
        return Codes8(layout, codes[:, columns].to(torch.int8).contiguous(), wide.contiguous())

    return layout, read


def _rounds_inputs(settings: Mapping[str, Any]) -> bool:
    """Return True if the checkpoint is made for activations that are rounded to 8 bits."""
    groups = settings.get("config_groups")
    if not isinstance(groups, Mapping):
        return True
    return all(isinstance(each, Mapping) and each.get("input_activations") is not None for each in groups.values())


def _words(
    found: Mapping[str, Any],
    prefix: str,
    outputs: int,
    inputs: int,
    groups: int,
    order: Any,
    parts: Callable[[Mapping[str, Any], str], tuple[Tensor, Tensor, Tensor]],
) -> tuple[MatrixLayout, Packed] | tuple[None, None]:
    """Find the layout of words; ``parts`` returns codes ``[O, I]``, zeros as codes and scales ``[O, G]``; ``order`` is
    the tensor of groups."""
    size = inputs // groups  # a larger group is handled as several of the largest size
    if inputs % groups or (size not in GROUPS and size % GROUPS[-1]):
        return NONE
    in_order = torch.arange(inputs) // size
    index = in_order if order is None else all_of(order).long()
    if len(index) != inputs:
        return NONE
    columns_of = None if bool((index == in_order).all()) else torch.argsort(index, stable=True)
    if columns_of is not None and not bool((index[columns_of] == in_order).all()):
        return NONE  # groups of unequal size
    group = min(size, GROUPS[-1])
    layout = GroupLayout(group, ordered=columns_of is not None)

    def read(rows: slice, columns: slice) -> Codes4:
        own, across = within(outputs, rows), within(inputs, columns)
        codes, zeros, scale = parts(found, prefix)
        codes, zeros, scale = codes[own, :inputs].to(torch.uint8), zeros[own].float(), scale[own].float()
        if not bool(scale.isfinite().all()):
            raise ValueError(f"the scales of {f'{prefix}.weight'!r} hold infinite or NaN numbers")
        if columns_of is not None:
            codes = codes[:, columns_of]
        scale, zero = (t.repeat_interleave(size // group, 1) for t in (scale, -scale * zeros))
        if across != slice(0, inputs):
            if columns_of is not None or across.start % group or across.stop % group:
                raise ValueError(
                    f"the matrix {prefix!r} has groups of {size} inputs, which a cut at columns {across.start} and "
                    f"{across.stop} would part: take fewer parts"
                )
            own_groups = slice(across.start // group, across.stop // group)
            codes, scale, zero = codes[:, across], scale[:, own_groups], zero[:, own_groups]
        return Codes4(layout, codes.contiguous(), scale.contiguous(), zero.contiguous(), columns_of)

    return layout, read


def _listed(
    found: Mapping[str, Any], prefix: str, inputs: int, settings: Mapping[str, Any]
) -> tuple[ListedLayout, Packed]:
    """Find the layout of codes of a codebook."""
    stored, scale = found[f"{prefix}.{LISTED}"], side(found, prefix, "weight_scale")
    layout = ListedLayout(codebook_of(settings))
    group, per_byte = layout.codebook.group, 8 // layout.codebook.code_bits

    def read(rows: slice, columns: slice) -> ListedCodes:
        own, across = within(stored.shape[0], rows), within(inputs, columns)
        if across.start % group or (across.stop % group and across.stop != inputs):
            raise ValueError(
                f"the matrix {prefix!r} has groups of {group} inputs, which a cut at columns {across.start} and "
                f"{across.stop} would part: take fewer parts"
            )
        part = slice(across.start // per_byte, -(-across.stop // per_byte))
        codes = checked_codes(stored, layout.codebook, stored.file.get_slice(stored.name)[own, part])
        wide = all_of(scale)[own, across.start // group : -(-across.stop // group)]
        if not bool(wide.isfinite().all()):
            raise ValueError(f"the scales of {f'{prefix}.weight'!r} hold infinite or NaN numbers")
        return ListedCodes(layout, codes.contiguous(), wide.contiguous())

    return layout, read


def checked_codes(stored: Any, codebook: Codebook, codes: Tensor) -> Tensor:
    """Return bytes of codes of a file after checking that all codes are in the codebook.

    Raises:
        ValueError: one is not.
    """
    found = int(code_numbers(codes, codebook.code_bits).max()) if codes.numel() else 0
    if found >= len(codebook.values):
        raise ValueError(
            f"the tensor {stored.name!r} holds the code {found}, and the codebook in config.json has "
            f"{len(codebook.values)} values; download the model again"
        )
    return codes


def _gptq_parts(settings: Mapping[str, Any], found: Mapping[str, Any], prefix: str) -> tuple[Tensor, Tensor, Tensor]:
    codes = words_to_codes(all_of(found[f"{prefix}.qweight"]).T)
    zeros = gptq_zeros(all_of(found[f"{prefix}.qzeros"]), zero_step(settings))
    return codes, zeros, all_of(found[f"{prefix}.scales"]).float().T


def _awq_parts(settings: Mapping[str, Any], found: Mapping[str, Any], prefix: str) -> tuple[Tensor, Tensor, Tensor]:
    def in_order(words: Tensor) -> Tensor:
        return words_to_codes(words).unflatten(-1, (-1, PER_WORD))[..., list(AWQ_ORDER)].flatten(-2)

    codes, zeros = (in_order(all_of(found[f"{prefix}.{name}"])).T for name in ("qweight", "qzeros"))
    return codes, zeros, all_of(found[f"{prefix}.scales"]).float().T


_PARTS = {GPTQ_METHOD.name: _gptq_parts, AWQ_METHOD.name: _awq_parts}
"""Functions that read codes ``[O, I]``, zeros as codes and scales ``[O, G]`` of a matrix in words, by the checkpoint's
method."""


def _parts_of(settings: Mapping[str, Any]) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
    return of_method(_PARTS, settings)


def of_method(table: Mapping[str, T], settings: Mapping[str, Any]) -> T:
    """Return the entry of the checkpoint's method.

    Raises:
        ValueError: its tensors are those of another method.
    """
    method = str(settings.get("quant_method"))
    if method not in table:
        raise ValueError(
            f"config.json has a quantization_config of method {method!r}, and the tensors are those of "
            f"{listed(table)}; download the model again"
        )
    return table[method]


def _packed_parts(found: Mapping[str, Any], prefix: str) -> tuple[Tensor, Tensor, Tensor]:
    scale = all_of(found[f"{prefix}.weight_scale"]).float()
    codes = words_to_codes(all_of(found[f"{prefix}.weight_packed"]))
    stored = found.get(f"{prefix}.weight_zero_point")
    if stored is None:
        return codes, torch.full_like(scale, 8.0), scale
    zero = all_of(stored)
    if zero.dtype == torch.int32 and len(zero) != len(scale):
        return codes, words_to_codes(zero.T).T[: len(scale)], scale
    return codes, zero.to(torch.int32) + 8, scale


def side(found: Mapping[str, Any], prefix: str, suffix: str, shape: tuple[int, ...] | None = None) -> Any:
    """Return a tensor that belongs to a matrix.

    Raises:
        ValueError: it is missing, or of another shape.
    """
    name = f"{prefix}.{suffix}"
    stored = found.get(name)
    if stored is None:
        raise ValueError(f"the tensor {name!r} is missing, without which {prefix!r} has no values; download it again")
    if shape is not None and stored.shape != shape:
        raise ValueError(
            f"{stored.path}: the tensor {name!r} should have shape {list(shape)} and has {list(stored.shape)}; the "
            "group size in config.json and the weights do not belong together"
        )
    return stored


def all_of(stored: Any) -> Tensor:
    values: Tensor = stored.file.get_tensor(stored.name)
    return values


def groups_of(settings: Mapping[str, Any], inputs: int, name: str) -> int:
    group = Fields(settings, "quantization_config of config.json").integer("group_size", 128, low=-1)
    group = inputs if group == -1 else group
    if group <= 0 or inputs % group:
        raise ValueError(f"groups of {group} (group_size in config.json) do not fit the {inputs} inputs of {name!r}")
    return inputs // group


def block_of(settings: Mapping[str, Any]) -> tuple[int, int] | None:
    """Return the rows and columns of a block that shares a scale; None without blocks."""
    found = settings.get("weight_block_size")
    groups = settings.get("config_groups")
    for group in groups.values() if isinstance(groups, Mapping) else ():
        weights = group.get("weights") if isinstance(group, Mapping) else None
        found = found or (weights.get("block_structure") if isinstance(weights, Mapping) else None)
    if found is None:
        return None
    if not isinstance(found, list) or len(found) != 2 or any(not isinstance(n, int) or n <= 0 for n in found):
        raise ValueError(f"the block of scales in config.json must be two numbers, rows and columns, not {found!r}")
    return found[0], found[1]
