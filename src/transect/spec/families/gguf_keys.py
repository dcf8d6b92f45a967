"""GGUF metadata that several families have: windows, scales, and facts that llama.cpp assumes."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from ..fields import Fields
from ..model import ModelConfig
from .family import Found, Part, value_of

_WINDOW, _PATTERN = "attention.sliding_window", "attention.sliding_window_pattern"


def granted(name: str, value: Any, words: str) -> Part:
    """Build a field that llama.cpp assumes and files do not contain.

    Args:
        value: the field, or a function of the other fields.
        words: a name for other values, for the error; ``{}`` stands for this one.
    """

    def write(config: ModelConfig) -> Found:
        own = value({each.name: getattr(config, each.name) for each in fields(config)}) if callable(value) else value
        found = value_of(config, name)
        near = isinstance(own, float) and found is not None and abs(found - own) < 1e-6
        return expect(config, near or found == own, words.format(own))

    return Part(lambda read, found: {name: value(found) if callable(value) else value}, write)


def only(name: str, value: Any, words: str) -> Part:
    """Build a check of a field that is read elsewhere and that llama.cpp runs with this value only."""
    return Part(write=granted(name, value, words).write)


def written(name: str, field: str) -> Part:
    """Build a key for other programs, of a field that is read elsewhere."""
    return Part(write=lambda config: {name: value_of(config, field)})


def expect(config: ModelConfig, known: bool, words: str) -> Found:
    """Return no keys. Raises ValueError for a model that llama.cpp does not support."""
    if not known:
        raise ValueError(f"a {config.architecture} model with {words} cannot be written as GGUF: llama.cpp has no such")
    return {}


def short_float(value: float) -> float:
    """Return the shortest decimal that is this float32 number: 1e-05 for the file's 9.999999747378752e-06."""
    return float(f"{value:.7g}")


def window(zero: bool = False) -> Part:
    """Build the key of a sliding window of all layers. ``zero``: a file without one has a 0."""

    def write(config: ModelConfig) -> Found:
        expect(config, not config.full_attention_layers, "a sliding window of some layers")
        return {_WINDOW: config.sliding_window or 0} if zero or config.sliding_window else {}

    return Part(lambda read, found: {"sliding_window": read.integer(_WINDOW, 0) or None}, write)


def sliding(period: int, default: int) -> Part:
    """Build the keys of a sliding window of all layers but every ``period``-th, if the file has no list; ``default``:
    the window."""

    def read(read: Fields, found: Found) -> Found:
        size, layers, pattern = read.integer(_WINDOW, default), found["n_layers"], read.value(_PATTERN)
        if not size:
            return {"sliding_window": None}
        if not isinstance(pattern, list):
            step = read.integer(_PATTERN, period)
            full = tuple(range(step - 1, layers, step)) if step else ()
        elif len(pattern) == layers and all(isinstance(slides, (bool, int)) for slides in pattern):
            full = tuple(layer for layer, slides in enumerate(pattern) if not slides)
        else:
            raise ValueError(f"{_PATTERN!r} in the GGUF metadata must say true or false for each of {layers} layers")
        return {"sliding_window": size, "full_attention_layers": full}

    def write(config: ModelConfig) -> Found:
        full, layers = config.full_attention_layers, config.n_layers
        values = {_WINDOW: config.sliding_window or 0}
        usual = config.sliding_window is None or full == tuple(range(period - 1, layers, period))
        return values if usual else values | {_PATTERN: [layer not in full for layer in range(layers)]}

    return Part(read, write)


EXPERT_WIDTH = written("expert_feed_forward_length", "moe.expert_dim")
ALL_SPARSE = only("moe.dense_layers", (), "layers without experts")
SUM_TO_1 = granted("moe.renormalize", True, "weights of experts that do not add up to 1")
SUM_TO_LESS = granted("moe.renormalize", False, "weights of experts that add up to 1")
STILL = granted(
    "no_rope_layers", lambda found: tuple(range(3, found["n_layers"], 4)), "other layers that rotate than three of four"
)
"""Layers that do not rotate: every fourth."""
