"""Granite 3: factors of embeddings, residuals, scores and logits."""

from collections.abc import Callable

from ..fields import Fields
from .config_json import ATTENTION_BIAS, MLP_BIAS, sizes
from .family import Family, Found, Part, key, refusal
from .gguf_keys import short_float

_STILL = "the GGUF file holds a Granite without rotary positions, which is not supported"


def _logits(read: Fields, found: Found) -> Found:
    divisor = read.number("logits_scaling", 1.0)
    if divisor <= 0:
        raise ValueError(f"'logits_scaling' in config.json must be greater than 0, not {divisor}")
    return {"logit_scale": 1.0 / divisor}


def _gguf(field: str, name: str, default: Callable[[Found], float] = lambda found: 1.0) -> Part:
    """Build the key of a factor; a file without it, or with 0, means the default."""
    return Part(
        lambda read, found: {field: short_float(read.number(name, 0.0)) or default(found)},
        lambda config: {name: getattr(config, field)},
    )


GRANITE = Family(
    name="granite",
    models="Granite 3",
    hf_class="GraniteForCausalLM",
    hf=(
        *sizes(max_position=2048),
        ATTENTION_BIAS,
        MLP_BIAS,
        key("embed_scale", "embedding_multiplier", 1.0),
        key("residual_scale", "residual_multiplier", 1.0),
        key("query_scale", "attention_multiplier", 1.0),
        Part(_logits, lambda config: {"logits_scaling": 1.0 / config.logit_scale}),
    ),
    gguf="granite",
    gguf_parts=(
        refusal("rope.scaling.finetuned", lambda value: value is not False, _STILL),
        _gguf("embed_scale", "embedding_scale"),
        _gguf("residual_scale", "residual_scale"),
        Part(
            _gguf("query_scale", "attention.scale", lambda found: found["head_dim"] ** -0.5).read,
            lambda config: {"attention.scale": config.attention_scale},
        ),
        Part(
            lambda read, found: {"logit_scale": 1.0 / (short_float(read.number("logit_scale", 0.0)) or 1.0)},
            lambda config: {"logit_scale": 1.0 / config.logit_scale},
        ),
    ),
    gguf_paired=True,
    tiny={"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.6, "attention_multiplier": 0.4},
)
