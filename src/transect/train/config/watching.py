"""Configure the metrics, samples and logs of a run in progress."""

from __future__ import annotations

from dataclasses import dataclass

from .parse import positive


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplesConfig:
    """Answers of the model in training, for the log.

    Attributes:
        prompts: questions: a user's message, or the beginning of a text for a model without a chat template.
        every: steps between answers (0: at the end only).
        max_tokens, temperature: for each answer; temperature 0 takes the likeliest token.
    """

    prompts: tuple[str, ...] = ()
    every: int = 0
    max_tokens: int = 64
    temperature: float = 0.0

    def __post_init__(self) -> None:
        positive(self, "max_tokens")
        if self.every < 0:
            raise ValueError(f"samples.every must be 0 or greater, not {self.every}")
        if self.temperature < 0:
            raise ValueError(f"samples.temperature must be 0 or greater, not {self.temperature}")
        if not all(self.prompts):
            raise ValueError("samples.prompts holds an empty prompt")
