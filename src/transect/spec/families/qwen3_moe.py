"""Qwen3's mixtures of experts."""

from dataclasses import replace

from ..moe import MoEConfig
from .config_json import ATTENTION_BIAS, RENORMALIZE, experts, sizes, windows
from .family import Family, key
from .gguf_keys import ALL_SPARSE, EXPERT_WIDTH, SUM_TO_1
from .qwen2_moe import DENSE_LAYERS
from .qwen3 import QWEN3

_30B_A3B = replace(
    QWEN3.presets["qwen3-8b"][1],
    architecture="qwen3_moe",
    dim=2048,
    n_layers=48,
    n_kv_heads=4,
    ffn_dim=6144,
    moe=MoEConfig(experts=128, per_token=8, expert_dim=768),
)

QWEN3_MOE = Family(
    name="qwen3_moe",
    models="Qwen3 30B-A3B, 235B-A22B, Coder",
    hf_class="Qwen3MoeForCausalLM",
    hf=(
        *sizes(kv_heads=4),
        ATTENTION_BIAS,
        windows(lambda read, found: ()),
        *experts("num_experts", 128, 8),
        key("moe.expert_dim", "moe_intermediate_size", 768),
        RENORMALIZE,
        DENSE_LAYERS,
    ),
    fixed={"qk_norm": True},
    gguf="qwen3moe",
    gguf_parts=(EXPERT_WIDTH, SUM_TO_1, ALL_SPARSE),
    presets={"qwen3-30b-a3b": ("Qwen/Qwen3-30B-A3B", _30B_A3B)},
    tiny={
        "head_dim": 16, "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True,
    },
)  # fmt: skip
