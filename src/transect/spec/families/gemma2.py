"""Gemma 2: norms with an offset before and after, capped scores and logits, every other layer with a window."""

from typing import Any

from .config_json import ATTENTION_BIAS, every, sizes, windows
from .family import Family, Found, Part, key, refusal
from .gguf_keys import expect, granted, sliding
from .names import POST_NORMS

EMBED_SCALE = Part(lambda read, found: {"embed_scale": found["dim"] ** 0.5})
FIXED = {"norm_order": "both", "norm_offset": 1.0}


def gemma(attention_cap: float | None, logit_cap: float | None, **defaults: Any) -> tuple[Part, ...]:
    """Build the keys of config.json that Gemma 2 and 3 share, with their defaults."""
    both_ways = "Gemma with use_bidirectional_attention is not supported: it is not a causal model"
    return (
        refusal("use_bidirectional_attention", lambda value: not value, both_ways),
        *sizes(kv_heads=4, head_dim=256, tied=True, gelu=True, **defaults),
        ATTENTION_BIAS,
        EMBED_SCALE,
        Part(
            lambda read, found: {"query_scale": float(read.integer("query_pre_attn_scalar", 256, low=1)) ** -0.5},
            lambda config: {"query_pre_attn_scalar": round((config.query_scale or 1.0) ** -2)},
        ),
        key("attention_softcap", "attn_logit_softcapping", attention_cap, optional=True),
        key("logit_softcap", "final_logit_softcapping", logit_cap, optional=True),
    )


def gguf(largest: int) -> tuple[Part, ...]:
    """Build the keys of GGUF files that Gemma 2 and 3 share; the model of ``largest`` layers scales scores by its
    width."""

    def scale(found: Found) -> float:
        own = found["dim"] // found["n_heads"] if found["n_layers"] == largest else found["head_dim"]
        return float(own**-0.5)

    return (
        granted("activation", "gelu_tanh", "an activation other than gelu_pytorch_tanh"),
        granted("query_scale", scale, "scores scaled by other than {:.6g}"),
        EMBED_SCALE,
    )


def _cap(field: str, name: str, default: float) -> Part:
    def write(config: Any) -> Found:
        value = getattr(config, field)
        return {name: value} if value is not None else expect(config, False, f"no {field}")

    return Part(key(field, name, default).read, write)


GEMMA2 = Family(
    name="gemma2",
    models="Gemma 2",
    hf_class="Gemma2ForCausalLM",
    hf=(*gemma(50.0, 30.0, max_position=8192), windows(every(2), switch=False)),
    hf_written={"hidden_act": "gelu_pytorch_tanh"},
    fixed=FIXED,
    gguf="gemma2",
    gguf_parts=(
        *gguf(largest=46),
        sliding(2, 4096),
        _cap("attention_softcap", "attn_logit_softcapping", 50.0),
        _cap("logit_softcap", "final_logit_softcapping", 30.0),
    ),
    hf_names=POST_NORMS,
    tiny={
        "head_dim": 16, "sliding_window": 7, "query_pre_attn_scalar": 9, "attn_logit_softcapping": 2.0,
        "final_logit_softcapping": 8.0,
    },
)  # fmt: skip
