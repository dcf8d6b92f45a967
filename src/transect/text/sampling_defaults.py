"""Sampling settings that a model's makers recommend, used for parameters that a request leaves unset.

They come from ``generation_config.json`` (the keys that transformers and vLLM read there), or from the
``general.sampling.*`` keys of a GGUF file, which llama.cpp reads; values given by hand go over both.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .hf_settings import read_object

if TYPE_CHECKING:
    from ..checkpoints.resolve import ModelSource

FIELDS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""Fields of ``SamplingParams`` that have the same names in generation_config.json."""
LONGEST = "max_new_tokens"
ENDS = "eos_token_id"

GGUF_KEYS = {
    "general.sampling.temp": "temperature",
    "general.sampling.top_p": "top_p",
    "general.sampling.top_k": "top_k",
    "general.sampling.min_p": "min_p",
    "general.sampling.penalty_repeat": "repetition_penalty",
}
NONE = ("none", "vllm")
"""Values of ``generation_config`` that ignore the model's defaults; the second is vLLM's."""


@dataclass(frozen=True)
class SamplingDefaults:
    """Sampling defaults of one model.

    Attributes:
        values: fields of ``SamplingParams`` that requests do not have to give.
        max_new_tokens: most tokens of an answer; None for no limit.
        eos_token_ids: further tokens that end an answer.
        origin: source of the defaults, for messages.
    """

    values: Mapping[str, int | float] = field(default_factory=dict)
    max_new_tokens: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    origin: str = ""

    def __str__(self) -> str:
        """Return a phrase for the start-up line; empty without defaults."""
        shown = dict(self.values)
        if self.max_new_tokens is not None:
            shown[LONGEST] = self.max_new_tokens
        if not shown:
            return ""
        return f"sampling defaults {', '.join(f'{name}={value:g}' for name, value in shown.items())} ({self.origin})"

    def limit(self, max_tokens: int | None) -> int | None:
        """Return ``max_tokens``, or ``max_new_tokens`` if that is less."""
        given = [value for value in (max_tokens, self.max_new_tokens) if value is not None]
        return min(given, default=None)


def sampling_defaults(
    source: ModelSource, generation_config: str = "auto", override: Mapping[str, Any] | None = None
) -> SamplingDefaults:
    """Return the defaults of a resolved model.

    Args:
        generation_config: ``auto``: as the model's own files say; ``none``: nothing; or a folder with a
            generation_config.json, or such a file.
        override: keys of generation_config.json that go over it.

    Raises:
        ValueError: there is no such file, it is damaged, or it holds a value of the wrong kind.
    """
    origin, values = _found(source, generation_config)
    if override:
        allowed = (*FIELDS, LONGEST, ENDS)
        unknown = [name for name in override if name not in allowed]
        if unknown:
            raise ValueError(
                f"override_generation_config has no key {unknown[0]!r}; it takes {', '.join(allowed[:-1])} and {ENDS}"
            )
        values = {**values, **{name: value for name, value in override.items() if value is not None}}
        origin = " and ".join(filter(None, (origin, "override_generation_config")))
    try:
        return _checked(values, origin)
    except ValueError as error:
        raise ValueError(f"{origin}: {error}; correct it, or start with generation_config none") from None


def _found(source: ModelSource, generation_config: str) -> tuple[str, dict[str, Any]]:
    """Return (origin, values by key of generation_config.json)."""
    if generation_config in NONE:
        return "", {}
    if generation_config == "auto":
        if source.text_folder is None:
            metadata = source.gguf.metadata
            found = {name: metadata[key] for key, name in GGUF_KEYS.items() if metadata.get(key) is not None}
            return ("the GGUF file" if found else ""), {name: _plain(value) for name, value in found.items()}
        path = source.text_folder / "generation_config.json"
        path = path if path.is_file() else source.path / "generation_config.json"
        return ("generation_config.json" if path.is_file() else ""), _known(read_object(path))
    path = Path(generation_config).expanduser()
    path = path / "generation_config.json" if path.is_dir() else path
    if not path.is_file():
        raise ValueError(
            f"generation_config {generation_config!r} is neither auto, none, nor a folder with a generation_config.json"
        )
    return str(path), _known(read_object(path))


def _known(values: dict[str, Any]) -> dict[str, Any]:
    return {name: values[name] for name in (*FIELDS, LONGEST, ENDS) if values.get(name) is not None}


def _plain(value: Any) -> Any:
    """Convert a numpy number to a Python number; a float32 by its shortest decimal form."""
    value = value.item() if hasattr(value, "item") else value
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _checked(values: Mapping[str, Any], origin: str) -> SamplingDefaults:
    sampling: dict[str, int | float] = {}
    for name in FIELDS:
        value = values.get(name)
        if value is None:
            continue
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ValueError(f"{name} must be a finite number, got {value!r}")
        sampling[name] = int(value) if name == "top_k" else value
    longest = values.get(LONGEST)
    if longest is not None and (isinstance(longest, bool) or not isinstance(longest, int) or longest < 1):
        raise ValueError(f"{LONGEST} must be a whole number of at least 1, got {longest!r}")
    ends = values.get(ENDS)
    ends = [] if ends is None else ends if isinstance(ends, list) else [ends]
    if not all(isinstance(end, int) and not isinstance(end, bool) and end >= 0 for end in ends):
        raise ValueError(f"{ENDS} must be a token id or a list of them, got {values[ENDS]!r}")
    return SamplingDefaults(sampling, longest, tuple(ends), origin)
