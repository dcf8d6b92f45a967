"""Published models by name, as configurations without files: for runs on random weights of a true shape (no torch).

All figures are those of the models' published ``config.json``. Operators are measured on ``ModelShape``s.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .model import ModelConfig, RopeConfig
from .moe import MoEConfig


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


def _llama(shape: ModelShape, rope_factor: float, tied: bool) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        max_position=131072,
        norm_eps=1e-5,
        tied_embeddings=tied,
        rope=RopeConfig(theta=500000.0, scaling="llama3", factor=rope_factor, original_max_position=8192),
        bos_token_id=128000,
        eos_token_ids=(128001,),
        **_sizes(shape),
    )


def _qwen3(shape: ModelShape, tied: bool) -> ModelConfig:
    return ModelConfig(
        architecture="qwen3",
        max_position=40960,
        norm_eps=1e-6,
        qk_norm=True,
        tied_embeddings=tied,
        rope=RopeConfig(theta=1000000.0),
        bos_token_id=151643,
        eos_token_ids=(151645,),
        **_sizes(shape),
    )


QWEN3_30B_A3B = ModelConfig(
    architecture="qwen3_moe",
    vocab_size=151936,
    dim=2048,
    n_layers=48,
    n_heads=32,
    n_kv_heads=4,
    head_dim=128,
    ffn_dim=6144,
    max_position=40960,
    norm_eps=1e-6,
    qk_norm=True,
    rope=RopeConfig(theta=1000000.0),
    bos_token_id=151643,
    eos_token_ids=(151645,),
    moe=MoEConfig(experts=128, per_token=8, expert_dim=768),
)


def _sizes(shape: ModelShape) -> dict[str, Any]:
    names = ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim")
    return {name: getattr(shape, name) for name in names}


PRESETS: dict[str, ModelConfig] = {
    LLAMA_8B.name: _llama(LLAMA_8B, 8.0, tied=False),
    LLAMA_1B.name: _llama(LLAMA_1B, 32.0, tied=True),
    LLAMA_3B.name: _llama(LLAMA_3B, 32.0, tied=True),
    LLAMA_70B.name: _llama(LLAMA_70B, 8.0, tied=False),
    QWEN3_0_6B.name: _qwen3(QWEN3_0_6B, tied=True),
    QWEN3_8B.name: _qwen3(QWEN3_8B, tied=False),
    "qwen3-30b-a3b": QWEN3_30B_A3B,
}
"""Shapes that ``resolve(name, load_format="dummy")`` finds by name, beside directories."""

WEIGHTS_OF = {
    LLAMA_8B.name: "meta-llama/Llama-3.1-8B",
    LLAMA_1B.name: "meta-llama/Llama-3.2-1B",
    LLAMA_3B.name: "meta-llama/Llama-3.2-3B",
    LLAMA_70B.name: "meta-llama/Llama-3.3-70B-Instruct",
    QWEN3_0_6B.name: "Qwen/Qwen3-0.6B",
    QWEN3_8B.name: "Qwen/Qwen3-8B",
    "qwen3-30b-a3b": "Qwen/Qwen3-30B-A3B",
}
"""Hub id of a published model of each shape."""
