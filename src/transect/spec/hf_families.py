"""Read what is special to single families in a Hugging Face ``config.json``: Gemma 2 and 3, OLMo 2, Granite, SmolLM3,
gpt-oss and Llama 4.

Each function gives fields of ``ModelConfig`` beside those that all families share.
"""

from __future__ import annotations

from typing import Any

from .fields import Fields, shown
from .model import ModelConfig, RopeConfig


def family_from_hf(architecture: str, read: Fields, layers: int) -> dict[str, Any]:
    """Fields of ``ModelConfig`` that only this family has; {} for most.

    Raises:
        ValueError: a setting that is not supported.
    """
    reader = {
        "gemma2": _gemma,
        "gemma3_text": _gemma,
        "olmo2": _olmo2,
        "granite": _granite,
        "smollm3": _smollm3,
        "gpt_oss": _gpt_oss,
        "llama4_text": _llama4,
    }.get(architecture)
    return {} if reader is None else reader(read, layers)


def _gemma(read: Fields, layers: int) -> dict[str, Any]:
    if read.values.get("use_bidirectional_attention"):
        raise ValueError("Gemma with use_bidirectional_attention is not supported: it is not a causal model")
    third = read.values.get("model_type") == "gemma3_text"

    def softcap(key: str, default: float | None) -> float | None:
        return read.number(key) if read.values.get(key, default) is not None and key in read.values else default

    found: dict[str, Any] = {
        "norm_order": "both",
        "norm_offset": 1.0,
        "embed_scale": read.integer("hidden_size") ** 0.5,
        "query_scale": float(read.integer("query_pre_attn_scalar", 256, low=1)) ** -0.5,
        "attention_softcap": softcap("attn_logit_softcapping", None if third else 50.0),
        "logit_softcap": softcap("final_logit_softcapping", None if third else 30.0),
    }
    for key, own in (("attn_logit_softcapping", "attention_softcap"), ("final_logit_softcapping", "logit_softcap")):
        if key in read.values and read.values[key] is None:
            found[own] = None
    if third:
        rope = read.values.get("rope_parameters") or {}
        local = rope.get("sliding_attention") if isinstance(rope, dict) else None
        sliding = Fields(local if isinstance(local, dict) else {}, "the rope parameters of config.json")
        if (kind := sliding.text("rope_type", sliding.text("type", "default"))) != "default":
            raise ValueError(f"rope scaling {shown(kind)} of layers that slide is not supported; only default is")
        theta = sliding.number("rope_theta", read.number("rope_local_base_freq", 10000.0))
        found["local_rope"] = RopeConfig(theta=theta)
    return found


def _olmo2(read: Fields, layers: int) -> dict[str, Any]:
    return {"norm_order": "post"}


def _granite(read: Fields, layers: int) -> dict[str, Any]:
    return {
        "embed_scale": read.number("embedding_multiplier", 1.0),
        "residual_scale": read.number("residual_multiplier", 1.0),
        "query_scale": read.number("attention_multiplier", 1.0),
        "logit_scale": 1.0 / _not_zero(read, "logits_scaling"),
    }


def _not_zero(read: Fields, key: str) -> float:
    value = read.number(key, 1.0)
    if value <= 0:
        raise ValueError(f"{key!r} in config.json must be greater than 0, not {value}")
    return value


def _smollm3(read: Fields, layers: int) -> dict[str, Any]:
    listed = read.values.get("no_rope_layers")  # 1: the layer rotates
    if not listed:
        step = read.integer("no_rope_layer_interval", 4, low=1)
        listed = [int((layer + 1) % step != 0) for layer in range(layers)]
    if not isinstance(listed, list) or len(listed) != layers or any(flag not in (0, 1) for flag in listed):
        raise ValueError(f"'no_rope_layers' in config.json must list 0 or 1 for each of the {layers} layers")
    return {"no_rope_layers": tuple(layer for layer, rotates in enumerate(listed) if not rotates)}


def _gpt_oss(read: Fields, layers: int) -> dict[str, Any]:
    return {"attention_sinks": True}


def _llama4(read: Fields, layers: int) -> dict[str, Any]:
    found = _smollm3(read, layers)
    still = found["no_rope_layers"]
    kinds = ["full_attention" if layer in still else "chunked_attention" for layer in range(layers)]
    if read.values.get("layer_types") not in (None, kinds):
        raise ValueError(
            "layer_types in config.json must be chunked_attention for the layers that rotate and full_attention for "
            "the others (no_rope_layers); nothing else is supported for Llama 4"
        )
    has_chunks = read.values.get("attention_chunk_size", 8192) is not None
    # The first files say 4 for it, which is as good as true.
    tuned = read.values.get("attn_temperature_tuning") == 4 or read.flag("attn_temperature_tuning", True)
    return found | {
        "qk_l2_norm": read.flag("use_qk_norm", True),
        "attention_chunk": read.integer("attention_chunk_size", 8192) if has_chunks else None,
        "attention_temperature": (
            (read.number("attn_scale", 0.1), read.integer("floor_scale", 8192)) if tuned else None
        ),
    }


def layer_types(architecture: str, layers: int, read: Fields) -> list[str]:
    """Which layers slide where ``config.json`` does not list it: every other one, of Gemma 3 five of six, of SmolLM3
    those that do not rotate."""
    if architecture == "smollm3":
        still = _smollm3(read, layers)["no_rope_layers"]
        return ["sliding_attention" if layer in still else "full_attention" for layer in range(layers)]
    step = read.integer("sliding_window_pattern", 6, low=1) if architecture == "gemma3_text" else 2
    return ["sliding_attention" if (layer + 1) % step else "full_attention" for layer in range(layers)]


def family_to_hf(config: ModelConfig) -> dict[str, Any]:
    """The keys that ``family_from_hf`` reads, and others that only this family has."""
    architecture = config.architecture
    if architecture in ("gemma2", "gemma3_text"):
        values: dict[str, Any] = {
            "hidden_activation": "gelu_pytorch_tanh",
            "query_pre_attn_scalar": round((config.query_scale or 1.0) ** -2),
            "attn_logit_softcapping": config.attention_softcap,
            "final_logit_softcapping": config.logit_softcap,
        }
        if config.local_rope is not None:
            values["rope_local_base_freq"] = config.local_rope.theta
        return values
    if architecture == "granite":
        return {
            "embedding_multiplier": config.embed_scale,
            "residual_multiplier": config.residual_scale,
            "attention_multiplier": config.query_scale,
            "logits_scaling": 1.0 / config.logit_scale,
        }
    if (
        architecture == "gpt_oss" and config.rope.scaling == "none"
    ):  # without it transformers takes a scaling of its own
        return {"rope_parameters": {"rope_type": "default", "rope_theta": config.rope.theta}}
    if architecture == "phi3":
        return {"pad_token_id": None}
    if architecture == "llama4_text":
        scale, floor = config.attention_temperature or (0.1, 8192)
        return {
            "intermediate_size_mlp": config.ffn_dim,
            "no_rope_layers": [int(layer not in config.no_rope_layers) for layer in range(config.n_layers)],
            "use_qk_norm": config.qk_l2_norm,
            "attention_chunk_size": config.attention_chunk,
            "attn_temperature_tuning": config.attention_temperature is not None,
            "attn_scale": scale,
            "floor_scale": floor,
        }
    if architecture == "smollm3":
        return {
            "pad_token_id": None,
            "no_rope_layers": [int(layer not in config.no_rope_layers) for layer in range(config.n_layers)],
        }
    return {}
