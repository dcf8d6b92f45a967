"""Qwen3: a norm of each head of q and k."""

from ..model import ModelConfig, RopeConfig
from .config_json import ATTENTION_BIAS, first_layers, sizes, windows
from .family import Family


def _config(tied: bool, dim: int, ffn_dim: int, n_layers: int, n_heads: int) -> ModelConfig:
    return ModelConfig(
        architecture="qwen3",
        vocab_size=151936,
        dim=dim,
        ffn_dim=ffn_dim,
        n_layers=n_layers,
        n_heads=n_heads,
        n_kv_heads=8,
        head_dim=128,
        max_position=40960,
        qk_norm=True,
        tied_embeddings=tied,
        rope=RopeConfig(theta=1000000.0),
        bos_token_id=151643,
        eos_token_ids=(151645,),
    )


QWEN3 = Family(
    name="qwen3",
    models="Qwen3 0.6B to 32B",
    hf_class="Qwen3ForCausalLM",
    hf=(*sizes(head_dim=128), ATTENTION_BIAS, windows(first_layers())),
    fixed={"qk_norm": True},
    gguf="qwen3",
    presets={
        "qwen3-0.6b": ("Qwen/Qwen3-0.6B", _config(True, 1024, 3072, 28, 16)),
        "qwen3-8b": ("Qwen/Qwen3-8B", _config(False, 4096, 12288, 36, 32)),
    },
    tiny={"head_dim": 32},
)
