"""``ModelConfig`` from and to GGUF metadata.

Keys are ``{architecture}.{what}`` as in the GGUF specification (ggml/docs/gguf.md); those that all families have stand
here, the others in the families' records (``families/``). Three things differ from ``config.json``: biases, QK-norm and
tied embeddings show only in which tensors there are; Llama 3.1's frequency scaling is a tensor of divisors
(``rope_freqs.weight``) and not four numbers; Mistral and Mixtral are stored as ``llama``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .families.family import Family, configured, key
from .families.gguf_keys import expect, short_float
from .families.registry import by_gguf, families, family
from .fields import Fields, shown
from .model import MAX_LAYERS, ModelConfig, RopeConfig

_SIZES = (
    key("n_layers", "block_count"),
    key("max_position", "context_length"),
    key("dim", "embedding_length"),
    key("n_heads", "attention.head_count"),
)
_FFN = key("ffn_dim", "feed_forward_length", lambda found: found.get("moe.expert_dim"))
_HEADS = (
    key("n_kv_heads", "attention.head_count_kv", lambda found: found["n_heads"]),
    key("head_dim", "attention.key_length", lambda found: found["dim"] // found["n_heads"]),
)
_EXPERTS = (key("moe.experts", "expert_count"), key("moe.per_token", "expert_used_count"))
_BIASES = {"qkv_bias": ("attn_q", "attn_qkv"), "o_bias": ("attn_output",), "mlp_bias": ("ffn_down",)}
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")
_SCORES = {1: "softmax", 2: "sigmoid"}
"""The router's score by ``expert_gating_func``."""


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> ModelConfig:
    """Read GGUF metadata; ``tensors`` (name to an object with ``.shape`` in torch order and ``.dequantize()``) supplies
    the rest: biases, QK-norm, tied embeddings, the vocabulary, llama3 frequency factors.

    Raises:
        ValueError: an unsupported architecture or setting, or a key that is missing or of the wrong type.
    """
    name = metadata.get("general.architecture")
    if name is None:
        raise ValueError("the GGUF file has no 'general.architecture': it is not a whole model, fetch it again")
    if not isinstance(name, str) or name not in by_gguf():
        raise ValueError(
            f"architecture {name if isinstance(name, str) else shown(name)!r} is not supported in GGUF files; "
            f"supported are: {', '.join(by_gguf())}"
        )
    read = Fields(metadata, "the GGUF metadata", f"{name}.")
    record = next(each for each in by_gguf()[name] if each.gguf_if is None or each.gguf_if(read))
    found = dict(record.fixed) | {"architecture": record.name}
    for part in _SIZES:
        found |= part.read(read, found)
    layers = found["n_layers"]
    if layers > MAX_LAYERS:
        raise ValueError(f"'{name}.block_count' in the GGUF metadata must be at most {MAX_LAYERS}, not {layers}")
    if found["n_heads"] <= 0:
        raise ValueError(f"'{name}.attention.head_count' in the GGUF metadata must be greater than 0, not 0")
    if "token_embd.weight" not in tensors:
        raise ValueError("the GGUF file has no tensor 'token_embd.weight': it is not a whole model, fetch it again")
    found |= _experts(record, read, tensors, layers)
    for part in (_FFN, *_HEADS):
        found |= part.read(read, found)
    head_dim = found["head_dim"]
    if read.integer("attention.value_length", head_dim) != head_dim:
        raise ValueError("GGUF models whose key and value heads differ in size are not supported")
    if found.get("position") != "learned":
        if read.integer("rope.dimension_count", head_dim) != head_dim:
            raise ValueError(f"GGUF models that rotate only part of a head ({head_dim}) are not supported")
        rope = found["rope"] = _rope(read, tensors, found["max_position"])
        if rope.scaling == "yarn":  # files of stretched models often keep the length before stretching
            found["max_position"] = max(found["max_position"], int(rope.original_max_position * rope.factor))
    tokens = Fields(metadata, "the GGUF metadata", "tokenizer.ggml.")
    ends = [tokens.token_id(key) for key in _END_TOKENS]
    found |= {
        "vocab_size": int(tensors["token_embd.weight"].shape[0]),
        "norm_eps": short_float(read.number(_epsilon(record))),
        "qk_norm": "blk.0.attn_q_norm.weight" in tensors,
        "tied_embeddings": "output.weight" not in tensors,
        "bos_token_id": tokens.token_id("bos_token_id"),
        "eos_token_ids": tuple(dict.fromkeys(token for token in ends if token is not None)),
    }
    for bias, matrices in _BIASES.items():
        found[bias] = any(f"blk.0.{matrix}.bias" in tensors for matrix in matrices)
    for part in record.gguf_parts:
        found |= part.read(read, found)
    return configured(found)


def to_gguf(config: ModelConfig) -> dict[str, Any]:
    """Return the keys of a model's GGUF metadata, without those of the file and of the tokenizer.

    Raises:
        ValueError: llama.cpp has no such model.
    """
    record = family(config.architecture)
    if not record.gguf:
        written = ", ".join(each.name for each in families().values() if each.gguf)
        raise ValueError(f"models of the kind {config.architecture} are not written as GGUF; written are {written}")
    values: dict[str, Any] = {"vocab_size": config.vocab_size, _epsilon(record): config.norm_eps}
    rotates, heads = config.position == "rope", _HEADS if config.position == "rope" else ()
    for part in (*_SIZES, _FFN, *heads, *(() if config.moe is None else _EXPERTS), *record.gguf_parts):
        values |= part.write(config)
    if rotates:
        rope = {"dimension_count": config.head_dim, "freq_base": config.rope.theta, **_scaling(config.rope)}
        values |= {"attention.value_length": config.head_dim} | {f"rope.{name}": value for name, value in rope.items()}
    expect(config, config.sliding_window is None or "attention.sliding_window" in values, "a sliding window")
    return {"general.architecture": record.gguf} | {f"{record.gguf}.{name}": value for name, value in values.items()}


def _epsilon(record: Family) -> str:
    """Return the key of the norms' epsilon."""
    layernorm = record.fixed.get("norm") == "layernorm"
    return f"attention.layer_norm_{'' if layernorm else 'rms_'}epsilon"


def _experts(record: Family, read: Fields, tensors: Mapping[str, Any], layers: int) -> dict[str, Any]:
    """Return the fields of the experts; {} if there are none. Sizes are those of the tensors; a layer without a router
    has one MLP."""
    experts = read.integer("expert_count", 0)
    if not experts:
        return {}
    if layers > len(tensors):  # before a list of billions of layers is made
        raise ValueError(f"the GGUF file has {len(tensors)} tensors, too few for {layers} layers: fetch it again")
    sparse = [layer for layer in range(layers) if f"blk.{layer}.ffn_gate_inp.weight" in tensors]
    first = f"blk.{sparse[0]}." if sparse else "blk.0."
    if any(f"{first}ffn_up.{expert}.weight" in tensors for expert in range(2)):
        raise ValueError(
            "the GGUF file has a tensor for each expert, as old converters wrote it; take a newer file, whose experts "
            "are one tensor (ffn_up_exps)"
        )
    up = tensors.get(f"{first}ffn_up_exps.weight")
    if up is None or len(up.shape) != 3:
        raise ValueError(
            f"the GGUF metadata names {experts} experts, and the file has no tensor '{first}ffn_up_exps.weight' of "
            "three dimensions; fetch or convert it again"
        )
    shared = tensors.get(f"{first}ffn_up_shexp.weight")
    gating = read.integer("expert_gating_func", 0) or 1
    if "moe.score" not in record.fixed and gating not in _SCORES:
        raise ValueError(f"a router of kind {gating} (expert_gating_func of the GGUF file) is not supported")
    found = {name: value for part in _EXPERTS for name, value in part.read(read, {}).items()}
    return found | {
        "moe.expert_dim": int(up.shape[1]),
        "moe.score": record.fixed.get("moe.score", _SCORES.get(gating)),
        "moe.renormalize": record.fixed.get("moe.renormalize", read.flag("expert_weights_norm", False)),
        "moe.scale": read.number("expert_weights_scale", 0.0) or 1.0,
        "moe.score_bias": f"{first}exp_probs_b.bias" in tensors,
        "moe.router_bias": f"{first}ffn_gate_inp.bias" in tensors,
        "moe.groups": read.integer("expert_group_count", 0) or 1,
        "moe.groups_kept": read.integer("expert_group_used_count", 0) or 1,
        "moe.shared_dim": 0 if shared is None else int(shared.shape[0]),
        "moe.shared_gate": f"{first}ffn_gate_inp_shexp.weight" in tensors,
        "moe.bias": f"{first}ffn_up_exps.bias" in tensors,
        "moe.dense_layers": tuple(layer for layer in range(layers) if layer not in set(sparse)),
    }


def _rope(read: Fields, tensors: Mapping[str, Any], max_position: int) -> RopeConfig:
    number = read.number
    theta = number("rope.freq_base", 10000.0)
    if any(name.startswith(("rope_factors_long", "rope_factors_short")) for name in tensors):
        raise ValueError(
            "the GGUF file has rope scaling 'longrope' (Phi-3 of 128k, Phi-4-mini), which is not supported: it changes "
            "frequencies within a sequence; take the 4k or 16k model"
        )
    if "rope_freqs.weight" in tensors:
        factors = tuple(float(value) for value in tensors["rope_freqs.weight"].dequantize().reshape(-1))
        return _llama3_from_factors(theta, factors) or RopeConfig(
            theta=theta, scaling="factors", frequency_factors=factors
        )
    kind = read.text("rope.scaling.type", "linear")  # as llama.cpp has it where a file has a factor alone
    if kind == "none":
        return RopeConfig(theta=theta)
    if kind == "linear":
        factor = number("rope.scaling.factor", 0.0) or number("rope.scale_linear", 1.0)  # as old files spell it
        return RopeConfig(theta=theta) if factor in (0, 1) else RopeConfig(theta, "linear", factor)
    if kind == "yarn":
        factor = number("rope.scaling.factor")
        return RopeConfig(
            theta=theta,
            scaling="yarn",
            factor=factor,
            original_max_position=read.integer("rope.scaling.original_context_length", max_position),
            beta_fast=number("rope.scaling.yarn_beta_fast", 32.0),
            beta_slow=number("rope.scaling.yarn_beta_slow", 1.0),
            attention_factor=number("rope.scaling.attn_factor", 1.0) * (1.0 + 0.1 * math.log(max(factor, 1.0))),
        )
    raise ValueError(f"rope scaling {kind!r} of the GGUF file is not supported; supported are: none, linear, yarn")


def _llama3_from_factors(theta: float, factors: tuple[float, ...]) -> RopeConfig | None:
    """Return the four llama3 numbers of a table of divisors, or None if it is not from one of the Llama 3.1 to 3.3
    releases.

    They all use low 1, high 4 and an original context of 8192; the largest divisor is ``factor``.
    """
    rope = RopeConfig(theta, "llama3", factor=round(max(factors), 4), original_max_position=8192)
    for pair, divisor in enumerate(factors):
        wavelength = 2 * math.pi * theta ** (pair / len(factors))
        blend = (8192 / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
        blend = min(max(blend, 0.0), 1.0)
        if not math.isclose(divisor, 1 / ((1 - blend) / rope.factor + blend), rel_tol=1e-5):
            return None
    return rope


def _scaling(rope: RopeConfig) -> dict[str, Any]:
    """Return the keys of scaling that a file gives in numbers; llama3's is a tensor."""
    if rope.scaling == "linear":
        return {"scaling.type": "linear", "scaling.factor": rope.factor}
    if rope.scaling != "yarn":
        return {}
    return {
        "scaling.type": "yarn",
        "scaling.factor": rope.factor,
        "scaling.original_context_length": rope.original_max_position,
        "scaling.yarn_beta_fast": rope.beta_fast,
        "scaling.yarn_beta_slow": rope.beta_slow,
        "scaling.attn_factor": rope.attention_factor / (1 + 0.1 * math.log(max(rope.factor, 1.0))),
    }
