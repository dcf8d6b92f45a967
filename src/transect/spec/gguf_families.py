"""Read and write GGUF metadata of single families: experts, scales, caps and windows (no torch).

Facts that llama.cpp knows and files omit are here too: the layers of SmolLM3 that do not rotate, how
often a layer of Gemma slides, gpt-oss's clamp.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from .fields import Fields
from .model import ModelConfig, RopeConfig
from .moe import MoEConfig

_SOFTMAX, _SIGMOID = 1, 2
"""``expert_gating_func``."""
_RENORMALIZES = ("llama", "qwen3moe", "gpt-oss")
_STILL_STEP = 4
"""Period of the layers without rotation in SmolLM3 and Llama 4."""
_CHUNK = 8192
_TEMPERATURE = (0.1, 8192)
_CLAMP = 7.0
_PERIODS = {"gemma2": 2, "gemma3": 6, "gpt-oss": 2}
"""Period of the layers with full attention, the last of each period, if files omit it."""


def moe_from_gguf(architecture: str, read: Fields, tensors: Mapping[str, Any], layers: int) -> MoEConfig | None:
    """The experts of a model; None where it has none. ``architecture`` is that of the file. Sizes are those of the
    tensors; a layer without a router has one MLP.

    Raises:
        ValueError: a setting that is not supported, or tensors that are missing.
    """
    experts = read.integer("expert_count", 0)
    if not experts:
        return None
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
    gating = read.integer("expert_gating_func", 0) or (_SIGMOID if architecture in ("dots1", "llama4") else _SOFTMAX)
    if gating not in (_SOFTMAX, _SIGMOID) and architecture != "gpt-oss":
        raise ValueError(f"a router of kind {gating} (expert_gating_func of the GGUF file) is not supported")
    scale = read.number("expert_weights_scale", 0.0)
    return MoEConfig(
        experts,
        read.integer("expert_used_count"),
        int(up.shape[1]),
        score="sigmoid" if gating == _SIGMOID else "softmax",
        renormalize=architecture in _RENORMALIZES or read.flag("expert_weights_norm", False),
        scale=scale or 1.0,
        score_bias=f"{first}exp_probs_b.bias" in tensors,
        router_bias=f"{first}ffn_gate_inp.bias" in tensors,
        groups=read.integer("expert_group_count", 0) or 1,
        groups_kept=read.integer("expert_group_used_count", 0) or 1,
        shared_dim=0 if shared is None else int(shared.shape[0]),
        shared_gate=f"{first}ffn_gate_inp_shexp.weight" in tensors,
        weighs_inputs=architecture == "llama4",
        bias=f"{first}ffn_up_exps.bias" in tensors,
        clamp=_CLAMP if architecture == "gpt-oss" else None,
        dense_layers=tuple(layer for layer in range(layers) if layer not in set(sparse)),
    )


def family_from_gguf(
    architecture: str, read: Fields, tensors: Mapping[str, Any], fields: Mapping[str, Any]
) -> dict[str, Any]:
    """Fields of ``ModelConfig`` that only this family has, or has otherwise than ``fields``; {} for most.

    Raises:
        ValueError: a setting that is not supported.
    """
    reader: Callable[..., dict[str, Any]] | None = {
        "gemma2": _gemma,
        "gemma3": _gemma,
        "phi3": _phi3,
        "olmo2": _olmo2,
        "olmoe": lambda *_: {"qk_norm_whole": True},
        "granite": _granite,
        "smollm3": lambda _a, _r, _t, fields: {"no_rope_layers": _still(fields["n_layers"])},
        "gpt-oss": _gpt_oss,
        "llama4": _llama4,
    }.get(architecture)
    return {} if reader is None else reader(architecture, read, tensors, fields)


def _still(layers: int) -> tuple[int, ...]:
    return tuple(range(_STILL_STEP - 1, layers, _STILL_STEP))


def _sliding(architecture: str, read: Fields, layers: int, default: int | None = None) -> dict[str, Any]:
    """The window, and the layers that do without it."""
    window = read.integer("attention.sliding_window", default)
    if not window:
        return {"sliding_window": None}
    key = f"{architecture}.attention.sliding_window_pattern"
    pattern = read.values.get(key)
    if isinstance(pattern, list):
        if len(pattern) != layers or any(not isinstance(slides, (bool, int)) for slides in pattern):
            raise ValueError(f"{key!r} in the GGUF metadata must say true or false for each of the {layers} layers")
        full = tuple(layer for layer, slides in enumerate(pattern) if not slides)
    else:
        period = read.integer("attention.sliding_window_pattern", _PERIODS[architecture])
        full = tuple(range(period - 1, layers, period)) if period else ()
    return {"sliding_window": window, "full_attention_layers": full}


def gemma_scale(architecture: str, dim: int, heads: int, head_dim: int, layers: int) -> float:
    """Return llama.cpp's factor of the scores of a Gemma; ``architecture`` is the file's."""
    largest = layers == {"gemma2": 46, "gemma3": 62}[architecture]  # the models of 27B
    return float((dim // heads if largest else head_dim) ** -0.5)


def _gemma(architecture: str, read: Fields, tensors: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    second = architecture == "gemma2"
    sizes = (fields["dim"], fields["n_heads"], fields["head_dim"], fields["n_layers"])
    capped = read.number("final_logit_softcapping", 30.0 if second else 0.0)
    found = _sliding(architecture, read, fields["n_layers"], 4096 if second else 0)
    found |= {
        "activation": "gelu_tanh",
        "norm_order": "both",
        "norm_offset": 1.0,
        "embed_scale": fields["dim"] ** 0.5,
        "query_scale": gemma_scale(architecture, *sizes),
        "attention_softcap": read.number("attn_logit_softcapping", 50.0) if second else None,
        "logit_softcap": capped or None,
    }
    if not second:
        found["local_rope"] = RopeConfig(theta=read.number("rope.freq_base_swa", 10000.0))
    return found


def _phi3(architecture: str, read: Fields, tensors: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    return {"sliding_window": read.integer("attention.sliding_window", 0) or None}


def _olmo2(architecture: str, read: Fields, tensors: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    if read.integer("attention.sliding_window", 0):
        raise ValueError("the GGUF file holds an OLMo 3, whose layers slide; that is not supported, OLMo 2 is")
    return {"norm_order": "post", "qk_norm_whole": True}


def _granite(architecture: str, read: Fields, tensors: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    if not read.flag("rope.scaling.finetuned", True):
        raise ValueError("the GGUF file holds a Granite without rotary positions, which is not supported")

    def scale(key: str) -> float:
        return _short(read.number(key, 0.0)) or 1.0

    score = read.number("attention.scale", 0.0)
    return {
        "embed_scale": scale("embedding_scale"),
        "residual_scale": scale("residual_scale"),
        "query_scale": _short(score) if score else fields["head_dim"] ** -0.5,
        "logit_scale": 1.0 / scale("logit_scale"),
    }


def _gpt_oss(architecture: str, read: Fields, tensors: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    # The model's own ramp does not end at whole planes, and files do not say that.
    rope = fields["rope"]
    found = {"attention_sinks": True, "rope": rope}
    if rope.scaling == "yarn":
        found["rope"] = RopeConfig(**{**_values(rope), "truncate": False})
    return found | _sliding(architecture, read, fields["n_layers"], 128)


def _llama4(architecture: str, read: Fields, tensors: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, Any]:
    if fields["moe"] is None or read.values.get("llama4.attention.sliding_window") == 0:
        raise ValueError("the GGUF file holds a Llama 4 without experts or without chunks, which is not supported")
    return {
        "no_rope_layers": _still(fields["n_layers"]),
        "qk_l2_norm": fields["moe"].experts != 128,
        "attention_chunk": _CHUNK,
        "attention_temperature": _TEMPERATURE,
    }


def _values(rope: RopeConfig) -> dict[str, Any]:
    return {name: getattr(rope, name) for name in RopeConfig.__dataclass_fields__}


def _short(value: float) -> float:
    """The shortest decimal that is this float32 number."""
    return float(f"{value:.7g}")


# ---- out


def family_to_gguf(architecture: str, config: ModelConfig) -> dict[str, Any]:
    """The keys, without the architecture before them, that the functions above read.

    Raises:
        ValueError: what llama.cpp takes for granted of the family, this model has otherwise.
    """
    layers = config.n_layers
    values: dict[str, Any] = {} if config.moe is None else _moe_keys(architecture, config.moe)
    if architecture in ("gemma2", "gemma3"):
        own = gemma_scale(architecture, config.dim, config.n_heads, config.head_dim, layers)
        _expect(config, abs((config.query_scale or 0) - own) < 1e-6, f"scores scaled by other than {own:.6g}")
        _expect(config, architecture == "gemma3" or config.logit_softcap is not None, "logits without a cap")
        values |= {"final_logit_softcapping": config.logit_softcap} if config.logit_softcap is not None else {}
        values |= {"attn_logit_softcapping": config.attention_softcap} if config.attention_softcap is not None else {}
        if architecture == "gemma2":
            _expect(config, config.attention_softcap is not None, "scores without a cap")
        else:
            _expect(config, config.attention_softcap is None, "capped scores")
            values["rope.freq_base_swa"] = config.rope.theta if config.local_rope is None else config.local_rope.theta
    if architecture in _PERIODS:
        values["attention.sliding_window"] = config.sliding_window or 0
        every = _PERIODS[architecture]
        if config.sliding_window is not None and config.full_attention_layers != tuple(range(every - 1, layers, every)):
            slides = [layer not in config.full_attention_layers for layer in range(layers)]
            values["attention.sliding_window_pattern"] = slides
    if architecture == "llama":
        _expect(config, not config.full_attention_layers, "a sliding window of some layers")
    if architecture not in ("llama", "phi3", *_PERIODS):
        _expect(config, config.sliding_window is None, "a sliding window")
    if architecture == "phi3":
        values["attention.sliding_window"] = config.sliding_window or 0
    if architecture == "granite":
        values |= {
            "embedding_scale": config.embed_scale,
            "residual_scale": config.residual_scale,
            "attention.scale": config.attention_scale,
            "logit_scale": 1.0 / config.logit_scale,
        }
    if architecture in ("smollm3", "llama4"):
        _expect(config, config.no_rope_layers == _still(layers), "other layers that rotate than three of four")
    if architecture == "llama4":
        known = (config.attention_chunk, config.attention_temperature) == (_CHUNK, _TEMPERATURE)
        _expect(config, known, f"chunks other than {_CHUNK} or another temperature")
        _expect(
            config, config.qk_l2_norm == (config.moe is not None and config.moe.experts != 128), "another norm of q"
        )
        values["interleave_moe_layer_step"] = _step(config)
    if architecture == "gpt-oss":
        _expect(config, config.moe is not None and config.moe.clamp == _CLAMP, f"a clamp other than {_CLAMP:g}")
    return values


def _moe_keys(architecture: str, moe: MoEConfig) -> dict[str, Any]:
    values: dict[str, Any] = {"expert_count": moe.experts, "expert_used_count": moe.per_token}
    if architecture in ("qwen2moe", "qwen3moe", "dots1", "gpt-oss", "llama4"):
        values["expert_feed_forward_length"] = moe.expert_dim
    if architecture == "qwen2moe":
        values["expert_shared_feed_forward_length"] = moe.shared_dim
    if architecture == "dots1":
        values |= {
            "expert_shared_count": moe.shared_dim // moe.expert_dim,
            "expert_weights_scale": moe.scale,
            "expert_weights_norm": moe.renormalize,
            "expert_gating_func": _SIGMOID,
            "leading_dense_block_count": len(moe.dense_layers),
        }
        if moe.groups > 1:
            values |= {"expert_group_count": moe.groups, "expert_group_used_count": moe.groups_kept}
    elif architecture != "llama4" and moe.renormalize != (architecture in _RENORMALIZES):
        sums = "do not add up to 1" if architecture in _RENORMALIZES else "add up to 1"
        raise ValueError(f"llama.cpp has no {architecture} model whose weights of experts {sums}")
    if architecture not in ("dots1", "llama4") and moe.dense_layers:
        raise ValueError(f"llama.cpp has no {architecture} model with layers without experts ({moe.dense_layers[0]})")
    return values


def _step(config: ModelConfig) -> int:
    """Return the period of the layers with experts."""
    assert config.moe is not None
    sparse = [layer for layer in range(config.n_layers) if layer not in config.moe.dense_layers]
    step = sparse[0] + 1 if sparse else 0
    _expect(config, sparse == list(range(step - 1, config.n_layers, max(step, 1))), "experts in uneven layers")
    return step


def _expect(config: ModelConfig, known: bool, what: str) -> None:
    if not known:
        raise ValueError(f"a {config.architecture} model with {what} cannot be written as GGUF: llama.cpp has no such")
