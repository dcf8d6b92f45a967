"""Gemma 3, its language model: five of six layers have a sliding window, and rotate by frequencies of their own."""

from ..fields import Fields, shown
from ..model import ModelConfig, RopeConfig
from .config_json import every, windows
from .family import Family, Found, Part
from .gemma2 import FIXED, gemma, gguf
from .gguf_keys import only, sliding
from .names import POST_NORMS


def _without(read: Fields, found: Found) -> tuple[int, ...]:
    return every(read.integer("sliding_window_pattern", 6, low=1))(read, found)


def _local(read: Fields, found: Found) -> Found:
    rope = read.values.get("rope_parameters") or {}
    local = rope.get("sliding_attention") if isinstance(rope, dict) else None
    sliding = Fields(local if isinstance(local, dict) else {}, "the rope parameters of config.json")
    if (kind := sliding.text("rope_type", sliding.text("type", "default"))) != "default":
        raise ValueError(f"rope scaling {shown(kind)} of layers that slide is not supported; only default is")
    theta = sliding.number("rope_theta", read.number("rope_local_base_freq", 10000.0))
    return {"local_rope": RopeConfig(theta=theta)}


def _local_theta(config: ModelConfig) -> float:
    return (config.local_rope or config.rope).theta


GEMMA3 = Family(
    name="gemma3_text",
    models="Gemma 3 (text)",
    hf_class="Gemma3ForCausalLM",
    hf=(
        *gemma(None, None, max_position=131072, theta=1e6),
        Part(_local, lambda config: {"rope_local_base_freq": _local_theta(config)} if config.local_rope else {}),
        windows(_without, switch=False),
    ),
    hf_written={"hidden_act": "gelu_pytorch_tanh"},
    text_defaults={"vocab_size": 262208, "num_attention_heads": 8},
    fixed=FIXED | {"qk_norm": True},
    gguf="gemma3",
    gguf_parts=(
        *gguf(largest=62),
        sliding(6, 0),
        Part(
            lambda read, found: {"local_rope": RopeConfig(theta=read.number("rope.freq_base_swa", 10000.0))},
            lambda config: {"rope.freq_base_swa": _local_theta(config)},
        ),
        Part(
            lambda read, found: {"logit_softcap": read.number("final_logit_softcapping", 0.0) or None},
            lambda config: {"final_logit_softcapping": config.logit_softcap} if config.logit_softcap else {},
        ),
        only("attention_softcap", None, "capped scores"),
    ),
    hf_names=POST_NORMS,
    tiny={
        "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 16,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    },
)  # fmt: skip
