"""Where GGUF files keep each weight: their names of tensors, and in which form they have them (no torch).

Files differ from the names and shapes of ``weights.py`` in five things:

* Of the families whose rotary embedding llama.cpp turns in neighbouring pairs (Llama, Mistral, Mixtral, Granite,
  SmolLM3, Llama 4) row ``2j + s`` of a head of q and k is row ``s * half + j`` in the half-rotation order used here.
* q, k and v of GPT-2 and Phi-3 are one matrix, and so are gate and up of Phi-3.
* All experts of a layer are one tensor ``[E, rows, columns]``, their biases one ``[E, rows]``.
* Gemma's norms have their offset of 1 added.
* The router of Qwen2-MoE's shared experts is a vector; a file that was converted and not quantized has a row.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from .model import ModelConfig
from .weights import projection_shapes, weight_shapes

ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "gpt2": "gpt2",
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "olmoe": "olmoe", "dots1": "dots1", "gpt_oss": "gpt-oss",
    "gemma2": "gemma2", "gemma3_text": "gemma3", "phi3": "phi3", "olmo2": "olmo2", "granite": "granite",
    "smollm3": "smollm3", "llama4_text": "llama4",
}  # fmt: skip
"""``general.architecture`` of a file, by architecture here."""
PAIRED = ("llama", "granite", "smollm3", "llama4")
"""Architectures of files that rotate neighbouring pairs."""
_OUTER = {"embed": "token_embd", "position_embed": "position_embd", "norm": "output_norm", "head": "output"}
_LAYER = {
    "attention_norm": "attn_norm",
    "attention.q": "attn_q",
    "attention.k": "attn_k",
    "attention.v": "attn_v",
    "attention.o": "attn_output",
    "attention.q_norm": "attn_q_norm",
    "attention.k_norm": "attn_k_norm",
    "attention_post_norm": "post_attention_norm",
    "mlp_norm": "ffn_norm",
    "mlp_post_norm": "post_ffw_norm",
    "mlp.gate": "ffn_gate",
    "mlp.up": "ffn_up",
    "mlp.down": "ffn_down",
    "mlp.router": "ffn_gate_inp",
    "mlp.experts_gate": "ffn_gate_exps",
    "mlp.experts_up": "ffn_up_exps",
    "mlp.experts_down": "ffn_down_exps",
    "mlp.shared_router": "ffn_gate_inp_shexp",
    "mlp.shared_gate": "ffn_gate_shexp",
    "mlp.shared_up": "ffn_up_shexp",
    "mlp.shared_down": "ffn_down_shexp",
}
_JOINED = {"qkv": "attn_qkv", "gate_up": "ffn_up"}
"""The name of matrices that are one."""
_JOINED_IN = {"gpt2": ("qkv",), "phi3": ("qkv", "gate_up")}


@dataclass(frozen=True, slots=True)
class Place:
    """Place of a weight: its rows from ``first`` on of ``tensor``, whose shape in the file is ``stored``.

    ``paired``: in the order that rotates neighbouring pairs; ``added``: constant that the file adds to the numbers.
    """

    tensor: str
    stored: tuple[int, ...]
    first: int = 0
    paired: bool = False
    added: float = 0.0


def places(config: ModelConfig, tensors: Collection[str] = ()) -> dict[str, Place]:
    """Canonical name to place, for every weight of ``weight_shapes(config)``. ``tensors``: the names of a file, which
    may have q, k and v as one matrix in any family."""
    joined = _JOINED_IN.get(config.architecture, ())
    if "blk.0.attn_qkv.weight" in tensors and "qkv" not in joined:
        joined = (*joined, "qkv")
    return {name: _place(config, name, shape, joined) for name, shape in weight_shapes(config).items()}


def _place(config: ModelConfig, name: str, shape: tuple[int, ...], joined: tuple[str, ...]) -> Place:
    module, kind = name.rsplit(".", 1)
    added = config.norm_offset if module.endswith("norm") else 0.0
    if not module.startswith("layers."):
        return Place(f"{_OUTER[module]}.{kind}", shape, added=added)
    _, layer, inner = module.split(".", 2)
    block = f"blk.{layer}"
    if kind == "sinks":
        return Place(f"{block}.attn_sinks.weight", shape)
    if kind == "score_bias":
        return Place(f"{block}.exp_probs_b.bias", shape)
    moe = config.layer_moe(int(layer))
    if inner.startswith("mlp.experts_") and moe is not None:
        return Place(f"{block}.{_LAYER[inner]}.{kind}", (moe.held, shape[0] // moe.held, *shape[1:]))
    if inner == "mlp.shared_router":
        return Place(f"{block}.{_LAYER[inner]}.{kind}", shape[1:])
    if inner == "mlp_norm" and config.architecture == "gpt_oss":
        return Place(f"{block}.post_attention_norm.{kind}", shape)
    paired = ARCHITECTURES[config.architecture] in PAIRED and inner in ("attention.q", "attention.k")
    for projection in joined:
        parts = {part: size[0] for part, size in projection_shapes(config, int(layer)).get(projection, {}).items()}
        if inner in parts:
            before = list(parts)[: list(parts).index(inner)]
            stored = (sum(parts.values()), *shape[1:])
            return Place(f"{block}.{_JOINED[projection]}.{kind}", stored, sum(parts[part] for part in before), paired)
    return Place(f"{block}.{_LAYER[inner]}.{kind}", shape, paired=paired, added=added)
