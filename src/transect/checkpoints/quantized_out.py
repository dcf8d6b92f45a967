"""A plain model as a quantized checkpoint, in layouts that transformers and vLLM load.

The matrices of the layers are rounded; embedding, head, norms and routers stay as they are.

* ``fp8``: e4m3, a scale for each row; activations are rounded for each token by who serves it (W8A8 in vLLM)
* ``int8``: whole numbers, a scale for each row; the same
* ``int4``: 4 bits, a scale for each group of a row; activations stay (W4A16)
* ``gptq``: the same numbers in the layout of GPTQ checkpoints
* ``awq``: 4 bits with a scale and a zero for each group, in the layout of AWQ checkpoints

The first three are compressed-tensors.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..models.quantized_layouts import PER_WORD, codes_to_awq, codes_to_words, to_fp8, to_int8
from .quantized_grid import Grid, grid_of

FOUR_BITS = {"int4": torch.bfloat16, "gptq": torch.float16, "awq": torch.float16}
"""Formats of 4 bits, and in what they store scales."""
FORMATS = ("fp8", "int8", *FOUR_BITS)
WITH_KV_SCALES = ("fp8", "int8", "int4")
"""Formats whose checkpoints may have scales of a KV cache in fp8."""
_KV_SCHEME = {"num_bits": 8, "type": "float", "strategy": "attn_head", "symmetric": True, "dynamic": False}
GROUPS = (128, 64, 32)
"""Numbers of a row that share a scale: of these the first that divides every row."""
_LAYERS = re.compile(r"model\.layers\.\d+\..*(_proj|\.w[123])\.weight")


def is_symmetric(name: str) -> bool:
    """Whether a format of 4 bits has no zeros of its own."""
    return name != "awq"


def group_for(widths: Mapping[str, int], wanted: int | None) -> int:
    """How many numbers of a row share a scale.

    Args:
        widths: the numbers of a row, by the name of the matrix.
        wanted: None: the most that fit.

    Raises:
        ValueError: rows cannot be cut so; the message names a matrix.
    """
    if wanted is not None and wanted not in GROUPS:
        raise ValueError(f"the group size must be {', '.join(map(str, GROUPS))}, not {wanted}")
    for group in GROUPS if wanted is None else (wanted,):
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
    """Tensors under their Hugging Face names -> (tensors with the layers' matrices in the format, what config.json says
    of it).

    Args:
        grids: of 4 bits, those that matrices lie on already, by name; the others are rounded to the nearest.
        group: as in ``group_for``.
        kv_scales: float32 ``[L, 2, K]``, what keys and values of each key head are divided by for a cache in fp8; they
            are written beside the matrices.

    Raises:
        ValueError: an unknown format, one that has no place for scales of the cache, or a matrix that cannot be cut
            into groups; the message names it.
    """
    if name not in FORMATS:
        raise ValueError(f"format {name!r} is not known; choose {', '.join(FORMATS)}, or a type of GGUF files")
    stacks = [key for key, tensor in tensors.items() if tensor.ndim == 3]
    if stacks:
        raise ValueError(
            f"the experts in {stacks[0]!r} are one tensor, which {name} checkpoints cannot hold: take a type of GGUF "
            "files"
        )
    chosen = {key: tensor for key, tensor in tensors.items() if tensor.ndim == 2 and _LAYERS.fullmatch(key)}
    if not chosen:
        raise ValueError("the model has no matrices that such checkpoints can hold: take a type of GGUF files")
    if name in FOUR_BITS:
        group = group_for({key: tensor.shape[1] for key, tensor in chosen.items()}, group)
    out: dict[str, Tensor] = {}
    for key, tensor in tensors.items():
        prefix = key.removesuffix(".weight")
        if key not in chosen:
            out[key] = tensor
        elif group is not None and name in FOUR_BITS:
            grid = (grids or {}).get(key) or _nearest(tensor, group, name)
            out |= {f"{prefix}.{suffix}": each for suffix, each in _four_bits(tensor, grid, name).items()}
        else:
            codes, scale = (to_fp8 if name == "fp8" else to_int8)(tensor)
            out |= {key: codes, f"{prefix}.weight_scale": scale}
    settings = _checkpoint(name, group) if name in ("gptq", "awq") else _compressed(name, group)
    if kv_scales is not None:
        if name not in WITH_KV_SCALES:
            raise ValueError(
                f"{name} checkpoints have no scales of the KV cache; choose {', '.join(WITH_KV_SCALES)}, or leave them "
                "out"
            )
        for layer, both in enumerate(kv_scales.float()[..., None, None]):
            own = f"model.layers.{layer}.self_attn"
            out |= {f"{own}.k_scale": both[0].clone(), f"{own}.v_scale": both[1].clone()}
        settings["kv_cache_scheme"] = _KV_SCHEME
    return out, {"quantization_config": settings}


def _nearest(tensor: Tensor, group: int, name: str) -> Grid:
    everywhere = torch.ones(tensor.shape[1])
    return grid_of(tensor, group, everywhere, FOUR_BITS[name], symmetric=is_symmetric(name))


def _four_bits(tensor: Tensor, grid: Grid, name: str) -> dict[str, Tensor]:
    """The tensors of one matrix, by what their names end in."""
    codes, dtype = grid.codes(tensor), FOUR_BITS[name]
    outputs, inputs = tensor.shape
    if name == "int4":
        shape = torch.tensor(tensor.shape)
        words = codes_to_words(codes)
        return {"weight_packed": words, "weight_scale": grid.scale.to(dtype), "weight_shape": shape}
    scales = grid.scale.T.contiguous().to(dtype)
    zeros = grid.zero.T.to(torch.int32)
    if outputs % PER_WORD:
        raise ValueError(f"a matrix of {outputs} rows cannot be packed in words of {PER_WORD} codes; take int4")
    if name == "awq":
        return {"qweight": codes_to_awq(codes.T), "qzeros": codes_to_awq(zeros), "scales": scales}
    group = (torch.arange(inputs) // (inputs // grid.groups)).to(torch.int32)
    qweight = codes_to_words(codes).T.contiguous()
    # The first format of GPTQ checkpoints stores zeros less one.
    return {"qweight": qweight, "qzeros": codes_to_words(zeros - 1), "scales": scales, "g_idx": group}


def _checkpoint(name: str, group: int | None) -> dict[str, Any]:
    """What config.json says of GPTQ and AWQ."""
    if name == "awq":
        return {
            "quant_method": "awq",
            "bits": 4,
            "group_size": group,
            "zero_point": True,
            "version": "gemm",
            "modules_to_not_convert": ["lm_head"],
        }
    return {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": group,
        "sym": True,
        "desc_act": False,
        "checkpoint_format": "gptq",
        "lm_head": False,
    }


def _compressed(name: str, group: int | None) -> dict[str, Any]:
    kind = "float" if name == "fp8" else "int"
    four = name == "int4"
    weights = {
        "num_bits": 4 if four else 8,
        "type": kind,
        "symmetric": True,
        "strategy": "group" if four else "channel",
        "group_size": group if four else None,
        "dynamic": False,
    }
    activations = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    layout = {"fp8": "float-quantized", "int8": "int-quantized", "int4": "pack-quantized"}[name]
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": None if four else activations}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*block_sparse_moe.gate$", "re:.*shared_expert_gate$"],
        "config_groups": {"group_0": {**scheme, "output_activations": None, "format": layout}},
    }
