"""SmolLM3: every fourth layer does not rotate; with a window those layers use it."""

from ..fields import Fields
from .config_json import ATTENTION_BIAS, NO_ROPE_LAYERS, sizes, windows
from .family import Family, Found
from .gguf_keys import STILL


def _rotating(read: Fields, found: Found) -> tuple[int, ...]:
    return tuple(layer for layer in range(found["n_layers"]) if layer not in found["no_rope_layers"])


SMOLLM3 = Family(
    name="smollm3",
    models="SmolLM3",
    hf_class="SmolLM3ForCausalLM",
    hf=(*sizes(kv_heads=4, tied=True, theta=2e6), ATTENTION_BIAS, NO_ROPE_LAYERS, windows(_rotating)),
    hf_written={"pad_token_id": None},
    gguf="smollm3",
    gguf_parts=(STILL,),
    gguf_paired=True,
    tiny={"no_rope_layers": [1, 0, 1], "pad_token_id": 0},
)
