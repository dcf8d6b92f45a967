"""Real shapes of four models, and the token counts that operators are measured at.

They come from the models' published ``config.json``. Every ``Op.cases`` is built from these tables, so a benchmark row
names the model it comes from.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..spec.shapes import LLAMA_1B, LLAMA_8B, QWEN3_0_6B, QWEN3_8B, ModelShape

MODELS = (LLAMA_8B, LLAMA_1B, QWEN3_0_6B, QWEN3_8B)

HEADS = (
    LLAMA_1B,
    ModelShape("heads of 96", 3072, 8192, 32, 32, 8, 96, 32064),
    LLAMA_8B,
    ModelShape("heads of 256", 3840, 15360, 48, 16, 8, 256, 262208),
    ModelShape("llama-3.2-3b", 3072, 8192, 28, 24, 8, 128, 128256),
    ModelShape("qwen2.5-7b", 3584, 18944, 28, 28, 4, 128, 152064),
)
"""Heads of every size, and key heads that are shared by 2, 3, 4 and 7."""

DECODE_ROWS = (1, 8, 64, 256)
"""Tokens of an engine step that only decodes."""
PREFILL_ROWS = (8192,)
"""Tokens of a prefill or training step."""


def by_size(size: Callable[[ModelShape], Any]) -> list[tuple[str, ModelShape]]:
    """List the models that differ in ``size``, each with the names of all that share it."""
    found: dict[Any, list[ModelShape]] = {}
    for model in MODELS:
        found.setdefault(size(model), []).append(model)
    return [(", ".join(model.name for model in models), models[0]) for models in found.values()]


def rows_for_bytes(row_bytes: int, target: int = 256 * 2**20) -> int:
    """Return the rows, a multiple of 256, of a tensor of at least ``target`` bytes: larger than every cache."""
    return -(-target // (row_bytes * 256)) * 256
