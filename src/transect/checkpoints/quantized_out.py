"""Writing of a plain model as a quantized checkpoint, in layouts that transformers and vLLM load.

The matrices of the layers are rounded; embedding, head, norms and routers stay as they are. The formats are those of
``spec/numbers`` that have a ``FileUse``, which makes the settings of config.json. The tensors are made here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ..models.quantized_layouts import PER_WORD, codes_to_awq, codes_to_words, to_fp8, to_int8, to_listed
from ..spec.numbers.awq import AWQ
from ..spec.numbers.fp8 import FP8
from ..spec.numbers.gptq import GPTQ
from ..spec.numbers.int4 import GROUPS, INT4
from ..spec.numbers.int8 import INT8
from ..spec.numbers.number_format import FileUse, NumberFormat
from ..spec.numbers.registry import file_formats, file_uses, listed
from .quantized_codes import LISTED
from .quantized_grid import Grid, grid_of

_KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "attn_head", "symmetric": True, "dynamic": False}
_LAYERS = re.compile(r"model\.layers\.\d+\..*(_proj|\.w[123])\.weight")


def group_for(widths: Mapping[str, int], wanted: int | None) -> int:
    """Return the numbers of a row that share a scale.

    Args:
        widths: the numbers of a row, by the name of the matrix.
        wanted: the setting; None for the most that fit.

    Raises:
        ValueError: rows cannot be cut so; the message names a matrix.
    """
    if wanted is not None and wanted not in GROUPS:
        raise ValueError(f"the group size must be {', '.join(map(str, GROUPS[::-1]))}, not {wanted}")
    for group in GROUPS[::-1] if wanted is None else (wanted,):
        odd = [(name, width) for name, width in widths.items() if width % group]
        if not odd:
            return group
    name, width = odd[0]
    raise ValueError(f"{name}: rows of {width} numbers cannot be cut into groups of {group}; take fp8 or int8")


def encoded(
    tensors: Mapping[str, Tensor],
    name: str,
    grids: Mapping[str, Grid] | None = None,
    group: int | None = None,
    kv_scales: Tensor | None = None,
) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Quantize tensors given by Hugging Face names; returns (tensors with the layers' matrices in the format, its entry
    in config.json).

    Args:
        grids: of 4 bits, those that matrices lie on already, by name; the others are rounded to the nearest.
        group: as in ``group_for``.
        kv_scales: float32 ``[L, 2, K]``, what keys and values of each key head are divided by for a cache in fp8; they
            are written beside the matrices.

    Raises:
        ValueError: an unknown format, one that has no place for scales of the cache, or a matrix that cannot be cut
            into groups; the message names it.
    """
    form, use = file_format(name)
    stacks = [key for key, tensor in tensors.items() if tensor.ndim == 3]
    if stacks:
        raise ValueError(
            f"the experts in {stacks[0]!r} are one tensor, which {name} checkpoints cannot hold: take a type of GGUF "
            "files"
        )
    chosen = {key: tensor for key, tensor in tensors.items() if tensor.ndim == 2 and _LAYERS.fullmatch(key)}
    if not chosen:
        raise ValueError("the model has no matrices that such checkpoints can hold: take a type of GGUF files")
    if use.grouped:
        group = group_for({key: tensor.shape[1] for key, tensor in chosen.items()}, group)
    out: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        prefix = key.removesuffix(".weight")
        if key not in chosen:
            out[key] = tensor
            continue
        if use.grouped:
            assert group is not None
            grid = (grids or {}).get(key) or _nearest(tensor, group, use)
            made = _GROUPED[form](grid.codes(tensor), grid, getattr(torch, use.scale_dtype))
        else:
            made = _rows(form)(tensor)
        out |= {f"{prefix}.{suffix}": each for suffix, each in made.items()}
    settings = use.settings(group if use.grouped else None)
    if kv_scales is not None:
        if not use.kv_scales:
            known = [name for name, each in file_uses().items() if each.kv_scales]
            raise ValueError(
                f"{name} checkpoints have no scales of the KV cache; choose {listed(known)}, or leave them out"
            )
        for layer, both in enumerate(kv_scales.float()[..., None, None]):
            own = f"model.layers.{layer}.self_attn"
            out |= {f"{own}.k_scale": both[0].clone(), f"{own}.v_scale": both[1].clone()}
        settings["kv_cache_scheme"] = _KV_SCHEME
    return out, {"quantization_config": settings}


def file_format(name: str) -> tuple[NumberFormat, FileUse]:
    """Return the format that ``--format`` names, of those in safetensors.

    Raises:
        ValueError: there is none.
    """
    form = file_formats().get(name)
    if form is None or form.file is None:
        raise ValueError(f"format {name!r} is not known; choose {', '.join(file_formats())}, or a type of GGUF files")
    return form, form.file


def _nearest(tensor: Tensor, group: int, use: FileUse) -> Grid:
    everywhere = torch.ones(tensor.shape[1])
    return grid_of(tensor, group, everywhere, getattr(torch, use.scale_dtype), symmetric=use.symmetric)


def _rows(form: NumberFormat) -> Callable[[Tensor], dict[str, Tensor]]:
    """Return the tensors of a matrix without ``--group-size``, by the ends of their names."""
    if form.codebook is None:
        return _SCALED[form]
    codebook = form.codebook

    def codes(tensor: Tensor) -> dict[str, Tensor]:
        packed, scale = to_listed(tensor, codebook)
        return {LISTED: packed, "weight_scale": scale, "weight_shape": torch.tensor(tensor.shape)}

    return codes


def _scaled(to_codes: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Callable[[Tensor], dict[str, Tensor]]:
    return lambda tensor: dict(zip(("weight", "weight_scale"), to_codes(tensor), strict=True))


def _compressed_words(codes: Tensor, grid: Grid, dtype: torch.dtype) -> dict[str, Tensor]:
    shape = torch.tensor(codes.shape)
    return {"weight_packed": codes_to_words(codes), "weight_scale": grid.scale.to(dtype), "weight_shape": shape}


def _beside(codes: Tensor, grid: Grid, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return scales and zeros ``[G, O]``."""
    if len(codes) % PER_WORD:
        raise ValueError(f"a matrix of {len(codes)} rows cannot be packed in words of {PER_WORD} codes; take int4")
    return grid.scale.T.contiguous().to(dtype), grid.zero.T.to(torch.int32)


def _awq_words(codes: Tensor, grid: Grid, dtype: torch.dtype) -> dict[str, Tensor]:
    scales, zeros = _beside(codes, grid, dtype)
    return {"qweight": codes_to_awq(codes.T), "qzeros": codes_to_awq(zeros), "scales": scales}


def _gptq_words(codes: Tensor, grid: Grid, dtype: torch.dtype) -> dict[str, Tensor]:
    scales, zeros = _beside(codes, grid, dtype)
    inputs = codes.shape[1]
    group = (torch.arange(inputs) // (inputs // grid.groups)).to(torch.int32)
    qweight = codes_to_words(codes).T.contiguous()
    # The first format of GPTQ checkpoints stores zeros less one.
    return {"qweight": qweight, "qzeros": codes_to_words(zeros - 1), "scales": scales, "g_idx": group}


_SCALED: Mapping[NumberFormat, Callable[[Tensor], dict[str, Tensor]]] = {FP8: _scaled(to_fp8), INT8: _scaled(to_int8)}
_GROUPED: Mapping[NumberFormat, Callable[[Tensor, Grid, torch.dtype], dict[str, Tensor]]] = {
    INT4: _compressed_words,
    GPTQ: _gptq_words,
    AWQ: _awq_words,
}
"""Functions that build the tensors of a matrix of codes in groups, by the ends of their names."""
