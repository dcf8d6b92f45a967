"""OLMoE: a norm over all heads of q, and all of k, together."""

from .config_json import ATTENTION_BIAS, RENORMALIZE, experts, sizes
from .family import Family, key, refusal
from .gguf_keys import ALL_SPARSE, SUM_TO_LESS

OLMOE = Family(
    name="olmoe",
    models="OLMoE-1B-7B",
    hf_class="OlmoeForCausalLM",
    hf=(
        *sizes(max_position=4096, eps=1e-5),
        ATTENTION_BIAS,
        refusal(
            "clip_qkv",
            lambda value: value is None,
            "OLMoE with clip_qkv is not supported; the released models have none",
        ),
        *experts("num_experts", 64, 8),
        key("moe.expert_dim", "intermediate_size"),
        RENORMALIZE,
    ),
    fixed={"qk_norm": True, "qk_norm_whole": True},
    gguf="olmoe",
    gguf_parts=(SUM_TO_LESS, ALL_SPARSE),
    tiny={"num_experts": 6, "num_experts_per_tok": 2},
)
