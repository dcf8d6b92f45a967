"""Qwen2 and Qwen2.5: biases on q, k and v alone."""

from .config_json import first_layers, sizes, windows
from .family import Family

QWEN2 = Family(
    name="qwen2",
    models="Qwen2, Qwen2.5, QwQ, DeepSeek-R1-Distill-Qwen",
    hf_class="Qwen2ForCausalLM",
    hf=(*sizes(), windows(first_layers())),
    fixed={"qkv_bias": True},
    gguf="qwen2",
    tiny={"tie_word_embeddings": True},
)
