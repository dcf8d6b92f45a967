"""gpt-oss: attention sinks, experts with biases and a clamped activation, whose gate and up alternate."""

from dataclasses import replace

from ..fields import Fields
from .config_json import every, experts, sizes, windows
from .family import Family, Found, Part, key
from .gguf_keys import ALL_SPARSE, EXPERT_WIDTH, granted, sliding

_ROPE = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
_TINY_ROPE = _ROPE | {"factor": 4.0, "original_max_position_embeddings": 64, "rope_theta": 10000.0}


def _ramp(read: Fields, found: Found) -> Found:
    """Set the model's own ramp, which does not end at whole planes and is missing in files."""
    rope = found["rope"]
    return {"rope": replace(rope, truncate=False)} if rope.scaling == "yarn" else {}


GPT_OSS = Family(
    name="gpt_oss",
    models="gpt-oss 20b, 120b",
    hf_class="GptOssForCausalLM",
    hf=(
        *sizes(kv_heads=8, head_dim=64, max_position=131072, eps=1e-5, theta=150000.0, unset_rope=_ROPE),
        key("qkv_bias", "attention_bias", True, also="o_bias"),
        windows(every(2), switch=False, default=128),
        *experts("num_local_experts", 128, 4, "experts_per_token"),
        key("moe.expert_dim", "intermediate_size", 2880),
        key("moe.clamp", "swiglu_limit", 7.0),
    ),
    fixed={"attention_sinks": True, "moe.score": "softmax", "moe.renormalize": True}
    | {"moe.router_bias": True, "moe.bias": True},
    gguf="gpt-oss",
    gguf_parts=(
        Part(_ramp),
        sliding(2, 128),
        EXPERT_WIDTH,
        granted("moe.clamp", 7.0, "a clamp other than {:g}"),
        ALL_SPARSE,
    ),
    hf_names={"mlp.router": "mlp.router"},
    gguf_names={"mlp_norm": "post_attention_norm"},
    hf_stacked="turns",
    tiny={
        "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7,
        "rope_parameters": _TINY_ROPE,
    },
)  # fmt: skip
