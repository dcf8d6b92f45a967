"""Sample answers of the model in training to fixed prompts, with the serving engine."""

from __future__ import annotations

from dataclasses import dataclass

from ...text.inert import chat_tokens
from ..config import SamplesConfig
from ..model.build import Trainable


@dataclass(frozen=True, slots=True)
class SampleRecord:
    """An answer of the model after ``step``."""

    step: int
    prompt: str
    answer: str


class Samples:
    """Draws answers. With a chat template a prompt is a user's message, else the beginning of a text.

    Raises:
        ValueError: the model has no tokenizer, or a prompt and its answer are longer than the context.
    """

    def __init__(self, config: SamplesConfig, trainable: Trainable) -> None:
        if trainable.tokenizer is None:
            raise ValueError("samples.prompts needs a model with a tokenizer")
        self._config, self._trainable, self._tokenizer = config, trainable, trainable.tokenizer
        self._prompts = []
        for prompt in config.prompts:
            if trainable.template is None:
                ids = trainable.tokenizer.encode(prompt, add_special_tokens=True)
            else:
                messages = [{"role": "user", "content": prompt}]
                ids = chat_tokens(trainable.template, trainable.tokenizer, messages)[1]
            room = trainable.source.config.max_position - config.max_tokens
            if len(ids) > room:
                raise ValueError(
                    f"the sample prompt {prompt[:40]!r} has {len(ids)} tokens, and the context leaves room for {room} "
                    "beside an answer: shorten it or lower samples.max_tokens"
                )
            self._prompts.append(ids)

    def draw(self, step: int) -> list[SampleRecord]:
        """Draw an answer to each prompt. The run's state and draws are unaffected."""
        from ...engine.scheduling.sampling_params import SamplingParams
        from ..objectives.rollout import roll_out

        config = self._config
        params = SamplingParams(temperature=config.temperature, max_tokens=config.max_tokens)
        ends = self._tokenizer.eos_token_ids
        answers = roll_out(self._trainable.model, self._prompts, params, eos_token_ids=ends, seed=step)
        return [
            SampleRecord(step, config.prompts[answer.prompt], self._tokenizer.decode(answer.token_ids))
            for answer in answers
        ]
