"""``HeadConfig``: an EAGLE-3 head, from and to the ``config.json`` of published checkpoints (Li et al. 2025,
arXiv:2503.01840).

A head is one decoder layer that reads hidden states of three places in a larger model, its *target*. The keys are those
of a Llama with one layer, and:

* ``draft_vocab_size``: tokens that the head can draw; the target's vocabulary if missing.
* ``target_hidden_size``: width of the target; that of the head if missing.
* ``norm_before_residual``: the normalised features, not the features, continue along the residual stream.
* the places in the target. ``eagle_config.eagle_aux_hidden_state_layer_ids`` counts layers whose *outputs* are read, as
  SGLang and SpecForge do; ``eagle_aux_hidden_state_layer_ids`` counts layers whose *inputs* are read, as vLLM does.
  Without either, the inputs of layers 2, n // 2 and n - 3 of n.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from .fields import Fields
from .hf import from_hf, to_hf
from .model import ModelConfig

ARCHITECTURES = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "LlamaForCausalLM")
"""Names of published heads; the last one is a head's only with ``draft_vocab_size``."""
IDS = "eagle_aux_hidden_state_layer_ids"
_UNKNOWN = ("norm_before_fc", "fc_norm", "norm_output")
"""Switches of variants that are not supported."""


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """An EAGLE-3 head.

    Attributes:
        model: its one layer, with the vocabulary of the target.
        draft_vocab_size: tokens that it can draw.
        target_dim: width of the target's hidden states.
        layers: layers of the target whose inputs it reads, ascending; None for the default of the target's depth.
        norm_before_residual: the normalised features continue along the residual stream.
    """

    model: ModelConfig
    draft_vocab_size: int
    target_dim: int
    layers: tuple[int, ...] | None = None
    norm_before_residual: bool = False

    def layers_of(self, target: ModelConfig) -> tuple[int, ...]:
        """Return the layers of ``target`` whose inputs the head reads.

        Raises:
            ValueError: ``target`` has no such layers.
        """
        found = default_layers(target.n_layers) if self.layers is None else self.layers
        if list(found) != sorted(set(found)) or not all(0 < layer < target.n_layers for layer in found):
            raise ValueError(
                f"the head reads the inputs of layers {', '.join(map(str, found))}, and the model has layers 1 to "
                f"{target.n_layers - 1} between its first and its last state: give three ascending numbers of these "
                f"in {IDS} of the head's config.json"
            )
        return found


def default_layers(n_layers: int) -> tuple[int, ...]:
    """Return the layers whose inputs heads read by default: a low, a middle and a high one. In models of fewer than
    eight layers, where those would meet, the layers are spread evenly."""
    if n_layers >= 8:
        return 2, n_layers // 2, n_layers - 3
    spread = {round(part * (n_layers - 1) / 3) for part in (1, 2, 3)}
    return tuple(sorted(layer for layer in spread if layer > 0))


def is_head(config: Mapping[str, Any]) -> bool:
    """Return True if a ``config.json`` is that of an EAGLE-3 head."""
    names = config.get("architectures") or ()
    named = any("eagle3" in str(name).lower() for name in names)
    return named or (config.get("num_hidden_layers") == 1 and config.get("draft_vocab_size") is not None)


def head_from_json(config: Mapping[str, Any]) -> HeadConfig:
    """Read a head's ``config.json``.

    Raises:
        ValueError: another architecture, an unsupported variant, or a key that is missing or of the wrong type.
    """
    names = [str(name) for name in config.get("architectures") or ()]
    if not is_head(config) or not set(names) & set(ARCHITECTURES):
        raise ValueError(
            f"method eagle3 takes heads of the architecture {ARCHITECTURES[0]}, and this config.json is of "
            f"{', '.join(names) or 'none'}: give a head's directory or hub id in model"
        )
    if config.get("num_hidden_layers", 1) != 1:
        raise ValueError(f"the head has {config['num_hidden_layers']} layers; heads of one layer are supported")
    eagle = config.get("eagle_config") or {}
    for name in _UNKNOWN:
        if config.get(name) or eagle.get(name):
            raise ValueError(f"the head's config.json sets {name}, which is not supported: take a head without it")
    if eagle.get("use_aux_hidden_state") is False:
        raise ValueError("the head reads one hidden state (use_aux_hidden_state is false); heads of EAGLE-3 read three")
    model = replace(from_hf({**config, "model_type": "llama", "num_hidden_layers": 1}), tied_embeddings=False)
    read = Fields(config)
    return HeadConfig(
        model=model,
        draft_vocab_size=read.integer("draft_vocab_size", model.vocab_size, low=1),
        target_dim=read.integer("target_hidden_size", model.dim, low=1),
        layers=_layers(config, eagle),
        norm_before_residual=bool(config.get("norm_before_residual", eagle.get("norm_before_residual", False))),
    )


def head_to_json(head: HeadConfig) -> dict[str, Any]:
    """Return the ``config.json`` of a head, as vLLM, SGLang and ``head_from_json`` read it."""
    values = to_hf(head.model) | {
        "architectures": [ARCHITECTURES[0]],
        "num_hidden_layers": 1,
        "tie_word_embeddings": False,
        "draft_vocab_size": head.draft_vocab_size,
    }
    if head.target_dim != head.model.dim:
        values["target_hidden_size"] = head.target_dim
    if head.norm_before_residual:
        values["norm_before_residual"] = True
    if head.layers is not None:
        values["eagle_config"] = {IDS: [layer - 1 for layer in head.layers], "use_aux_hidden_state": True}
    return values


def _layers(config: Mapping[str, Any], eagle: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Read the layers whose inputs are read."""
    for values, shift in ((config.get(IDS), 0), (eagle.get(IDS), 1)):
        if not values:
            continue
        if not isinstance(values, list) or not all(type(value) is int for value in values):
            raise ValueError(f"{IDS} of the head's config.json must be a list of layer numbers, not {values!r}")
        return tuple(value + shift for value in values)
    return None
