"""Llama 4, its language model: attention in chunks, layers without positions, experts that weigh their inputs."""

from ..fields import Fields
from ..model import ModelConfig
from .config_json import ATTENTION_BIAS, NO_ROPE_LAYERS, experts, numbers_of_layers, sizes
from .family import Family, Found, Part, key, value_of
from .gguf_keys import EXPERT_WIDTH, STILL, expect, granted

_PARTS = ("gate", "up", "down")
_TEMPERATURE = (0.1, 8192)


def _check_kinds(read: Fields, found: Found) -> Found:
    still = found["no_rope_layers"]
    kinds = ["full_attention" if layer in still else "chunked_attention" for layer in range(found["n_layers"])]
    if read.values.get("layer_types") not in (None, kinds):
        raise ValueError(
            "layer_types in config.json must be chunked_attention for the layers that rotate and full_attention for "
            "the others (no_rope_layers); nothing else is supported for Llama 4"
        )
    return {}


def _temperature(read: Fields, found: Found) -> Found:
    # The first files say 4 for it, which is as good as true.
    if not (read.values.get("attn_temperature_tuning") == 4 or read.flag("attn_temperature_tuning", True)):
        return {}
    scale, floor = _TEMPERATURE
    return {"attention_temperature": (read.number("attn_scale", scale), read.integer("floor_scale", floor))}


def _write_temperature(config: ModelConfig) -> Found:
    scale, floor = config.attention_temperature or _TEMPERATURE
    tuned = config.attention_temperature is not None
    return {"attn_temperature_tuning": tuned, "attn_scale": scale, "floor_scale": floor}


def _dense(read: Fields, found: Found) -> Found:
    layers, step = found["n_layers"], read.integer("interleave_moe_layer_step", 1, low=1)
    listed = numbers_of_layers(read, "moe_layers", list(range(step - 1, layers, step)))
    return {"moe.dense_layers": tuple(layer for layer in range(layers) if layer not in listed)}


def _sparse(config: ModelConfig) -> list[int]:
    return [layer for layer in range(config.n_layers) if layer not in value_of(config, "moe.dense_layers")]


def _gguf(read: Fields, found: Found) -> Found:
    if "moe.experts" not in found or read.value("attention.sliding_window") == 0:
        raise ValueError("the GGUF file holds a Llama 4 without experts or without chunks, which is not supported")
    return {"qk_l2_norm": found["moe.experts"] != 128}


def _write_gguf(config: ModelConfig) -> Found:
    expect(config, config.qk_l2_norm == (value_of(config, "moe.experts") != 128), "another norm of q")
    sparse = _sparse(config)
    step = sparse[0] + 1 if sparse else 0
    expect(config, sparse == list(range(step - 1, config.n_layers, max(step, 1))), "experts in uneven layers")
    return {"interleave_moe_layer_step": step}


LLAMA4 = Family(
    name="llama4_text",
    models="Llama 4 (text)",
    hf_class="Llama4ForCausalLM",
    hf=(
        *sizes(kv_heads=8, head_dim=128, max_position=131072, eps=1e-5, theta=5e5, ffn="intermediate_size_mlp"),
        ATTENTION_BIAS,
        NO_ROPE_LAYERS,
        Part(_check_kinds),
        key("qk_l2_norm", "use_qk_norm", True),
        key("attention_chunk", "attention_chunk_size", 8192, optional=True),
        Part(_temperature, _write_temperature),
        *experts("num_local_experts", 16, 1),
        key("moe.expert_dim", "intermediate_size", 8192, also="moe.shared_dim"),
        Part(_dense, lambda config: {"moe_layers": _sparse(config)}),
    ),
    fixed={"moe.score": "sigmoid", "moe.renormalize": False, "moe.weighs_inputs": True},
    gguf="llama4",
    gguf_parts=(
        STILL,
        granted("attention_chunk", 8192, "chunks other than {}"),
        granted("attention_temperature", _TEMPERATURE, "another temperature"),
        Part(_gguf, _write_gguf),
        EXPERT_WIDTH,
    ),
    gguf_paired=True,
    hf_names={"mlp.router": "feed_forward.router", "mlp.experts": "feed_forward.experts"}
    | {f"mlp.{name}": f"feed_forward.{name}_proj" for name in _PARTS}
    | {f"mlp.shared_{name}": f"feed_forward.shared_expert.{name}_proj" for name in _PARTS},
    hf_stacked="halves",
    hf_paired=True,
    tiny={
        "head_dim": 16, "intermediate_size_mlp": 40, "num_local_experts": 4, "num_experts_per_tok": 1,
        "moe_layers": [0, 2], "no_rope_layers": [1, 0, 1], "attention_chunk_size": 16, "floor_scale": 8,
        "attn_scale": 0.5,
    },
)  # fmt: skip
