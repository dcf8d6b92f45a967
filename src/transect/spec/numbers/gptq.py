"""GPTQ checkpoints (Frantar et al. 2022, arXiv:2210.17323): 4-bit codes in groups, eight in a word along the inputs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..fields import Fields
from .int4 import int4_format
from .number_format import FileUse, Method, NumberFormat


def check_four_bits(read: Fields, method: str) -> None:
    """Check that codes have 4 bits.

    Raises:
        ValueError: they have others.
    """
    bits = read.integer("bits", 4)
    if bits != 4:
        raise ValueError(f"{method} with {bits} bits (config.json) is not supported; only 4 is")


GPTQ_METHOD = Method("gptq", lambda read, settings: check_four_bits(read, "gptq"))
NEW_ZEROS = "gptq_v2"
"""Value of ``checkpoint_format`` for zeros that are stored unchanged."""


def zero_step(settings: Mapping[str, Any]) -> int:
    """Return the number that the first format of AutoGPTQ subtracts from each zero: 1, or 0 for later formats."""
    return int(settings.get("checkpoint_format") != NEW_ZEROS)


def _settings(group: int | None) -> dict[str, Any]:
    return {
        "quant_method": GPTQ_METHOD.name,
        "bits": 4,
        "group_size": group,
        "sym": True,
        "desc_act": False,
        "checkpoint_format": "gptq",
        "lm_head": False,
    }


GPTQ = NumberFormat(
    name="gptq",
    summary="4-bit code, a scale for each group of a row, in the layout of GPTQ",
    bits=int4_format().bits,
    accuracy="as int4",
    methods=(GPTQ_METHOD.name,),
    file=FileUse(
        words="safetensors in the layout of GPTQ", read_by="transformers, vLLM", settings=_settings,
        scale_dtype="float16",
    ),
)  # fmt: skip
