"""The model that drafts, as the planner counts it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ..checkpoints.resolve import described
from ..engine.scheduling.drafters.registry import SpeculativeConfig
from ..spec.eagle import HeadConfig, head_from_json
from ..spec.fields import read_json_object
from ..spec.model import ModelConfig

HEAD_VOCABULARY = 32000
"""Tokens of a head whose files are not there: as most published ones have."""


def drafting_model(speculation: SpeculativeConfig, target: ModelConfig) -> ModelConfig | None:
    """Return the model that drafts; None if none does. A head counts as a model of one layer with as many numbers.

    Raises:
        ValueError: it is not known, or has another vocabulary than ``target``.
    """
    if not speculation.drafts_by_model:
        return None
    assert speculation.model is not None
    if speculation.reads_model:
        return _head(Path(speculation.model).expanduser(), target)
    found = described(speculation.model).config
    if found.vocab_size != target.vocab_size:
        raise ValueError(
            f"the draft model {speculation.model} has a vocabulary of {found.vocab_size} tokens, and the model one of "
            f"{target.vocab_size}: take a draft model with the same vocabulary"
        )
    return found


def _head(path: Path, target: ModelConfig) -> ModelConfig:
    """Describe a head by its config.json, or one of the width of ``target``."""
    if (path / "config.json").is_file():
        head = head_from_json(read_json_object(path / "config.json"))
    else:
        shape = replace(target, n_layers=1, moe=None, tied_embeddings=False)
        head = HeadConfig(shape, min(HEAD_VOCABULARY, target.vocab_size), target.dim)
    # Its q, k and v have twice the inputs: as many numbers more as a wider MLP has, which has three matrices.
    model = head.model
    more = (model.q_dim + 2 * model.kv_dim) // 3
    return replace(model, vocab_size=head.draft_vocab_size, ffn_dim=model.ffn_dim + more)
