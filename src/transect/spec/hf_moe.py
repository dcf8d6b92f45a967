"""``MoEConfig`` from and to the keys of a Hugging Face ``config.json``, by family."""

from __future__ import annotations

from typing import Any

from .fields import Fields
from .moe import MoEConfig

FAMILIES = ("mixtral", "qwen2_moe", "qwen3_moe", "olmoe", "dots1", "gpt_oss", "llama4_text")


def moe_from_hf(architecture: str, read: Fields, layers: int) -> MoEConfig | None:
    """The experts of a model; None for a family without them.

    Raises:
        ValueError: a setting that is not supported, or a key that is missing or of the wrong type.
    """
    if architecture == "mixtral":
        return MoEConfig(
            _experts(read, 8),
            read.integer("num_experts_per_tok", 2),
            read.integer("intermediate_size"),
        )
    if architecture == "gpt_oss":
        return MoEConfig(
            _experts(read, 128),
            read.integer("num_experts_per_tok", read.integer("experts_per_token", 4)),
            read.integer("intermediate_size", 2880),
            router_bias=True,
            bias=True,
            clamp=read.number("swiglu_limit", 7.0),
        )
    if architecture == "llama4_text":
        width = read.integer("intermediate_size", 8192)
        return MoEConfig(
            _experts(read, 16),
            read.integer("num_experts_per_tok", 1),
            width,
            score="sigmoid",
            renormalize=False,
            weighs_inputs=True,
            shared_dim=width,
            dense_layers=_llama4_dense(read, layers),
        )
    if architecture == "olmoe":
        if read.values.get("clip_qkv") is not None:
            raise ValueError("OLMoE with clip_qkv is not supported; the released models have none")
        return MoEConfig(
            _experts(read, 64),
            read.integer("num_experts_per_tok", 8),
            read.integer("intermediate_size"),
            renormalize=read.flag("norm_topk_prob", False),
        )
    if architecture in ("qwen2_moe", "qwen3_moe"):
        qwen2 = architecture == "qwen2_moe"
        return MoEConfig(
            _experts(read, 60 if qwen2 else 128),
            read.integer("num_experts_per_tok", 4 if qwen2 else 8),
            read.integer("moe_intermediate_size", 1408 if qwen2 else 768),
            renormalize=read.flag("norm_topk_prob", False),
            shared_dim=read.integer("shared_expert_intermediate_size", 5632) if qwen2 else 0,
            shared_gate=qwen2,
            dense_layers=_dense_layers(read, layers),
        )
    if architecture == "dots1":
        width = read.integer("moe_intermediate_size", 1408)
        return MoEConfig(
            _experts(read),
            read.integer("num_experts_per_tok"),
            width,
            score="sigmoid",
            renormalize=read.flag("norm_topk_prob", False),
            scale=read.number("routed_scaling_factor", 1.0),
            score_bias=True,
            groups=read.integer("n_group", 1),
            groups_kept=read.integer("topk_group", 1),
            shared_dim=width * read.integer("n_shared_experts"),
            dense_layers=tuple(range(min(layers, read.integer("first_k_dense_replace", 0)))),
        )
    return None


def _experts(read: Fields, default: int | None = None) -> int:
    """Return the number of experts, under the family's name for it or that of transformers 5."""
    for key in ("num_experts", "n_routed_experts"):
        if read.values.get(key) is not None:
            return read.integer(key)
    return read.integer("num_local_experts", default)


def _dense_layers(read: Fields, layers: int) -> tuple[int, ...]:
    """Qwen's two ways to say it: a list, and a step."""
    step = read.integer("decoder_sparse_step", 1, low=1)
    listed = read.values.get("mlp_only_layers") or []
    if not isinstance(listed, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in listed):
        raise ValueError(f"'mlp_only_layers' in config.json must be a list of layer numbers, not {listed!r}")
    return tuple(layer for layer in range(layers) if layer in listed or (layer + 1) % step)


def _llama4_dense(read: Fields, layers: int) -> tuple[int, ...]:
    """A list of the layers with experts, or a step."""
    listed = read.values.get("moe_layers")
    if listed is None:
        step = read.integer("interleave_moe_layer_step", 1, low=1)
        listed = list(range(step - 1, layers, step))
    if not isinstance(listed, list) or any(isinstance(i, bool) or not isinstance(i, int) for i in listed):
        raise ValueError(f"'moe_layers' in config.json must be a list of layer numbers, not {listed!r}")
    return tuple(layer for layer in range(layers) if layer not in listed)


def moe_to_hf(architecture: str, moe: MoEConfig, layers: int) -> dict[str, Any]:
    """The keys of ``config.json`` that ``moe_from_hf`` reads."""
    common = {"num_experts_per_tok": moe.per_token}
    if architecture == "gpt_oss":
        own = {"num_local_experts": moe.experts, "intermediate_size": moe.expert_dim, "swiglu_limit": moe.clamp}
        return common | own
    if architecture == "llama4_text":
        own = {"num_local_experts": moe.experts, "intermediate_size": moe.expert_dim}
        return common | own | {"moe_layers": [layer for layer in range(layers) if layer not in moe.dense_layers]}
    if architecture == "mixtral":
        return common | {"num_local_experts": moe.experts, "intermediate_size": moe.expert_dim}
    if architecture == "olmoe":
        own = {"num_experts": moe.experts, "intermediate_size": moe.expert_dim, "norm_topk_prob": moe.renormalize}
        return common | own
    if architecture in ("qwen2_moe", "qwen3_moe"):
        shared = {"shared_expert_intermediate_size": moe.shared_dim} if architecture == "qwen2_moe" else {}
        return common | shared | {
            "num_experts": moe.experts,
            "moe_intermediate_size": moe.expert_dim,
            "norm_topk_prob": moe.renormalize,
            "decoder_sparse_step": 1,
            "mlp_only_layers": list(moe.dense_layers),
        }  # fmt: skip
    return common | {
        "n_routed_experts": moe.experts,
        "moe_intermediate_size": moe.expert_dim,
        "n_shared_experts": moe.shared_dim // moe.expert_dim,
        "norm_topk_prob": moe.renormalize,
        "routed_scaling_factor": moe.scale,
        "n_group": moe.groups,
        "topk_group": moe.groups_kept,
        "first_k_dense_replace": len(moe.dense_layers),
    }
