"""What a run minimises: each objective makes its micro-batches and their loss; the trainer's loop is the same for all.

* ``base.py``: what the loop asks of an objective. ``next_token.py``: pretraining and fine-tuning.
* ``dpo.py``: preference pairs. ``grpo.py``: reinforcement learning from rewards, with rollouts by the engine.
"""

from __future__ import annotations

from ..config import TrainConfig
from ..model import Trainable
from .base import Objective


def build(config: TrainConfig, trainable: Trainable) -> Objective:
    """The objective that ``config`` names, with its data loaded.

    Raises:
        ValueError: the data cannot be read or does not fit the objective.
    """
    if config.objective == "dpo":
        from .dpo import DPO

        return DPO(config, trainable)
    if config.objective == "grpo":
        from .grpo import GRPO

        return GRPO(config, trainable)
    if config.objective != "next_token":
        raise ValueError(f'objective = "{config.objective}" is not built yet')
    from .next_token import NextToken

    return NextToken(config, trainable)
