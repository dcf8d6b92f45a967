"""``Family``: the record of a family of models, without a tensor; ``Part``: some of its keys in a file, both ways."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from ..fields import Fields
from ..model import ModelConfig
from ..moe import MoEConfig

Found = Mapping[str, Any]
"""Fields of ``ModelConfig`` read so far, by name (experts' fields begin with ``moe.``); or keys to write."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some fields of ``ModelConfig``, read from keys of a file, and the keys written from them. Both raise ValueError
    for what is not supported."""

    read: Callable[[Fields, Found], Found] = lambda read, found: {}
    write: Callable[[ModelConfig], Found] = lambda config: {}


_TYPES = {each.name: str(each.type) for each in fields(ModelConfig)}
_TYPES |= {f"moe.{each.name}": str(each.type) for each in fields(MoEConfig)}
_READERS: dict[str, Callable[..., Any]] = {"int": Fields.integer, "float": Fields.number, "bool": Fields.flag}


def key(
    field: str, name: str, default: Any = None, *, also: str = "", others: tuple[str, ...] = (), optional: bool = False
) -> Part:
    """Build a part of one key: a number or a switch, of the field's type.

    Args:
        default: the value without the key, or a function of the fields read so far. Without a default the key is
            needed.
        also: a second field of the same value.
        others: names of the key in other files.
        optional: the field may be None, as ``null`` in a file says, and a key without a default may be missing.
    """

    def read(read: Fields, found: Found) -> Found:
        there = next((each for each in (name, *others) if read.has(each)), name)
        missing = default(found) if callable(default) else default
        if optional and (read.is_null(there) or (missing is None and not read.has(there))):
            value = None
        else:
            value = _READERS[_TYPES[field].split()[0]](read, there, missing)
        return {field: value, also: value} if also else {field: value}

    return Part(read, lambda config: {name: value_of(config, field)})


def refusal(name: str, known: Callable[[Any], bool], words: str) -> Part:
    """Build a check of a key without a field: ``known`` returns True for supported values (None without the key);
    ``words`` is the error for others."""

    def read(read: Fields, found: Found) -> Found:
        if not known(read.value(name)):
            raise ValueError(words)
        return {}

    return Part(read)


def value_of(config: ModelConfig, name: str) -> Any:
    """Return a field of a model, or of its experts (``moe.``); None if there are no experts."""
    return getattr(config.moe, name[4:], None) if name.startswith("moe.") else getattr(config, name)


def configured(values: Found) -> ModelConfig:
    """Build the configuration of these fields. Raises ValueError if they cannot run together."""
    own = {name: value for name, value in values.items() if not name.startswith("moe.")}
    experts = {name[4:]: value for name, value in values.items() if name.startswith("moe.")}
    return ModelConfig(**own, moe=MoEConfig(**experts) if "experts" in experts else None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """All facts of one family of models that are not the code of its operators."""

    name: str
    """``model_type`` of config.json, and ``ModelConfig.architecture``."""
    models: str
    """Published models, for the docs."""
    hf_class: str
    """Class of transformers in ``architectures`` of config.json."""
    hf: tuple[Part, ...]
    """Keys of config.json."""
    fixed: Mapping[str, Any] = field(default_factory=dict)
    """Fields of ``ModelConfig`` that no key sets (``moe.`` before those of experts)."""
    other_names: tuple[str, ...] = ()
    """Other values of ``model_type``."""
    hf_written: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json for other programs, which are not read."""
    text_defaults: Mapping[str, Any] = field(default_factory=dict)
    """Values that files of a model of several parts leave out."""
    gguf: str = ""
    """``general.architecture`` of its GGUF files; empty if it has none."""
    gguf_parts: tuple[Part, ...] = ()
    """Keys of GGUF files beside those of all families, without the leading architecture."""
    gguf_if: Callable[[Fields], bool] | None = None
    """Test that distinguishes its files from those of other families with the same architecture; None for all remaining
    files."""
    hf_names: dict[str, str] = field(default_factory=dict)
    """Names of tensors in safetensors, overriding ``HF_NAMES``."""
    gguf_names: dict[str, str] = field(default_factory=dict)
    """Names of tensors in GGUF files, overriding ``GGUF_NAMES``."""
    joined: tuple[str, ...] = ()
    """Projections that are one matrix in files."""
    hf_transposed: bool = False
    """True if matrices are stored ``[inputs, outputs]`` in safetensors (GPT-2's ``Conv1D``)."""
    hf_stacked: Literal["turns", "halves"] | None = None
    """Arrangement of gate and up if safetensors have the experts of a layer in one tensor: alternating rows
    (``turns``), or all of gate before those of up (``halves``); None if each expert is a tensor."""
    hf_paired: bool = False
    """True if rotary embedding turns neighbouring pairs in safetensors, not the two halves of a head."""
    gguf_paired: bool = False
    """True if rotary embedding turns neighbouring pairs in GGUF files."""
    presets: Mapping[str, tuple[str, ModelConfig]] = field(default_factory=dict)
    """Published models by a short name: the Hub id of the weights, and the configuration."""
    tiny: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json of the tiny test model, overriding ``TINY``; lists are for its three layers."""


TINY = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""Sizes of a family's tiny test model, as keys of config.json."""
