"""Qwen1.5-MoE and Qwen2-57B-A14B: shared experts with a gate of their own."""

from ..fields import Fields
from .config_json import RENORMALIZE, experts, numbers_of_layers, sizes, windows
from .family import Family, Found, Part, key, value_of
from .gguf_keys import ALL_SPARSE, EXPERT_WIDTH, SUM_TO_LESS, written


def _dense(read: Fields, found: Found) -> Found:
    step, listed = read.integer("decoder_sparse_step", 1, low=1), numbers_of_layers(read, "mlp_only_layers", [])
    layers = range(found["n_layers"])
    return {"moe.dense_layers": tuple(layer for layer in layers if layer in listed or (layer + 1) % step)}


DENSE_LAYERS = Part(
    _dense, lambda config: {"decoder_sparse_step": 1, "mlp_only_layers": list(value_of(config, "moe.dense_layers"))}
)
"""Layers without experts, which files give as a list and a step."""


def _without(read: Fields, found: Found) -> tuple[int, ...]:
    first = read.integer("max_window_layers", 28)  # of which every other one slides
    return tuple(layer for layer in range(found["n_layers"]) if layer % 2 or layer >= first)


QWEN2_MOE = Family(
    name="qwen2_moe",
    models="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
    hf_class="Qwen2MoeForCausalLM",
    hf=(
        *sizes(kv_heads=16),
        key("qkv_bias", "qkv_bias", True),
        windows(_without),
        *experts("num_experts", 60, 4),
        key("moe.expert_dim", "moe_intermediate_size", 1408),
        key("moe.shared_dim", "shared_expert_intermediate_size", 5632),
        RENORMALIZE,
        DENSE_LAYERS,
    ),
    fixed={"moe.shared_gate": True},
    gguf="qwen2moe",
    gguf_parts=(EXPERT_WIDTH, written("expert_shared_feed_forward_length", "moe.shared_dim"), SUM_TO_LESS, ALL_SPARSE),
    hf_names={f"mlp.shared_{name}": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
    tiny={
        "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "mlp_only_layers": [1],
        "shared_expert_intermediate_size": 40,
    },
)  # fmt: skip
