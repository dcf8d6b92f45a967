"""Sizes of popular models, from 0.5 to 32 billion parameters: what a config.json says of them."""

from __future__ import annotations

from typing import Any, NamedTuple


class Shape(NamedTuple):
    """A model's sizes."""

    family: str
    dim: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool = False

    def config(self) -> dict[str, Any]:
        """Return its config.json."""
        names = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}
        return {
            "architectures": [names[self.family]],
            "model_type": self.family,
            "hidden_size": self.dim,
            "intermediate_size": self.ffn,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocab,
            "max_position_embeddings": 131072 if self.family == "llama" else 32768,
            "rms_norm_eps": 1e-5 if self.family == "llama" else 1e-6,
            "rope_theta": 500000.0 if self.family == "llama" else 1000000.0,
            "tie_word_embeddings": self.tied,
            "hidden_act": "silu",
            "torch_dtype": "bfloat16",
            "bos_token_id": 1,
            "eos_token_id": 2,
        }


SHAPES = {
    "qwen2.5-0.5b": Shape("qwen2", 896, 4864, 24, 14, 2, 64, 151936, tied=True),
    "qwen3-0.6b": Shape("qwen3", 1024, 3072, 28, 16, 8, 128, 151936, tied=True),
    "llama-3.2-1b": Shape("llama", 2048, 8192, 16, 32, 8, 64, 128256, tied=True),
    "qwen2.5-1.5b": Shape("qwen2", 1536, 8960, 28, 12, 2, 128, 151936, tied=True),
    "llama-3.2-3b": Shape("llama", 3072, 8192, 28, 24, 8, 128, 128256, tied=True),
    "qwen3-4b": Shape("qwen3", 2560, 9728, 36, 32, 8, 128, 151936, tied=True),
    "qwen2.5-7b": Shape("qwen2", 3584, 18944, 28, 28, 4, 128, 152064),
    "llama-3.1-8b": Shape("llama", 4096, 14336, 32, 32, 8, 128, 128256),
    "qwen2.5-14b": Shape("qwen2", 5120, 13824, 48, 40, 8, 128, 152064),
    "qwen2.5-32b": Shape("qwen2", 5120, 27648, 64, 40, 8, 128, 152064),
}
