"""Objectives of a run: each makes its micro-batches and their loss; the trainer's loop is the same for all.

* ``base.py``: what the loop asks of an objective. ``next_token.py``: pretraining and fine-tuning.
* ``dpo.py``, ``orpo.py``: preference pairs. ``kto.py``: answers that are good or bad. ``preferences.py``: what these
  share; ``examples.py``: their data.
* ``grpo.py``: reinforcement learning from rewards. ``rollout.py``: answers drawn by the engine,
  ``adapter_engine.py``: by one that takes a LoRA as an adapter; ``logprobs.py``: their log-probabilities;
  ``drawn.py``: in the distribution that drew them; ``rewards.py``: rewards; ``answers.py``: the batches of several
  optimizer steps; ``reference.py``: the model as the run began.
* ``distill.py``: the distribution of a larger model; ``divergence.py``: distances between two.
* ``eagle3.py``: a head that drafts for a frozen model; ``head_loss.py``: its loss,
  ``draft_attention.py``: with its attention.
* ``loss.py``: the fused loss; ``balance.py``: losses that keep experts busy; ``share.py``: parts of an evaluation that
  ranks share.
"""

from __future__ import annotations

from importlib import import_module

from ..config import TrainConfig
from ..config.objectives import objective_kind
from ..model.build import Trainable
from .base import Objective

CLASSES = {
    "next_token": "NextToken",
    "dpo": "DPO",
    "orpo": "ORPO",
    "kto": "KTO",
    "grpo": "GRPO",
    "distill": "Distillation",
}
"""Objectives whose settings are in ``train/config/objectives.py``; others have a record (``ObjectiveKind``)."""


def build(config: TrainConfig, trainable: Trainable) -> Objective:
    """Build the objective that ``config`` names, and load its data.

    Raises:
        ValueError: the data cannot be read or does not fit the objective.
    """
    kind = objective_kind(config.objective)
    if kind is not None:
        made: Objective = kind.make(config, trainable)
        return made
    made = getattr(import_module(f".{config.objective}", __name__), CLASSES[config.objective])(config, trainable)
    return made
