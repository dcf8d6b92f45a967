"""Real shapes of four models, and the token counts that operators are measured at.

They come from the models' published ``config.json``. Every ``Op.cases`` is built from these tables, so a benchmark row
names the model it comes from.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ModelShape:
    """The sizes that operators see."""

    name: str
    dim: int
    ffn_dim: int
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    vocab_size: int
    qk_norm: bool = False

    @property
    def qkv_dim(self) -> int:
        """Width of the joined query, key and value projection."""
        return (self.n_heads + 2 * self.n_kv_heads) * self.head_dim


LLAMA_8B = ModelShape("llama-3.1-8b", 4096, 14336, 32, 32, 8, 128, 128256)
LLAMA_1B = ModelShape("llama-3.2-1b", 2048, 8192, 16, 32, 8, 64, 128256)
LLAMA_3B = ModelShape("llama-3.2-3b", 3072, 8192, 28, 24, 8, 128, 128256)
QWEN3_0_6B = ModelShape("qwen3-0.6b", 1024, 3072, 28, 16, 8, 128, 151936, qk_norm=True)
QWEN3_8B = ModelShape("qwen3-8b", 4096, 12288, 36, 32, 8, 128, 151936, qk_norm=True)
LLAMA_70B = ModelShape("llama-3.3-70b", 8192, 28672, 80, 64, 8, 128, 128256)
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
    """Models that differ in ``size``, each with the names of all that share it."""
    found: dict[Any, list[ModelShape]] = {}
    for model in MODELS:
        found.setdefault(size(model), []).append(model)
    return [(", ".join(model.name for model in models), models[0]) for models in found.values()]


def rows_for_bytes(row_bytes: int, target: int = 256 * 2**20) -> int:
    """Rows, a multiple of 256, that make a tensor of at least ``target`` bytes: past every cache."""
    return -(-target // (row_bytes * 256)) * 256
