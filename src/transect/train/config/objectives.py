"""The settings of each objective."""

from __future__ import annotations

from dataclasses import dataclass

from .parse import positive


@dataclass(frozen=True, slots=True, kw_only=True)
class DPOConfig:
    """Preference pairs: ``beta`` is how strongly the model is held to where it began."""

    beta: float = 0.1

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ValueError(f"dpo.beta must be greater than 0, not {self.beta}")


@dataclass(frozen=True, slots=True, kw_only=True)
class GRPOConfig:
    """Reinforcement learning from rewards.

    Attributes:
        reward: ``module:function`` that is called as ``function(answer_text, record)`` and returns a number; ``record``
            is the prompt's line of the data. ``exact`` is 1 where the answer, stripped, equals the line's ``answer``.
        prompts, group: prompts of a step, and answers to each.
        max_tokens, temperature: for each answer.
        clip: how far the ratio to the model that drew the answer may leave 1 before it counts no more.
    """

    reward: str = "exact"
    prompts: int = 8
    group: int = 8
    max_tokens: int = 64
    temperature: float = 1.0
    clip: float = 0.2

    def __post_init__(self) -> None:
        positive(self, "prompts", "max_tokens")
        if self.group < 2:
            raise ValueError(f"grpo.group must be at least 2: answers are judged against each other, not {self.group}")
        if not self.temperature > 0:
            raise ValueError(f"grpo.temperature must be greater than 0, not {self.temperature}")
