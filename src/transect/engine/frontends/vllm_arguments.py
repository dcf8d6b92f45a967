"""Translation of vLLM's ``LLM`` constructor arguments to those of ``EngineConfig``.

Programs written for vLLM pass arguments that mean nothing here, or that mean something only for some values. The first
are dropped, the second are dropped or translated; a value that this engine cannot do is refused, never ignored.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...spec.settings import nearest, settings_of
from ..config import EngineConfig

MEANS_NOTHING = frozenset(
    (
        "allowed_local_media_path",
        "allowed_media_domains",
        "disable_custom_all_reduce",
        "disable_log_requests",
        "disable_log_stats",
        "guided_decoding_backend",
        "lora_dtype",
        "max_seq_len_to_capture",
        "swap_space",
        "trust_remote_code",
        "use_v2_block_manager",
    )
)
"""Arguments without effect for any value: the things that they permit or tune do not exist here. No code of a model
ever runs."""

NOTHING: dict[str, tuple[Any, ...]] = {
    "compilation_config": (None, {}),
    "convert": (None, "auto", "none"),
    "distributed_executor_backend": (None, "uni", "mp", "external_launcher"),
    "download_dir": (None,),
    "enable_chunked_prefill": (None, True),
    "hf_config_path": (None,),
    "hf_overrides": (None, {}),
    "hf_token": (None,),
    "limit_mm_per_prompt": (None, {}),
    "logits_processors": (None, []),
    "mm_processor_kwargs": (None, {}),
    "pooler_config": (None,),
    "runner": (None, "auto", "generate"),
    "skip_tokenizer_init": (None, False),
    "task": (None, "auto", "generate"),
    "tokenizer_mode": (None, "auto", "hf"),
}
"""Arguments, each with the values at which it has no effect."""


def engine_settings(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Convert arguments, vLLM's among them, to fields of ``EngineConfig``.

    Raises:
        ValueError: an argument asks for what this engine cannot do.
        TypeError: there is no such argument; the message names the nearest.
    """
    known = {each.name: each for each in settings_of(EngineConfig)}
    other_names = {also: each for each in known.values() for also in each.about.also}
    settings: dict[str, Any] = {}
    for name, value in arguments.items():
        setting = known.get(name) or other_names.get(name)
        if setting is not None:
            if value is not None or setting.optional:
                settings[setting.name] = value  # None is what any other setting is if left out
        elif name == "gpu":
            settings[name] = value
        elif name in EngineConfig.REPLACED:
            raise TypeError(f"{name} was removed: give {EngineConfig.REPLACED[name]}")
        elif name in NOTHING:
            if not any(type(value) is type(nothing) and value == nothing for nothing in NOTHING[name]):
                allowed = " or ".join(repr(nothing) for nothing in NOTHING[name] if nothing is not None) or "None"
                raise ValueError(f"{name}={value!r} is not possible here: leave it out, or give {allowed}")
        elif name == "enforce_eager":
            if value:
                settings.setdefault("cuda_graphs", "off")
        elif name == "max_logprobs":
            _check_logprobs(value)
        elif name not in MEANS_NOTHING:
            raise TypeError(f"there is no setting {name!r}{nearest(name, known)}")
    if settings.get("load_format") in ("safetensors", "hf", "gguf"):
        settings["load_format"] = "auto"  # which it is shows in the files
    return settings


def _check_logprobs(value: Any) -> None:
    from ..scheduling.sampling_params import MAX_LOGPROBS

    if not isinstance(value, int) or not 0 <= value <= MAX_LOGPROBS:
        raise ValueError(f"max_logprobs={value!r} is not possible here: requests may ask for up to {MAX_LOGPROBS}")
