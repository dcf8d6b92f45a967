"""Mixtral 8x7B and 8x22B. GGUF files call it ``llama``."""

from .config_json import experts, sizes
from .family import Family, key
from .gguf_keys import ALL_SPARSE, SUM_TO_1, window

MIXTRAL = Family(
    name="mixtral",
    models="Mixtral 8x7B, 8x22B",
    hf_class="MixtralForCausalLM",
    hf=(
        *sizes(kv_heads=8, max_position=131072, eps=1e-5, theta=1e6),
        key("sliding_window", "sliding_window", optional=True),
        *experts("num_local_experts", 8, 2),
        key("moe.expert_dim", "intermediate_size"),
    ),
    fixed={"moe.renormalize": True},
    gguf="llama",
    gguf_if=lambda read: read.integer("expert_count", 0) > 0,
    gguf_parts=(window(), SUM_TO_1, ALL_SPARSE),
    gguf_paired=True,
    hf_names={
        "mlp.router": "block_sparse_moe.gate",
        "mlp.experts_gate": "block_sparse_moe.experts.{}.w1",
        "mlp.experts_up": "block_sparse_moe.experts.{}.w3",
        "mlp.experts_down": "block_sparse_moe.experts.{}.w2",
    },
    tiny={"num_local_experts": 4},
)
