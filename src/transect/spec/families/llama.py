"""Llama 1 to 3.3, and the many models that have its form."""

from ..model import ModelConfig, RopeConfig
from .config_json import ATTENTION_BIAS, MLP_BIAS, sizes
from .family import Family
from .gguf_keys import window


def _config(factor: float, tied: bool, dim: int, ffn_dim: int, n_layers: int, n_heads: int) -> ModelConfig:
    return ModelConfig(
        architecture="llama",
        vocab_size=128256,
        dim=dim,
        ffn_dim=ffn_dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=8,
        head_dim=dim // n_heads,
        max_position=131072,
        norm_eps=1e-5,
        tied_embeddings=tied,
        rope=RopeConfig(theta=500000.0, scaling="llama3", factor=factor, original_max_position=8192),
        bos_token_id=128000,
        eos_token_ids=(128001,),
    )


LLAMA = Family(
    name="llama",
    models="Llama 2 to 3.3, SmolLM2, TinyLlama, Yi",
    hf_class="LlamaForCausalLM",
    hf=(*sizes(max_position=2048), ATTENTION_BIAS, MLP_BIAS),
    gguf="llama",
    gguf_parts=(window(),),
    gguf_paired=True,
    presets={
        "llama-3.1-8b": ("meta-llama/Llama-3.1-8B", _config(8.0, False, 4096, 14336, 32, 32)),
        "llama-3.2-1b": ("meta-llama/Llama-3.2-1B", _config(32.0, True, 2048, 8192, 16, 32)),
        "llama-3.2-3b": ("meta-llama/Llama-3.2-3B", _config(32.0, True, 3072, 8192, 28, 24)),
        "llama-3.3-70b": ("meta-llama/Llama-3.3-70B-Instruct", _config(8.0, False, 8192, 28672, 80, 64)),
    },
)
