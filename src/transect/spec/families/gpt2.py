"""GPT-2: layer norms, learned positions, a plain MLP, matrices stored ``[inputs, outputs]``."""

from .config_json import activation, split_width
from .family import Family, Part, key, refusal
from .gguf_keys import granted

_SCALED = "GPT-2 with scale_attn_weights=false or scale_attn_by_inverse_layer_idx=true is not supported"
_CROSS = "GPT-2 with add_cross_attention=true is not supported: it is not a decoder-only model"

GPT2 = Family(
    name="gpt2",
    models="GPT-2",
    hf_class="GPT2LMHeadModel",
    hf=(
        refusal("scale_attn_weights", lambda value: value in (None, True), _SCALED),
        refusal("scale_attn_by_inverse_layer_idx", lambda value: not value, _SCALED),
        refusal("add_cross_attention", lambda value: not value, _CROSS),
        key("dim", "n_embd", 768, others=("hidden_size",)),
        key("n_layers", "n_layer", 12, others=("num_hidden_layers",)),
        key("n_heads", "n_head", 12, others=("num_attention_heads",)),
        Part(lambda read, found: {"n_kv_heads": found["n_heads"], "head_dim": split_width(found)}),
        key("ffn_dim", "n_inner", lambda found: 4 * found["dim"]),
        key("max_position", "n_positions", 1024, others=("max_position_embeddings",)),
        key("norm_eps", "layer_norm_epsilon", 1e-5),
        activation("activation_function", "gelu_new"),
        key("tied_embeddings", "tie_word_embeddings", True),
    ),
    fixed={
        "norm": "layernorm", "gated_mlp": False, "qkv_bias": True, "o_bias": True, "mlp_bias": True,
        "position": "learned",
    },
    gguf="gpt2",
    gguf_parts=(granted("activation", "gelu_tanh", "an activation other than gelu_new"),),
    hf_names={
        "layers": "transformer.h", "embed": "transformer.wte", "position_embed": "transformer.wpe",
        "norm": "transformer.ln_f", "attention_norm": "ln_1", "attention.q": "attn.c_attn",
        "attention.k": "attn.c_attn", "attention.v": "attn.c_attn", "attention.o": "attn.c_proj", "mlp_norm": "ln_2",
        "mlp.up": "mlp.c_fc", "mlp.down": "mlp.c_proj",
    },
    joined=("qkv",),
    hf_transposed=True,
)  # fmt: skip
