"""dots.llm1: experts in groups, chosen by sigmoid scores with a correction."""

from ..fields import Fields
from ..model import ModelConfig
from .config_json import ATTENTION_BIAS, RENORMALIZE, experts, first_layers, sizes, windows
from .family import Family, Found, Part, key
from .gguf_keys import EXPERT_WIDTH, written


def _read(read: Fields, found: Found) -> Found:
    dense = min(found["n_layers"], read.integer("first_k_dense_replace", 0))
    shared = found["moe.expert_dim"] * read.integer("n_shared_experts")
    return {"moe.shared_dim": shared, "moe.dense_layers": tuple(range(dense))}


def _write(config: ModelConfig) -> Found:
    moe = config.moe
    assert moe is not None
    return {"n_shared_experts": moe.shared_dim // moe.expert_dim, "first_k_dense_replace": len(moe.dense_layers)}


def _gguf(config: ModelConfig) -> Found:
    moe = config.moe
    assert moe is not None
    shared, dense = _write(config).values()
    counts = {"expert_shared_count": shared, "leading_dense_block_count": dense, "expert_gating_func": 2}
    groups = {"expert_group_count": moe.groups, "expert_group_used_count": moe.groups_kept}
    return counts | groups if moe.groups > 1 else counts


DOTS1 = Family(
    name="dots1",
    models="dots.llm1",
    hf_class="Dots1ForCausalLM",
    hf=(
        *sizes(max_position=2048),
        ATTENTION_BIAS,
        windows(first_layers(62), switch=False),
        *experts("n_routed_experts", None, None),
        key("moe.expert_dim", "moe_intermediate_size", 1408),
        RENORMALIZE,
        key("moe.scale", "routed_scaling_factor", 1.0),
        key("moe.groups", "n_group", 1),
        key("moe.groups_kept", "topk_group", 1),
        Part(_read, _write),
    ),
    fixed={"qk_norm": True, "moe.score": "sigmoid", "moe.score_bias": True},
    gguf="dots1",
    gguf_parts=(
        EXPERT_WIDTH,
        written("expert_weights_scale", "moe.scale"),
        written("expert_weights_norm", "moe.renormalize"),
        Part(write=_gguf),
    ),
    tiny={
        "moe_intermediate_size": 24, "n_routed_experts": 8, "num_experts_per_tok": 3,
        "n_shared_experts": 2, "n_group": 4, "topk_group": 2, "first_k_dense_replace": 1, "norm_topk_prob": True,
        "routed_scaling_factor": 2.5, "sliding_window": None,
    },
)  # fmt: skip
