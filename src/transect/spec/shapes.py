"""Published models by name, as configurations without files: for runs on random weights of a true shape (no torch).

The families' records have them, with the figures of the models' published ``config.json``. Operators are measured on
``ModelShape``s.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

from .families.registry import families
from .model import ModelConfig


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes of a model, as needed by operators."""

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


_PRESETS = {name: preset for family in families().values() for name, preset in family.presets.items()}
PRESETS: dict[str, ModelConfig] = {name: config for name, (_, config) in _PRESETS.items()}
"""Shapes that ``resolve(name, load_format="dummy")`` finds by name, beside directories."""
WEIGHTS_OF = {name: weights for name, (weights, _) in _PRESETS.items()}
"""Hub id of a published model of each shape."""


def _shape(name: str) -> ModelShape:
    sizes = (each.name for each in fields(ModelShape) if each.name != "name")
    return ModelShape(name, **{size: getattr(PRESETS[name], size) for size in sizes})


LLAMA_8B = _shape("llama-3.1-8b")
LLAMA_1B = _shape("llama-3.2-1b")
LLAMA_3B = _shape("llama-3.2-3b")
LLAMA_70B = _shape("llama-3.3-70b")
QWEN3_0_6B = _shape("qwen3-0.6b")
QWEN3_8B = _shape("qwen3-8b")
