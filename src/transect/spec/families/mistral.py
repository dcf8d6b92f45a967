"""Mistral 7B, Nemo, Small; Ministral, whose ``layer_types`` list the layers with a sliding window. GGUF files call it
``llama``."""

from ..fields import Fields
from .config_json import full_layers, layer_types, sizes
from .family import Family, Found, Part, key
from .gguf_keys import window


def _full(read: Fields, found: Found) -> Found:
    listed = found["sliding_window"] is not None and read.has("layer_types")
    return {"full_attention_layers": full_layers(read, found["n_layers"])} if listed else {}


MISTRAL = Family(
    name="mistral",
    models="Mistral 7B, Nemo, Small, Ministral",
    hf_class="MistralForCausalLM",
    other_names=("ministral",),
    hf=(
        *sizes(kv_heads=8, max_position=131072),
        key("sliding_window", "sliding_window", 4096, optional=True),
        Part(_full, lambda config: {"layer_types": layer_types(config)} if config.full_attention_layers else {}),
    ),
    gguf="llama",
    gguf_if=lambda read: bool(read.integer("attention.sliding_window", 0) and not read.integer("expert_count", 0)),
    gguf_parts=(window(),),
    gguf_paired=True,
    tiny={"sliding_window": 9},
)
