"""``ModelConfig`` from GGUF metadata.

Keys are ``{architecture}.{what}`` as in the GGUF specification (ggml/docs/gguf.md). Three things differ from
``config.json``: biases, QK-norm and tied embeddings show only in which tensors there are; Llama 3.1's frequency scaling
is a tensor of divisors (``rope_freqs.weight``) and not four numbers; Mistral and Mixtral are stored as ``llama``.
``gguf_families.py`` has what single families add.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .fields import Fields, shown
from .gguf_families import family_from_gguf, moe_from_gguf
from .gguf_places import ARCHITECTURES
from .model import MAX_LAYERS, ModelConfig, RopeConfig

_OWN = {there: here for here, there in ARCHITECTURES.items() if here not in ("mistral", "mixtral")}
"""Architecture here, by that of a file."""
_BIASES = {"qkv_bias": ("attn_q", "attn_qkv"), "o_bias": ("attn_output",), "mlp_bias": ("ffn_down",)}
_END_TOKENS = ("eos_token_id", "eot_token_id", "eom_token_id")


def from_gguf(metadata: Mapping[str, Any], tensors: Mapping[str, Any]) -> ModelConfig:
    """Read GGUF metadata; ``tensors`` (name to an object with ``.shape`` in torch order and ``.dequantize()``) tells
    what metadata does not say: biases, QK-norm, tied embeddings, the vocabulary, llama3 frequency factors.

    Raises:
        ValueError: an unsupported architecture or setting, or a key that is missing or of the wrong type.
    """
    found = metadata.get("general.architecture")
    if found is None:
        raise ValueError("the GGUF file has no 'general.architecture': it is not a whole model, fetch it again")
    if not isinstance(found, str) or found not in _OWN:
        raise ValueError(
            f"architecture {found if isinstance(found, str) else shown(found)!r} is not supported in GGUF "
            f"files; supported are: {', '.join(_OWN)}"
        )
    read = Fields(metadata, "the GGUF metadata", f"{found}.")
    number, integer = read.number, read.integer
    dim, heads = integer("embedding_length"), integer("attention.head_count")
    if heads <= 0:
        raise ValueError(f"'{found}.attention.head_count' in the GGUF metadata must be greater than 0, not {heads}")
    if "token_embd.weight" not in tensors:
        raise ValueError("the GGUF file has no tensor 'token_embd.weight': it is not a whole model, fetch it again")
    head_dim = integer("attention.key_length", 128 if found == "qwen3" else dim // heads)
    if integer("attention.value_length", head_dim) != head_dim:
        raise ValueError("GGUF models whose key and value heads differ in size are not supported")
    gpt2 = found == "gpt2"
    if not gpt2 and integer("rope.dimension_count", head_dim) != head_dim:
        raise ValueError(f"GGUF models that rotate only part of a head ({head_dim}) are not supported")
    max_position, layers = integer("context_length"), integer("block_count")
    if layers > MAX_LAYERS:
        raise ValueError(f"'{found}.block_count' in the GGUF metadata must be at most {MAX_LAYERS}, not {layers}")
    rope = RopeConfig() if gpt2 else _rope(read, tensors, max_position)
    if rope.scaling == "yarn":
        # Files of stretched models often keep the length before stretching.
        max_position = max(max_position, int(rope.original_max_position * rope.factor))
    moe = moe_from_gguf(found, read, tensors, layers)
    # Converters write Qwen's window even where the model does not use it, and not the layers it would start at; every
    # released Qwen2 and Qwen3 has it off. Mistral's (stored as llama) is for all layers.
    window = integer("attention.sliding_window", 0) if found == "llama" else 0
    tokens = Fields(metadata, "the GGUF metadata", "tokenizer.ggml.")
    ends = [tokens.token_id(key) for key in _END_TOKENS]
    layernorm = "attention.layer_norm_epsilon" if gpt2 else "attention.layer_norm_rms_epsilon"
    fields: dict[str, Any] = {
        "architecture": "mixtral" if found == "llama" and moe else "mistral" if window else _OWN[found],
        "vocab_size": int(tensors["token_embd.weight"].shape[0]),
        "dim": dim,
        "n_layers": layers,
        "n_heads": heads,
        "n_kv_heads": integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "ffn_dim": integer("feed_forward_length", None if moe is None else moe.expert_dim),
        "max_position": max_position,
        "norm": "layernorm" if gpt2 else "rmsnorm",
        "norm_eps": short_float(number(layernorm)),
        "activation": "gelu_tanh" if gpt2 else "silu",
        "gated_mlp": not gpt2,
        "qk_norm": "blk.0.attn_q_norm.weight" in tensors,
        "tied_embeddings": "output.weight" not in tensors,
        "position": "learned" if gpt2 else "rope",
        "rope": rope,
        "sliding_window": window or None,
        "bos_token_id": tokens.token_id("bos_token_id"),
        "eos_token_ids": tuple(dict.fromkeys(token for token in ends if token is not None)),
        "moe": moe,
    }
    for name, matrices in _BIASES.items():
        fields[name] = any(f"blk.0.{matrix}.bias" in tensors for matrix in matrices)
    return ModelConfig(**(fields | family_from_gguf(found, read, tensors, fields)))


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
    """The four llama3 numbers behind a table of divisors, or None if it is not one of the Llama 3.1 to 3.3 releases.

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


def short_float(value: float) -> float:
    """The shortest decimal that is this float32 number: 1e-05 where the file's float32 reads 9.999999747378752e-06."""
    return float(f"{value:.7g}")
