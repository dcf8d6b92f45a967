"""Keys of ``config.json`` that several families have: sizes, rotary frequencies, sliding windows, experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..fields import Fields, shown
from ..model import ModelConfig, RopeConfig
from .family import Found, Part, key

Without = Callable[[Fields, Found], tuple[int, ...]]
"""Function that returns the layers without a window, for a file that does not list them."""
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_SCALINGS = {
    "linear": ("factor",),
    "llama3": ("factor", "original_max_position", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor", "original_max_position", "beta_fast", "beta_slow", "attention_factor", "truncate"),
}
"""Numbers of a scaling, by transformers' names."""


def sizes(
    *,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    max_position: int = 32768,
    eps: float = 1e-6,
    theta: float = 10000.0,
    tied: bool = False,
    ffn: str = "intermediate_size",
    gelu: bool = False,
    unset_rope: Found | None = None,
) -> tuple[Part, ...]:
    """Build the keys of a decoder of Llama's kind; arguments are the defaults of missing keys, as in transformers.

    Args:
        kv_heads: None for as many as there are query heads.
        head_dim: None for the width divided by the heads.
        ffn: the key of the MLP's width.
        gelu: the activation is GELU, under Gemma's key.
        unset_rope: rope parameters of a file without any; None for plain frequencies.
    """
    return (
        key("dim", "hidden_size"),
        key("n_layers", "num_hidden_layers"),
        key("n_heads", "num_attention_heads"),
        key("n_kv_heads", "num_key_value_heads", kv_heads or (lambda found: found["n_heads"])),
        key("head_dim", "head_dim", head_dim or split_width),
        key("ffn_dim", ffn),
        key("max_position", "max_position_embeddings", max_position),
        key("norm_eps", "rms_norm_eps", eps),
        activation("hidden_activation", "gelu_pytorch_tanh") if gelu else activation("hidden_act", "silu"),
        key("tied_embeddings", "tie_word_embeddings", tied),
        _rope(theta, unset_rope),
    )


def activation(name: str, default: str) -> Part:
    """Build the key of the MLP's activation, by transformers' names."""

    def read(read: Fields, found: Found) -> Found:
        value = read.text(name, default) or default
        if value not in _ACTIVATIONS:
            raise ValueError(f"{name} {shown(value)} is not supported; supported are: {', '.join(_ACTIVATIONS)}")
        return {"activation": _ACTIVATIONS[value]}

    def write(config: ModelConfig) -> Found:
        own = _ACTIVATIONS[default] == config.activation
        return {name: default if own else config.activation.replace("gelu_tanh", "gelu_pytorch_tanh")}

    return Part(read, write)


ATTENTION_BIAS = key("qkv_bias", "attention_bias", False, also="o_bias")
"""Switch for biases of q, k, v and o together."""
MLP_BIAS = key("mlp_bias", "mlp_bias", False)


def experts(
    name: str, default: int | None, per_token: int | None, other: str = "num_experts_per_tok"
) -> tuple[Part, Part]:
    """Build the keys of the numbers of experts and of experts per token, with defaults; ``other``: another name of the
    second."""
    others = ("num_experts", "n_routed_experts", "num_local_experts")
    return (
        key("moe.experts", name, default, others=others),
        key("moe.per_token", "num_experts_per_tok", per_token, others=(other,)),
    )


RENORMALIZE = key("moe.renormalize", "norm_topk_prob", False)


def split_width(found: Found) -> int:
    """Return the size of a head if no key sets it."""
    dim, heads = found["dim"], found["n_heads"]
    if heads <= 0 or dim % heads:
        raise ValueError(f"the width {dim} does not divide into {heads} heads; give head_dim in config.json")
    return int(dim // heads)


def windows(without: Without, switch: bool = True, default: int = 4096) -> Part:
    """Build the keys of a sliding window, and ``layer_types``: the layers that use it. ``switch``:
    ``use_sliding_window`` turns it on."""

    def read(read: Fields, found: Found) -> Found:
        off = switch and not read.flag("use_sliding_window", False)
        if off or ("sliding_window" in read.values and not read.values["sliding_window"]):
            return {}
        full = full_layers(read, found["n_layers"]) if read.has("layer_types") else without(read, found)
        return {"sliding_window": read.integer("sliding_window", default), "full_attention_layers": full}

    def write(config: ModelConfig) -> Found:
        window = config.sliding_window
        kinds = layer_types(config)
        return {"use_sliding_window": window is not None, "sliding_window": window, "layer_types": kinds}

    return Part(read, write)


def first_layers(default: int = 28) -> Without:
    """Read ``max_window_layers``: the number of first layers without a window (Qwen)."""
    return lambda read, found: tuple(range(min(read.integer("max_window_layers", default), found["n_layers"])))


def every(step: int) -> Without:
    """Select layers ``step - 1``, ``2 * step - 1`` and so on."""
    return lambda read, found: tuple(range(step - 1, found["n_layers"], step))


def full_layers(read: Fields, layers: int) -> tuple[int, ...]:
    """Return the layers without a window that ``layer_types`` lists."""
    kinds, known = read.values.get("layer_types"), ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise ValueError(
            f"layer_types in config.json must list full_attention or sliding_attention for each of the {layers} layers"
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention")


def layer_types(config: ModelConfig) -> list[str]:
    """List the kind of each layer, in the form that ``full_layers`` reads."""
    windows = (config.layer_window(layer) for layer in range(config.n_layers))
    return ["full_attention" if window is None else "sliding_attention" for window in windows]


def numbers_of_layers(read: Fields, key: str, default: list[int]) -> list[int]:
    """Read a list of layers by number. Raises ValueError for anything else."""
    listed = read.values.get(key)
    listed = default if listed is None else listed
    if not isinstance(listed, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in listed):
        raise ValueError(f"{key!r} in config.json must be a list of layer numbers, not {listed!r}")
    return listed


def _still(read: Fields, found: Found) -> Found:
    layers, listed = found["n_layers"], read.values.get("no_rope_layers")
    if not listed:
        step = read.integer("no_rope_layer_interval", 4, low=1)
        listed = [int((layer + 1) % step != 0) for layer in range(layers)]
    if not isinstance(listed, list) or len(listed) != layers or any(flag not in (0, 1) for flag in listed):
        raise ValueError(f"'no_rope_layers' in config.json must list 0 or 1 for each of the {layers} layers")
    return {"no_rope_layers": tuple(layer for layer, rotates in enumerate(listed) if not rotates)}


NO_ROPE_LAYERS = Part(
    _still,
    lambda config: {"no_rope_layers": [int(layer not in config.no_rope_layers) for layer in range(config.n_layers)]},
)
"""Layers that do not rotate; the key has 1 for those that do."""


def _rope(theta: float, unset: Found | None) -> Part:
    """Build the keys of the rotary frequencies. They are read in the old spelling (``rope_theta`` beside
    ``rope_scaling``) and in that of transformers 5 (``rope_parameters``), and are written in the old one, which both
    generations read."""

    def read(read: Fields, found: Found) -> Found:
        longest = found["max_position"]
        rope = _frequencies(read, longest, theta, unset)
        if rope.scaling == "yarn":  # files of stretched models often keep the length before stretching
            longest = max(longest, int(rope.original_max_position * rope.factor))
        return {"rope": rope, "max_position": longest}

    def write(config: ModelConfig) -> Found:
        values = {"rope_theta": config.rope.theta, "rope_scaling": _scaling(config.rope)}
        if unset is not None and config.rope.scaling == "none":
            values["rope_parameters"] = {"rope_type": "default", "rope_theta": config.rope.theta}
        return values

    return Part(read, write)


def _frequencies(read: Fields, max_position: int, default_theta: float, unset: Found | None) -> RopeConfig:
    new = read.values.get("rope_parameters")
    old = read.values.get("rope_scaling")
    for name, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"{name!r} in config.json must be an object or null, not {shown(value)}")
    if isinstance(new, dict) and isinstance(new.get("full_attention"), dict):
        new = new["full_attention"]  # of Gemma 3, by kind of layer
    values = {**(new or {}), **(old or {})}
    if new is None and old is None and unset is not None:
        values = dict(unset)
    rope = Fields(values, "the rope parameters of config.json")
    theta = rope.number("rope_theta", read.number("rope_theta", default_theta))
    partial = rope.number("partial_rotary_factor", read.number("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ValueError(f"partial_rotary_factor {partial} is not supported; only 1 is")
    kind = rope.text("rope_type", rope.text("type", "default"))
    if kind == "default":
        return RopeConfig(theta=theta)
    original = rope.integer("original_max_position_embeddings", max_position)
    if kind == "linear":
        return RopeConfig(theta=theta, scaling="linear", factor=rope.number("factor"))
    if kind == "llama3":
        return RopeConfig(
            theta=theta,
            scaling="llama3",
            factor=rope.number("factor"),
            original_max_position=original,
            low_freq_factor=rope.number("low_freq_factor"),
            high_freq_factor=rope.number("high_freq_factor"),
        )
    if kind == "yarn":
        factor = rope.number("factor", max_position / original if original > 0 else None)
        attention_factor = _yarn_attention_factor(rope, factor)
        return RopeConfig(
            theta=theta,
            scaling="yarn",
            factor=factor,
            original_max_position=original,
            beta_fast=rope.number("beta_fast", 0.0) or 32.0,
            beta_slow=rope.number("beta_slow", 0.0) or 1.0,
            attention_factor=attention_factor,
            truncate=rope.flag("truncate", True),
        )
    if kind == "longrope":
        raise ValueError(
            "rope scaling 'longrope' is not supported (Phi-3 of 128k, Phi-4-mini): it changes frequencies within "
            "a sequence; take the 4k or 16k model"
        )
    raise ValueError(f"rope scaling {shown(kind)} is not supported; supported are: default, linear, llama3, yarn")


def _yarn_attention_factor(rope: Fields, factor: float) -> float:
    """Return the multiplier of cos and sin: given, or 0.1 ln(factor) + 1, with two optional weights of the
    logarithm."""
    if rope.values.get("attention_factor") is not None:
        return rope.number("attention_factor")

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        return magnitude(rope.number("mscale")) / magnitude(rope.number("mscale_all_dim"))
    return magnitude(1.0)


def _scaling(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.scaling == "none":
        return None
    if rope.scaling not in _SCALINGS:
        raise ValueError(
            "a model with GGUF frequency factors cannot be written as config.json; save it from its HF files"
        )
    values = {name: getattr(rope, name) for name in _SCALINGS[rope.scaling]}
    if "original_max_position" in values:
        values["original_max_position_embeddings"] = values.pop("original_max_position")
    return {"rope_type": rope.scaling, **values}
