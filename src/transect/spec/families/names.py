"""Names of tensors in files, by canonical name; a family's record has those that differ.

``layers`` is the name of the stack, ``mlp.experts`` that of experts that are one tensor. ``{}`` stands for the number
of an expert that is a tensor of its own. Empty: files of that kind have no such name, or only those of some families.
"""

from __future__ import annotations

_NAMES = {
    "embed": ("model.embed_tokens", "token_embd"),
    "position_embed": ("", "position_embd"),
    "norm": ("model.norm", "output_norm"),
    "head": ("lm_head", "output"),
    "layers": ("model.layers", ""),
    "attention": ("self_attn", ""),
    "attention_norm": ("input_layernorm", "attn_norm"),
    "attention.q": ("self_attn.q_proj", "attn_q"),
    "attention.k": ("self_attn.k_proj", "attn_k"),
    "attention.v": ("self_attn.v_proj", "attn_v"),
    "attention.o": ("self_attn.o_proj", "attn_output"),
    "attention.q_norm": ("self_attn.q_norm", "attn_q_norm"),
    "attention.k_norm": ("self_attn.k_norm", "attn_k_norm"),
    "attention_post_norm": ("", "post_attention_norm"),
    "mlp_norm": ("post_attention_layernorm", "ffn_norm"),
    "mlp_post_norm": ("", "post_ffw_norm"),
    "mlp.gate": ("mlp.gate_proj", "ffn_gate"),
    "mlp.up": ("mlp.up_proj", "ffn_up"),
    "mlp.down": ("mlp.down_proj", "ffn_down"),
    "mlp.router": ("mlp.gate", "ffn_gate_inp"),
    "mlp.experts": ("mlp.experts", ""),
    "mlp.experts_gate": ("mlp.experts.{}.gate_proj", "ffn_gate_exps"),
    "mlp.experts_up": ("mlp.experts.{}.up_proj", "ffn_up_exps"),
    "mlp.experts_down": ("mlp.experts.{}.down_proj", "ffn_down_exps"),
    "mlp.shared_router": ("mlp.shared_expert_gate", "ffn_gate_inp_shexp"),
    "mlp.shared_gate": ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    "mlp.shared_up": ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    "mlp.shared_down": ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
}
HF_NAMES = {name: hf for name, (hf, _) in _NAMES.items()}
"""Names in the layout of transformers."""
GGUF_NAMES = {name: gguf for name, (_, gguf) in _NAMES.items()}
"""Names in GGUF files."""
POST_NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
"""transformers' names in families with norms after attention and MLP."""
