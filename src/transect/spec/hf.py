"""``ModelConfig`` from and to a Hugging Face ``config.json``.

Missing keys take the defaults that transformers gives them for the architecture, since real files leave them out.
Rope parameters are read in the old spelling (``rope_theta`` beside ``rope_scaling``) and in that of transformers 5
(``rope_parameters``), and are written in the old one, which both generations read.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from types import NoneType
from typing import Any

from .fields import Fields, read_json_object, shown
from .hf_families import family_from_hf, family_to_hf, layer_types
from .hf_moe import moe_from_hf, moe_to_hf
from .model import ARCHITECTURES, ModelConfig, RopeConfig, unsupported_architecture
from .numbers.registry import check_method

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
}
_CLASSES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "mixtral": "MixtralForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "olmoe": "OlmoeForCausalLM",
    "dots1": "Dots1ForCausalLM",
    "gpt_oss": "GptOssForCausalLM",
    "gemma2": "Gemma2ForCausalLM",
    "gemma3_text": "Gemma3ForCausalLM",
    "phi3": "Phi3ForCausalLM",
    "olmo2": "Olmo2ForCausalLM",
    "granite": "GraniteForCausalLM",
    "smollm3": "SmolLM3ForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
}
_KV_HEADS = {"mistral": 8, "mixtral": 8, "qwen2_moe": 16, "qwen3_moe": 4, "gemma2": 4, "gemma3_text": 4, "smollm3": 4}
_KV_HEADS |= {"gpt_oss": 8, "llama4_text": 8}
_HEAD_DIM = {"qwen3": 128, "gemma2": 256, "gemma3_text": 256, "gpt_oss": 64, "llama4_text": 128}
_MAX_POSITION = {"mistral": 131072, "mixtral": 131072, "olmoe": 4096, "gemma2": 8192, "gemma3_text": 131072}
_MAX_POSITION |= dict.fromkeys(("llama", "dots1", "olmo2", "granite"), 2048) | {"phi3": 4096, "gpt_oss": 131072}
_MAX_POSITION["llama4_text"] = 131072
_THETA = {"mixtral": 1e6, "gemma3_text": 1e6, "smollm3": 2e6, "gpt_oss": 150000.0, "llama4_text": 500000.0}
_EPS = dict.fromkeys(("mixtral", "olmoe", "phi3", "olmo2", "gpt_oss", "llama4_text"), 1e-5)
_TIED = ("gemma2", "gemma3_text", "smollm3")
_GEMMA = ("gemma2", "gemma3_text")
_WHOLE_MODEL = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "quantization_config")
"""Keys that a model of several parts has beside them."""
_DEFAULTS = {"gemma3_text": {"vocab_size": 262208, "num_attention_heads": 8}}
"""Values that the files of such models omit."""
_BIAS_SWITCH = (
    "llama", "llama4_text", "qwen3", "qwen3_moe", "olmoe", "dots1", "gpt_oss", "olmo2", "granite", "smollm3", *_GEMMA,
)  # fmt: skip
"""Families whose ``attention_bias`` puts a bias on q, k, v and o."""
_QK_NORM = ("qwen3", "qwen3_moe", "olmoe", "dots1", "gemma3_text", "olmo2")
_WHOLE_NORM = ("olmoe", "olmo2")
_LISTS_WINDOWS = ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "dots1", "smollm3", "gpt_oss", *_GEMMA)
"""Families whose ``layer_types`` say which layers slide."""
_ALWAYS_SLIDES = ("dots1", "gpt_oss", *_GEMMA)
_ALIASES = {"ministral": "mistral"}
"""transformers' name for a Mistral with sliding layers listed in ``layer_types``."""


def from_hf(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read a Hugging Face ``config.json`` (old and new spelling of rope parameters).

    ``generation`` is ``generation_config.json`` if there is one: end-of-sequence tokens that only it lists count too.

    Raises:
        ValueError: an unsupported architecture or setting, or a key that is missing or of the wrong type.
    """
    config = text_part(config)
    architecture = _ALIASES.get(str(config.get("model_type")), config.get("model_type"))
    if not isinstance(architecture, str) or architecture not in ARCHITECTURES:
        raise unsupported_architecture(
            architecture if isinstance(architecture, (str, NoneType)) else shown(architecture)
        )
    if config.get("quantization_config") is not None:
        check_method(config["quantization_config"])
    read = Fields(config)
    parts = _gpt2(read) if architecture == "gpt2" else _llama_like(architecture, read)
    bos, eos = read.token_ids("bos_token_id"), read.token_ids("eos_token_id")
    more = Fields(generation or {}, "generation_config.json").token_ids("eos_token_id")
    return ModelConfig(
        architecture=architecture,
        vocab_size=read.integer("vocab_size"),
        bos_token_id=bos[0] if bos else None,
        eos_token_ids=tuple(dict.fromkeys(eos + more)),
        **parts,
    )


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The configuration of the language model in one that has other parts too (Gemma 3 of 4B and more, Llama 4)."""
    own = config.get("text_config")
    if config.get("model_type") in (*ARCHITECTURES, *_ALIASES) or not isinstance(own, Mapping):
        return config
    if own.get("model_type") not in ARCHITECTURES:
        return config
    outer = {key: config[key] for key in _WHOLE_MODEL if key in config and own.get(key) is None}
    return _DEFAULTS.get(own["model_type"], {}) | dict(own) | outer


def from_hf_directory(directory: str | Path) -> ModelConfig:
    """Read ``config.json`` and, if it is there, ``generation_config.json`` of a model directory; errors as ``from_hf``,
    and for files that are missing or damaged."""
    directory = Path(directory)
    try:
        config = read_json_object(directory / "config.json")
    except FileNotFoundError:
        raise ValueError(f"{directory} has no config.json: give a directory in Hugging Face layout") from None
    path = directory / "generation_config.json"
    return from_hf(config, read_json_object(path) if path.exists() else None)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """The ``config.json`` that transformers, vLLM and ``from_hf`` read back as this model.

    Raises:
        ValueError: its architecture cannot express it (say, a Llama with biases on q, k and v alone).
    """
    values = _write(config)
    read = from_hf(values)
    if read != config:
        lost = [f.name for f in fields(config) if getattr(read, f.name) != getattr(config, f.name)]
        raise ValueError(
            f"config.json of architecture {config.architecture!r} cannot express this model's {', '.join(lost)}; "
            "save it as another architecture or keep its original files"
        )
    return values


def _write(config: ModelConfig) -> dict[str, Any]:
    eos: int | list[int] | None = list(config.eos_token_ids) or None
    if len(config.eos_token_ids) == 1:
        eos = config.eos_token_ids[0]
    common: dict[str, Any] = {
        "model_type": config.architecture,
        "architectures": [_CLASSES[config.architecture]],
        "vocab_size": config.vocab_size,
        "tie_word_embeddings": config.tied_embeddings,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos,
    }
    if config.architecture == "gpt2":
        return common | {
            "n_embd": config.dim,
            "n_layer": config.n_layers,
            "n_head": config.n_heads,
            "n_inner": config.ffn_dim,
            "n_positions": config.max_position,
            "layer_norm_epsilon": config.norm_eps,
            "activation_function": {"gelu": "gelu", "gelu_tanh": "gelu_new"}[config.activation],
        }
    values = common | {
        "hidden_size": config.dim,
        "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads,
        "num_key_value_heads": config.n_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.ffn_dim,
        "max_position_embeddings": config.max_position,
        "rms_norm_eps": config.norm_eps,
        "hidden_act": {"silu": "silu", "gelu_tanh": "gelu_pytorch_tanh"}.get(config.activation, "gelu"),
        "rope_theta": config.rope.theta,
        "rope_scaling": _rope_scaling_to_hf(config.rope),
    }
    if config.architecture in _BIAS_SWITCH:
        values["attention_bias"] = config.qkv_bias
    if config.architecture in ("llama", "granite"):
        values["mlp_bias"] = config.mlp_bias
    if config.architecture == "qwen2_moe":
        values["qkv_bias"] = config.qkv_bias
    if config.architecture in ("mistral", "mixtral", "phi3"):
        values["sliding_window"] = config.sliding_window
    values |= family_to_hf(config)
    if config.architecture in _LISTS_WINDOWS:
        values["use_sliding_window"] = config.sliding_window is not None
        values["sliding_window"] = config.sliding_window
    if config.architecture in _LISTS_WINDOWS or (config.architecture == "mistral" and config.full_attention_layers):
        values["layer_types"] = [
            "full_attention" if config.layer_window(layer) is None else "sliding_attention"
            for layer in range(config.n_layers)
        ]
    return values if config.moe is None else values | moe_to_hf(config.architecture, config.moe, config.n_layers)


def _gpt2(read: Fields) -> dict[str, Any]:
    if not read.flag("scale_attn_weights", True) or read.flag("scale_attn_by_inverse_layer_idx", False):
        raise ValueError("GPT-2 with scale_attn_weights=false or scale_attn_by_inverse_layer_idx=true is not supported")
    if read.flag("add_cross_attention", False):
        raise ValueError("GPT-2 with add_cross_attention=true is not supported: it is not a decoder-only model")
    dim, heads = read.integer("n_embd", 768), read.integer("n_head", 12)
    return {
        "dim": dim,
        "n_layers": read.integer("n_layer", 12),
        "n_heads": heads,
        "n_kv_heads": heads,
        "head_dim": _split(dim, heads),
        "ffn_dim": read.integer("n_inner", 4 * dim),
        "max_position": read.integer("n_positions", 1024),
        "norm": "layernorm",
        "norm_eps": read.number("layer_norm_epsilon", 1e-5),
        "activation": _activation(read, "activation_function", "gelu_new"),
        "gated_mlp": False,
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
        "tied_embeddings": read.flag("tie_word_embeddings", True),
        "position": "learned",
    }


def _llama_like(architecture: str, read: Fields) -> dict[str, Any]:
    dim, heads = read.integer("hidden_size"), read.integer("num_attention_heads")
    layers = read.integer("num_hidden_layers")
    default_heads = _KV_HEADS.get(architecture, heads)
    default_head_dim = _HEAD_DIM.get(architecture)
    head_dim = read.integer("head_dim", default_head_dim or _split(dim, heads))
    # Qwen2 has biases on q, k and v alone, always; others on all four projections or on none.
    all_bias = architecture in _BIAS_SWITCH and read.flag("attention_bias", architecture == "gpt_oss")
    qkv_bias = architecture == "qwen2" or (architecture == "qwen2_moe" and read.flag("qkv_bias", True))
    max_position = read.integer("max_position_embeddings", _MAX_POSITION.get(architecture, 32768))
    rope = _rope_from_hf(read, max_position, _THETA.get(architecture, 10000.0))
    if rope.scaling == "yarn":
        # Files of stretched models often keep the length before stretching here.
        max_position = max(max_position, int(rope.original_max_position * rope.factor))
    window, full_layers = _window(architecture, read, layers)
    gelu = "gelu_pytorch_tanh"
    act, default_act = ("hidden_activation", gelu) if architecture in _GEMMA else ("hidden_act", "silu")
    return family_from_hf(architecture, read, layers) | {
        "dim": dim,
        "n_layers": layers,
        "n_heads": heads,
        "n_kv_heads": read.integer("num_key_value_heads", default_heads),
        "head_dim": head_dim,
        "ffn_dim": read.integer("intermediate_size_mlp" if architecture == "llama4_text" else "intermediate_size"),
        "max_position": max_position,
        "norm_eps": read.number("rms_norm_eps", _EPS.get(architecture, 1e-6)),
        "activation": _activation(read, act, default_act),
        "qkv_bias": qkv_bias or all_bias,
        "o_bias": all_bias,
        "mlp_bias": architecture in ("llama", "granite") and read.flag("mlp_bias", False),
        "qk_norm": architecture in _QK_NORM,
        "qk_norm_whole": architecture in _WHOLE_NORM,
        "moe": moe_from_hf(architecture, read, layers),
        "tied_embeddings": read.flag("tie_word_embeddings", architecture in _TIED),
        "rope": rope,
        "sliding_window": window,
        "full_attention_layers": full_layers,
    }


def _split(dim: int, heads: int) -> int:
    if heads <= 0 or dim % heads:
        raise ValueError(f"config.json: the width {dim} does not divide into {heads} heads; give head_dim")
    return dim // heads


def _activation(read: Fields, key: str, default: str) -> str:
    name = read.text(key, default) or default
    if name not in _ACTIVATIONS:
        raise ValueError(f"{key} {shown(name)} is not supported; supported are: {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _window(architecture: str, read: Fields, layers: int) -> tuple[int | None, tuple[int, ...]]:
    """The sliding window and the layers that do without it."""
    if architecture in ("llama", "olmoe", "olmo2", "granite", "llama4_text"):
        return None, ()
    kinds = read.values.get("layer_types")
    if architecture in ("mistral", "mixtral", "phi3"):
        # A Mistral's file without the key means 4096, one with null means none.
        default = 4096 if architecture == "mistral" else None
        if read.values.get("sliding_window", default) is None:
            return None, ()
        listed = architecture == "mistral" and kinds is not None  # Ministral's
        return read.integer("sliding_window", default), _full_layers(kinds, layers) if listed else ()
    if architecture in _ALWAYS_SLIDES and read.values.get("sliding_window", 4096) is None:
        return None, ()
    if architecture == "qwen3_moe" and read.flag("use_sliding_window", False) and not kinds:
        return read.integer("sliding_window", 4096), ()  # in all layers
    if (architecture not in _ALWAYS_SLIDES and not read.flag("use_sliding_window", False)) or (
        "sliding_window" in read.values and not read.values["sliding_window"]
    ):
        return None, ()
    window = read.integer("sliding_window", 128 if architecture == "gpt_oss" else 4096)
    if kinds is None and architecture in ("gpt_oss", "smollm3", *_GEMMA):
        kinds = layer_types(architecture, layers, read)
    if kinds is None:
        first = read.integer("max_window_layers", 62 if architecture == "dots1" else 28)
        if architecture == "qwen2_moe":  # every other one of the first layers
            return window, tuple(layer for layer in range(layers) if layer % 2 or layer >= first)
        return window, tuple(range(min(first, layers)))
    return window, _full_layers(kinds, layers)


def _full_layers(kinds: Any, layers: int) -> tuple[int, ...]:
    """The layers without a window, of what ``layer_types`` lists."""
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise ValueError(
            f"layer_types in config.json must list full_attention or sliding_attention for each of the {layers} layers"
        )
    return tuple(layer for layer, kind in enumerate(kinds) if kind == "full_attention")


def _rope_from_hf(read: Fields, max_position: int, default_theta: float = 10000.0) -> RopeConfig:
    new = read.values.get("rope_parameters")
    old = read.values.get("rope_scaling")
    for key, value in (("rope_parameters", new), ("rope_scaling", old)):
        if value is not None and not isinstance(value, dict):
            raise ValueError(f"{key!r} in config.json must be an object or null, not {shown(value)}")
    if isinstance(new, dict) and isinstance(new.get("full_attention"), dict):
        new = new["full_attention"]  # of Gemma 3, by kind of layer
    values = {**(new or {}), **(old or {})}
    if new is None and old is None and read.values.get("model_type") == "gpt_oss":
        values = {"rope_type": "yarn", "factor": 32.0, "truncate": False, "original_max_position_embeddings": 4096}
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
    """The multiplier of cos and sin: given, or 0.1 ln(factor) + 1, with two optional weights of the logarithm."""
    if rope.values.get("attention_factor") is not None:
        return rope.number("attention_factor")

    def magnitude(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    if rope.values.get("mscale") and rope.values.get("mscale_all_dim"):
        return magnitude(rope.number("mscale")) / magnitude(rope.number("mscale_all_dim"))
    return magnitude(1.0)


def _rope_scaling_to_hf(rope: RopeConfig) -> dict[str, Any] | None:
    if rope.scaling == "none":
        return None
    if rope.scaling == "linear":
        return {"rope_type": "linear", "factor": rope.factor}
    if rope.scaling == "llama3":
        return {
            "rope_type": "llama3",
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_max_position,
            "low_freq_factor": rope.low_freq_factor,
            "high_freq_factor": rope.high_freq_factor,
        }
    if rope.scaling == "yarn":
        return {
            "rope_type": "yarn",
            "factor": rope.factor,
            "original_max_position_embeddings": rope.original_max_position,
            "beta_fast": rope.beta_fast,
            "beta_slow": rope.beta_slow,
            "attention_factor": rope.attention_factor,
            "truncate": rope.truncate,
        }
    raise ValueError("a model with GGUF frequency factors cannot be written as config.json; save it from its HF files")
