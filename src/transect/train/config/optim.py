"""Configure the optimizer and the learning-rate schedule of a run."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class OptimizerConfig:
    """Optimizer of a run.

    Where a file leaves them out, ``learning_rate`` and ``weight_decay`` are those of the task (``defaults.py``).

    Attributes:
        learning_rate: 3e-4 to pretrain, 2e-5 to fine-tune all weights, 2e-4 for adapters; less for ``dpo``, ``kto``,
            ``orpo`` and ``grpo``.
        beta1, beta2, eps: AdamW's.
        name: ``adamw``, ``adamw8bit``, ``lamb`` (for large batches) or ``muon``; for slow links ``onebit_adam``,
            ``onebit_lamb`` or ``zero_one_adam``. ``adamw8bit`` has moments in 8 bits, by blocks. ``lamb`` scales the
            steps by the norm of each matrix. ``muon`` updates the matrices of the layers by Muon, the rest by AdamW.
            The last three exchange one bit per number between ranks.
        freeze_step: step from which the one-bit optimizers freeze the variance (``onebit_adam``, ``onebit_lamb``: and
            compress). 15 to 25% of a run is usual.
        sync_every: of ``zero_one_adam``: steps between synchronizations of the ranks, from ``freeze_step`` on.
        rounding: rounding of weights and moments in bfloat16: ``stochastic`` keeps small steps on average; ``nearest``
            loses those below 1/512 of a weight.
        weight_decay: decoupled, on matrices only; norms and biases have none. 0.1 to pretrain, 0.01 to fine-tune all
            weights, 0 for adapters.
        clip: largest global norm of the gradient; 0 for none.
        muon_momentum: of ``muon``.
        muon_learning_rate: for the matrices under ``muon``; ``learning_rate`` is AdamW's.
    """

    name: Literal["adamw", "adamw8bit", "lamb", "muon", "onebit_adam", "onebit_lamb", "zero_one_adam"] = "adamw"
    rounding: Literal["stochastic", "nearest"] = "stochastic"
    learning_rate: float = 3e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    muon_learning_rate: float = 0.02
    muon_momentum: float = 0.95
    freeze_step: int = 100
    sync_every: int = 1

    def __post_init__(self) -> None:
        for name in ("learning_rate", "eps", "muon_learning_rate"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"optimizer.{name} must be a number greater than 0, not {value}")
        for name in ("beta1", "beta2", "muon_momentum"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"optimizer.{name} must be at least 0 and less than 1, not {getattr(self, name)}")
        if self.freeze_step < 1 or self.sync_every < 1:
            raise ValueError("optimizer.freeze_step and optimizer.sync_every are numbers of steps, 1 or more")
        for name in ("weight_decay", "clip"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(f"optimizer.{name} must be 0 or greater, not {value}")


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleConfig:
    """The learning rate over the steps, as a factor of ``learning_rate``.

    Attributes:
        warmup: steps; where a file leaves it out, 3% of the steps, and none to pretrain. -1 stands for 3%.
        decay: steps of ``wsd``'s fall.
        final: the factor at the end of ``cosine``, ``linear`` and ``wsd``.
        kind: after ``warmup`` steps from 0 to 1: ``constant``; ``cosine`` or ``linear`` down to ``final``; ``wsd``
            stays at 1 and falls linearly to ``final`` over the last ``decay`` steps (warm-up, stable, decay).
    """

    kind: Literal["constant", "cosine", "linear", "wsd"] = "cosine"
    warmup: int = 0
    decay: int = 0
    final: float = 0.1

    def __post_init__(self) -> None:
        if self.warmup < -1 or self.decay < 0:
            raise ValueError("schedule.warmup and schedule.decay are numbers of steps, 0 or more")
        if not 0 <= self.final <= 1:
            raise ValueError(f"schedule.final is a share of the learning rate, from 0 to 1, not {self.final}")
