"""Published models by name, as configurations without files: for runs on random weights of a true shape (no torch).

Sizes come from ``ops/shapes.py``, but for mixtures of experts, which are not in its tables. What is added here (rotary
frequencies, epsilon, context, special tokens) is read off the models' published ``config.json``.
"""

from __future__ import annotations

from typing import Any

from ..ops.shapes import LLAMA_1B, LLAMA_3B, LLAMA_8B, LLAMA_70B, QWEN3_0_6B, QWEN3_8B, ModelShape
from .config import ModelConfig, RopeConfig
from .config_moe import MoEConfig


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
"""What ``resolve(name, load_format="dummy")`` knows beside directories."""
