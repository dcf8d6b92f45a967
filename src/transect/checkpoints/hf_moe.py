"""Where Hugging Face checkpoints keep experts and routers: names below ``model.layers.N.``, by family.

An expert is a tensor of its own; ``{}`` stands for its number.
"""

from __future__ import annotations

_MIXTRAL = {
    "experts_gate": "block_sparse_moe.experts.{}.w1",
    "experts_up": "block_sparse_moe.experts.{}.w3",
    "experts_down": "block_sparse_moe.experts.{}.w2",
    "router": "block_sparse_moe.gate",
}
_COMMON = {
    "experts_gate": "mlp.experts.{}.gate_proj",
    "experts_up": "mlp.experts.{}.up_proj",
    "experts_down": "mlp.experts.{}.down_proj",
    "router": "mlp.gate",
    "shared_router": "mlp.shared_expert_gate",
}


_GPT_OSS = {"router": "mlp.router"}
_LLAMA4 = {"router": "feed_forward.router"}
LLAMA4_MLP = {f"mlp.{name}": f"feed_forward.{name}_proj" for name in ("gate", "up", "down")}
"""Its name for the MLP of layers without experts."""


def expert_tensor(architecture: str, inner: str, kind: str) -> str | None:
    """The tensor of ``mlp.experts_up`` or the like, and of its ``weight``, ``bias`` or ``score_bias``; None for what is
    no part of a mixture of experts."""
    name = inner.removeprefix("mlp.")
    names = {"mixtral": _MIXTRAL, "gpt_oss": _GPT_OSS, "llama4_text": _LLAMA4}.get(architecture, _COMMON)
    if kind == "score_bias":
        return f"{names['router']}.e_score_correction_bias"
    if name in names:
        return f"{names[name]}.{kind}"
    if name.startswith("shared_") and architecture == "llama4_text":
        return f"feed_forward.shared_expert.{name.removeprefix('shared_')}_proj.{kind}"
    if name.startswith("shared_"):
        shared = "shared_expert" if architecture == "qwen2_moe" else "shared_experts"
        return f"mlp.{shared}.{name.removeprefix('shared_')}_proj.{kind}"
    return None
