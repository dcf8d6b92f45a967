"""The settings that belong to one objective each: ``[dpo]``, ``[kto]``, ``[orpo]``, ``[grpo]`` and ``[distill]``.

Defaults are those of TRL where it has such a setting.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal

NAMES = ("next_token", "dpo", "kto", "orpo", "grpo", "distill")
"""Objectives with settings below, or without settings."""
FOLDER = Path(__file__).parents[1] / "objectives"


@dataclass(frozen=True, slots=True, kw_only=True)
class ObjectiveKind:
    """The record of an objective in one file: ``OBJECTIVE`` of ``train/objectives/NAME.py``.

    Attributes:
        make: makes the objective from a ``TrainConfig``, which has the settings as ``own``, and a ``Trainable``.
        settings: a frozen dataclass, read from the table ``[NAME]`` of a run's file.
        rates: default learning rates for all weights and for adapters.
        compares: the loss compares with the model as it was when the run began.
        part: builds what is trained beside a frozen model, from a ``TrainConfig`` and the model's ``Trainable``; None
            if the model is trained.
    """

    make: Callable[[Any, Any], Any]
    settings: type
    rates: tuple[float, float] = (2e-5, 2e-4)
    compares: bool = False
    part: Callable[[Any, Any], Any] | None = None


@cache
def objectives() -> tuple[str, ...]:
    """List the names of all objectives: those with settings here, and files of ``train/objectives/`` that contain a
    record."""
    found = (path.stem for path in sorted(FOLDER.glob("*.py")) if "\nOBJECTIVE = " in path.read_text(encoding="utf-8"))
    return (*NAMES, *found)


def check_objective(name: object) -> None:
    """Check that an objective of this name exists.

    Raises:
        ValueError: there is none; the message lists them.
    """
    if name not in objectives():
        raise ValueError(f"objective must be one of {', '.join(objectives())}, not {name!r}")


def objective_kind(name: object) -> ObjectiveKind | None:
    """Return the record of an objective in one file; None for other objectives, and for unknown names."""
    if name in NAMES or name not in objectives():
        return None
    found: ObjectiveKind = import_module(f"transect.train.objectives.{name}").OBJECTIVE
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOConfig:
    """Preference pairs.

    Attributes:
        beta: strength of the pull towards the initial model.
        loss: ``sigmoid`` (DPO), ``hinge`` (SLiC), ``ipo`` (a margin of 1 / (2 beta) for each token), or ``robust``
            (unbiased under labels of which ``label_smoothing`` are wrong).
        label_smoothing: assumed share of swapped pairs; for ``sigmoid`` and ``robust``.
    """

    beta: float = 0.1
    loss: Literal["sigmoid", "hinge", "ipo", "robust"] = "sigmoid"
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        _above(self, "dpo", 0, "beta")
        if not 0 <= self.label_smoothing < 0.5:
            raise ValueError(f"dpo.label_smoothing must be at least 0 and less than 0.5, not {self.label_smoothing}")
        if self.label_smoothing and self.loss in ("hinge", "ipo"):
            raise ValueError(f'dpo.label_smoothing has no effect with dpo.loss = "{self.loss}": leave it out')
        if self.loss == "robust" and not self.label_smoothing:
            raise ValueError('dpo.loss = "robust" needs dpo.label_smoothing: the share of wrong labels, such as 0.1')


@dataclass(frozen=True, slots=True, kw_only=True)
class KTOConfig:
    """Answers that are good or bad, each on its own.

    Attributes:
        beta: strength of the pull towards the initial model.
        desirable_weight, undesirable_weight: weights of good and bad answers.
    """

    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0

    def __post_init__(self) -> None:
        _above(self, "kto", 0, "beta")
        _at_least(self, "kto", 0, "desirable_weight", "undesirable_weight")


@dataclass(frozen=True, slots=True, kw_only=True)
class ORPOConfig:
    """Preference pairs without a reference model.

    Attributes:
        beta: the weight of the odds ratio beside the cross entropy of the chosen side.
        train_prompt: include the prompt's tokens in the cross entropy, as in TRL; false: the answer's only.
    """

    beta: float = 0.1
    train_prompt: bool = True

    def __post_init__(self) -> None:
        _above(self, "orpo", 0, "beta")


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillConfig:
    """The distribution of a larger model as the target of every trained token.

    Attributes:
        teacher: the larger model: what ``model`` may be. Its tokenizer must be the same.
        divergence: ``forward``: KL(teacher || student), which covers all that the teacher says; ``reverse``:
            KL(student || teacher), which seeks its likeliest; ``jsd``: the Jensen-Shannon divergence between.
        mixture: the teacher's share of the mixture in ``jsd``.
        temperature: both models' logits are divided by it.
        weight: the share of the divergence in the loss; the rest is the cross entropy of the data's own tokens.
    """

    teacher: str = ""
    divergence: Literal["forward", "reverse", "jsd"] = "forward"
    mixture: float = 0.5
    temperature: float = 1.0
    weight: float = 1.0

    def __post_init__(self) -> None:
        _above(self, "distill", 0, "temperature")
        if not 0 < self.weight <= 1:
            raise ValueError(f"distill.weight must be greater than 0 and at most 1, not {self.weight}")
        if not 0 < self.mixture < 1:
            raise ValueError(f"distill.mixture must lie between 0 and 1, not {self.mixture}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOConfig:
    """Reinforcement learning from rewards.

    Attributes:
        reward: one or several functions. ``exact`` is 1 if the stripped answer equals the row's ``answer``, and None
            for rows without one. ``module:function`` or ``path/to/file.py:function`` is called as
            ``function(answer_text, record)``; ``record`` is the prompt's row of the data. It returns a number, or None
            for no opinion.
        reward_weights: factor of each function's reward in the sum; empty for 1.
        prompts, group: prompts per rollout, and answers per prompt.
        minibatches: optimizer steps in one pass over the answers of a rollout.
        iterations: number of passes over a rollout, which lasts ``iterations * minibatches`` steps.
        max_tokens: of each answer.
        temperature, top_p, top_k, min_p: sampling of answers; the log-probabilities are those of that distribution.
        clip: distance below 1 at which the ratio to the model that drew the answer is clipped.
        clip_high: the same above 1; 0: as ``clip``.
        beta: weight of the KL divergence from the model as it was when the run began; 0: none, and nothing is kept.
        unbiased_kl: weigh that divergence by the ratio, so that it is right also after the first step of a rollout.
        loss: divisor of the tokens' losses. ``dapo``: trained tokens of the rollout over its ``minibatches``, as in TRL
            (the paper divides by the tokens of each prompt's group). ``grpo``: each answer's tokens, then the answers.
            ``dr_grpo``: answers times ``max_tokens``. ``bnpo``: the tokens of each micro-batch.
        scale_rewards: advantages are divided by the standard deviation of the ``group``, of the whole ``batch``, or by
            ``none``.
        mask_truncated: exclude answers that ended at ``max_tokens`` from training; they still count in their group.
        engine: source of the answers: ``shared``: the weights in training; ``adapter``: a separate engine over the
            base, which gets a LoRA's new weights as an adapter; ``auto``: ``adapter`` for a LoRA on a CPU.
    """

    reward: tuple[str, ...] = ("exact",)
    reward_weights: tuple[float, ...] = ()
    prompts: int = 8
    group: int = 8
    minibatches: int = 1
    iterations: int = 1
    max_tokens: int = 64
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    clip: float = 0.2
    clip_high: float = 0.0
    beta: float = 0.0
    unbiased_kl: bool = True
    loss: Literal["dapo", "grpo", "dr_grpo", "bnpo"] = "dapo"
    scale_rewards: Literal["group", "batch", "none"] = "group"
    mask_truncated: bool = False
    engine: Literal["auto", "shared", "adapter"] = "auto"

    def __post_init__(self) -> None:
        if isinstance(self.reward, str):
            object.__setattr__(self, "reward", (self.reward,))
        _at_least(self, "grpo", 1, "prompts", "minibatches", "iterations", "max_tokens")
        _at_least(self, "grpo", 0, "top_k", "clip_high", "beta")
        _above(self, "grpo", 0, "temperature")
        if self.group < 2:
            raise ValueError(f"grpo.group must be at least 2: answers are judged against each other, not {self.group}")
        if not 0 < self.top_p <= 1 or not 0 <= self.min_p <= 1:
            raise ValueError(
                f"grpo.top_p must lie in (0, 1] and grpo.min_p in [0, 1], not {self.top_p} and {self.min_p}"
            )
        if not 0 < self.clip < 1:
            raise ValueError(f"grpo.clip must lie between 0 and 1, not {self.clip}")
        if not self.reward:
            raise ValueError('grpo.reward names no function: give "exact" or "module:function"')
        if self.reward_weights and len(self.reward_weights) != len(self.reward):
            raise ValueError(
                f"grpo.reward_weights has {len(self.reward_weights)} numbers for {len(self.reward)} functions of "
                "grpo.reward: give one for each"
            )
        if not all(map(math.isfinite, self.reward_weights)):
            raise ValueError(f"grpo.reward_weights must be finite numbers, not {list(self.reward_weights)}")
        if self.minibatches > self.prompts * self.group:
            raise ValueError(
                f"grpo.minibatches ({self.minibatches}) is more than the {self.prompts * self.group} answers of a "
                "rollout: lower it"
            )

    @property
    def steps_a_rollout(self) -> int:
        """Optimizer steps that use the answers of one rollout."""
        return self.iterations * self.minibatches

    @property
    def truncated(self) -> bool:
        """True if answers are drawn from a part of the vocabulary."""
        return self.top_p < 1 or self.top_k > 0 or self.min_p > 0


def _above(config: Any, table: str, bound: float, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not (math.isfinite(value) and value > bound):
            raise ValueError(f"{table}.{name} must be greater than {bound:g}, not {value}")


def _at_least(config: Any, table: str, bound: float, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if not (math.isfinite(value) and value >= bound):
            raise ValueError(f"{table}.{name} must be at least {bound:g}, not {value}")
