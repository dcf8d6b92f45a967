"""OLMo 2: norms after attention and MLP, before they are added."""

from .config_json import ATTENTION_BIAS, sizes
from .family import Family, refusal
from .names import POST_NORMS

_OLMO3 = "the GGUF file holds an OLMo 3, whose layers slide; that is not supported, OLMo 2 is"

OLMO2 = Family(
    name="olmo2",
    models="OLMo 2 1B to 32B",
    hf_class="Olmo2ForCausalLM",
    hf=(*sizes(max_position=2048, eps=1e-5), ATTENTION_BIAS),
    fixed={"qk_norm": True, "qk_norm_whole": True, "norm_order": "post"},
    gguf="olmo2",
    gguf_parts=(refusal("attention.sliding_window", lambda value: not value, _OLMO3),),
    hf_names=POST_NORMS,
)
