"""Phi-3 and Phi-4: q, k and v are one matrix of a file, and so are gate and up."""

from .config_json import sizes
from .family import Family, key
from .gguf_keys import window

_JOINED = {f"attention.{name}": "self_attn.qkv_proj" for name in "qkv"}
_JOINED |= {f"mlp.{name}": "mlp.gate_up_proj" for name in ("gate", "up")}

PHI3 = Family(
    name="phi3",
    models="Phi-3 (4k), Phi-4",
    hf_class="Phi3ForCausalLM",
    hf=(*sizes(max_position=4096, eps=1e-5), key("sliding_window", "sliding_window", optional=True)),
    hf_written={"pad_token_id": None},
    gguf="phi3",
    gguf_parts=(window(zero=True),),
    hf_names=_JOINED,
    joined=("qkv", "gate_up"),
    tiny={"pad_token_id": 0},
)
