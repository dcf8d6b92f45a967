"""A plain model as a quantized checkpoint in the layout of compressed-tensors, which transformers and vLLM load.

The matrices of the layers are rounded; embedding, head, norms and routers stay as they are.

* ``fp8``: e4m3, a scale for each row; activations are rounded for each token by who serves it (W8A8 in vLLM)
* ``int8``: whole numbers, a scale for each row; the same
* ``int4``: 4 bits, a scale for each 128 numbers of a row; activations stay (W4A16)
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from .quantized_layouts import to_fp8, to_int8, to_packed

FORMATS = ("fp8", "int8", "int4")
GROUP = 128
_LAYERS = re.compile(r"model\.layers\.\d+\..*(_proj|\.w[123])\.weight")


def encoded(tensors: Mapping[str, Tensor], name: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors under their Hugging Face names -> (tensors with the layers' matrices in the format, what config.json says
    of it).

    Raises:
        ValueError: an unknown format, or a matrix that cannot be cut into groups; the message names it.
    """
    if name not in FORMATS:
        raise ValueError(f"format {name!r} is not known; choose {', '.join(FORMATS)}, or a type of GGUF files")
    out: dict[str, Tensor] = {}
    done = 0
    for key, tensor in tensors.items():
        if tensor.ndim != 2 or not _LAYERS.fullmatch(key):
            if tensor.ndim == 3:
                raise ValueError(f"the experts in {key!r} are one tensor, which compressed-tensors cannot hold")
            out[key] = tensor
            continue
        done += 1
        prefix = key.removesuffix(".weight")
        if name == "int4":
            try:
                words, scale = to_packed(tensor, GROUP)
            except ValueError as error:
                raise ValueError(f"{key}: {error}; take fp8 or int8") from None
            out |= {f"{prefix}.weight_packed": words, f"{prefix}.weight_scale": scale}
            out[f"{prefix}.weight_shape"] = torch.tensor(tensor.shape)
        else:
            codes, scale = (to_fp8 if name == "fp8" else to_int8)(tensor)
            out |= {key: codes, f"{prefix}.weight_scale": scale}
    if not done:
        raise ValueError("the model has no matrices that compressed-tensors can hold: take a type of GGUF files")
    return out, {"quantization_config": _settings(name)}


def _settings(name: str) -> dict[str, Any]:
    kind = "float" if name == "fp8" else "int"
    four = name == "int4"
    weights = {
        "num_bits": 4 if four else 8,
        "type": kind,
        "symmetric": True,
        "strategy": "group" if four else "channel",
        "group_size": GROUP if four else None,
        "dynamic": False,
    }
    activations = {"num_bits": 8, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    layout = {"fp8": "float-quantized", "int8": "int-quantized", "int4": "pack-quantized"}[name]
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None if four else activations}
    return {
        "quant_method": "compressed-tensors",
        "format": layout,
        "quantization_status": "compressed",
        "ignore": ["lm_head", "re:.*mlp.gate$", "re:.*block_sparse_moe.gate$", "re:.*shared_expert_gate$"],
        "config_groups": {"group_0": {**group, "output_activations": None, "format": layout}},
    }
