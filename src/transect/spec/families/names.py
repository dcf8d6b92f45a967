"""Names of tensors in files, by canonical name; a family's record has those that differ.

``layers`` is the name of the stack, ``mlp.experts`` that of experts that are one tensor. ``{}`` stands for the number
of an expert that is a tensor of its own.
"""

from __future__ import annotations

HF_NAMES = {
    "embed": "model.embed_tokens",
    "norm": "model.norm",
    "head": "lm_head",
    "layers": "model.layers",
    "attention": "self_attn",
    "attention_norm": "input_layernorm",
    "attention.q": "self_attn.q_proj",
    "attention.k": "self_attn.k_proj",
    "attention.v": "self_attn.v_proj",
    "attention.o": "self_attn.o_proj",
    "attention.q_norm": "self_attn.q_norm",
    "attention.k_norm": "self_attn.k_norm",
    "mlp_norm": "post_attention_layernorm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp.router": "mlp.gate",
    "mlp.experts": "mlp.experts",
    "mlp.experts_gate": "mlp.experts.{}.gate_proj",
    "mlp.experts_up": "mlp.experts.{}.up_proj",
    "mlp.experts_down": "mlp.experts.{}.down_proj",
    "mlp.shared_router": "mlp.shared_expert_gate",
    "mlp.shared_gate": "mlp.shared_experts.gate_proj",
    "mlp.shared_up": "mlp.shared_experts.up_proj",
    "mlp.shared_down": "mlp.shared_experts.down_proj",
}
"""Names in the layout of transformers."""
POST_NORMS = {
    "attention_post_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_post_norm": "post_feedforward_layernorm",
}
"""transformers' names in families with norms after attention and MLP."""

GGUF_NAMES = {
    "embed": "token_embd",
    "position_embed": "position_embd",
    "norm": "output_norm",
    "head": "output",
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
"""Names in GGUF files."""
