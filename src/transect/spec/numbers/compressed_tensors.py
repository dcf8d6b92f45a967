"""compressed-tensors, the checkpoints of llm-compressor and vLLM: their ``quantization_config``, in and out."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..fields import Fields
from .number_format import Method

_READ = (
    "dense", "naive-quantized", "float-quantized", "int-quantized", "pack-quantized", "mixed-precision",
)  # fmt: skip
"""Layouts of matrices that can be read."""
_KEPT = ("lm_head", "re:.*mlp.gate$", "re:.*block_sparse_moe.gate$", "re:.*shared_expert_gate$")
"""Modules that are not quantized."""


def compressed(layout: str, kind: str, bits: int, group: int | None = None) -> dict[str, Any]:
    """Make the ``quantization_config`` of matrices in ``bits`` bits of ``kind`` (float or int).

    ``group`` numbers of a row share a scale. Without it a row does, and activations are rounded for each token.
    """
    weights = {
        "num_bits": bits,
        "type": kind,
        "symmetric": True,
        "strategy": "channel" if group is None else "group",
        "group_size": group,
        "dynamic": False,
    }
    activations = {"num_bits": bits, "type": kind, "symmetric": True, "strategy": "token", "dynamic": True}
    scheme = {"targets": ["Linear"], "weights": weights, "input_activations": activations if group is None else None}
    return {
        "quant_method": COMPRESSED_TENSORS.name,
        "format": layout,
        "quantization_status": "compressed",
        "ignore": list(_KEPT),
        "config_groups": {"group_0": {**scheme, "output_activations": None, "format": layout}},
    }


def _check(read: Fields, settings: Mapping[str, Any]) -> None:
    groups = settings.get("config_groups")
    each = list(groups.values()) if isinstance(groups, Mapping) else []
    for found in (settings, *(group for group in each if isinstance(group, Mapping))):
        layout = found.get("format")
        if layout is not None and layout not in _READ:
            raise ValueError(
                f"config.json has compressed-tensors of format {layout!r}, which is not supported; supported are: "
                f"{', '.join(_READ)}. Take another, the unquantized model or a GGUF file"
            )


COMPRESSED_TENSORS = Method("compressed-tensors", _check)
