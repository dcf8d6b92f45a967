"""``ModelConfig`` from and to a Hugging Face ``config.json``.

The keys are those of the family's record (``families/``). Missing keys take the defaults that transformers gives them
for the family, since real files leave them out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from .families.family import configured
from .families.registry import family, is_known
from .fields import Fields, read_json_object
from .model import ModelConfig
from .numbers.registry import check_method

_WHOLE_MODEL = ("bos_token_id", "eos_token_id", "tie_word_embeddings", "quantization_config")
"""Keys that a model of several parts has outside of its parts."""


def from_hf(config: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> ModelConfig:
    """Read a Hugging Face ``config.json`` (old and new spelling of rope parameters).

    ``generation`` is ``generation_config.json`` if there is one: end-of-sequence tokens that only it lists count too.

    Raises:
        ValueError: an unsupported architecture or setting, or a key that is missing or of the wrong type.
    """
    config = text_part(config)
    record = family(config.get("model_type"))
    if config.get("quantization_config") is not None:
        check_method(config["quantization_config"])
    read = Fields(config)
    found = dict(record.fixed)
    for part in record.hf:
        found |= part.read(read, found)
    bos, eos = read.token_ids("bos_token_id"), read.token_ids("eos_token_id")
    more = Fields(generation or {}, "generation_config.json").token_ids("eos_token_id")
    return configured(
        found
        | {
            "architecture": record.name,
            "vocab_size": read.integer("vocab_size"),
            "bos_token_id": bos[0] if bos else None,
            "eos_token_ids": tuple(dict.fromkeys(eos + more)),
        }
    )


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the configuration of the language model in one that has other parts too (Gemma 3 of 4B and more, Llama
    4)."""
    own = config.get("text_config")
    if is_known(config.get("model_type")) or not isinstance(own, Mapping) or not is_known(own.get("model_type")):
        return config
    outer = {key: config[key] for key in _WHOLE_MODEL if key in config and own.get(key) is None}
    return dict(family(own["model_type"]).text_defaults) | dict(own) | outer


def from_hf_directory(directory: str | Path) -> ModelConfig:
    """Read ``config.json`` and, if present, ``generation_config.json`` of a model directory; errors as ``from_hf``, and
    for files that are missing or damaged."""
    directory = Path(directory)
    try:
        config = read_json_object(directory / "config.json")
    except FileNotFoundError:
        raise ValueError(f"{directory} has no config.json: give a directory in Hugging Face layout") from None
    path = directory / "generation_config.json"
    return from_hf(config, read_json_object(path) if path.exists() else None)


def to_hf(config: ModelConfig) -> dict[str, Any]:
    """Return the ``config.json`` that transformers, vLLM and ``from_hf`` read back as this model.

    Raises:
        ValueError: its architecture cannot express it (say, a Llama with biases on q, k and v alone).
    """
    record = family(config.architecture)
    eos = config.eos_token_ids
    values: dict[str, Any] = {
        "model_type": record.name,
        "architectures": [record.hf_class],
        "vocab_size": config.vocab_size,
        "bos_token_id": config.bos_token_id,
        "eos_token_id": eos[0] if len(eos) == 1 else list(eos) or None,
        **record.hf_written,
    }
    for part in record.hf:
        values |= part.write(config)
    read = from_hf(values)
    if read != config:
        lost = [f.name for f in fields(config) if getattr(read, f.name) != getattr(config, f.name)]
        raise ValueError(
            f"config.json of architecture {config.architecture!r} cannot express this model's {', '.join(lost)}; "
            "save it as another architecture or keep its original files"
        )
    return values
