"""Objectives of a run: each makes its micro-batches and their loss; the trainer's loop is the same for all.

* ``base.py``: what the loop asks of an objective. ``next_token.py``: pretraining and fine-tuning.
* ``dpo.py``, ``orpo.py``: preference pairs. ``kto.py``: answers that are good or bad. ``preferences.py``: what these
  share; ``examples.py``: their data.
* ``grpo.py``: reinforcement learning from rewards. ``rollout.py``: answers drawn by the engine; ``logprobs.py``: their
  log-probabilities; ``drawn.py``: in the distribution that drew them; ``rewards.py``: rewards; ``answers.py``: the
  batches of several optimizer steps; ``reference.py``: the model as the run began.
* ``distill.py``: the distribution of a larger model; ``divergence.py``: distances between two.
* ``loss.py``: the fused loss; ``balance.py``: losses that keep experts busy; ``share.py``: parts of an evaluation that
  ranks share.
"""

from __future__ import annotations

from ..config import TrainConfig
from ..model.build import Trainable
from .base import Objective


def build(config: TrainConfig, trainable: Trainable) -> Objective:
    """The objective that ``config`` names, with its data loaded.

    Raises:
        ValueError: the data cannot be read or does not fit the objective.
    """
    if config.objective == "dpo":
        from .dpo import DPO

        return DPO(config, trainable)
    if config.objective == "orpo":
        from .orpo import ORPO

        return ORPO(config, trainable)
    if config.objective == "kto":
        from .kto import KTO

        return KTO(config, trainable)
    if config.objective == "grpo":
        from .grpo import GRPO

        return GRPO(config, trainable)
    if config.objective == "distill":
        from .distill import Distillation

        return Distillation(config, trainable)
    from .next_token import NextToken

    return NextToken(config, trainable)
