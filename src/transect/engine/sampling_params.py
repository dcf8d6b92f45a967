"""What a request asks of the sampler and when it ends. Plain data: no torch, no text processing.

The names and defaults are those that users of vLLM's ``SamplingParams`` and of the OpenAI API know.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

from ..text.grammar.params import StructuredOutputsParams

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOPS = 128
MAX_STOP_CHARACTERS = 4096
"""The limit of all stop strings together: each character is a node of the automaton that looks for them."""
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 1024
LEAST_REPETITION_PENALTY = 0.01
"""Below it logits are soon more than a float32 can hold, and nothing is left to draw."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How to draw tokens for one request.

    Attributes:
        n: choices drawn from the one prompt; they share the prompt's KV blocks.
        temperature: 0 is greedy (argmax); otherwise logits are divided by it.
        top_p: keep the smallest set of tokens whose probability reaches it, in (0, 1].
        top_k: keep the k likeliest tokens; 0 or -1 keeps all.
        min_p: drop tokens less likely than ``min_p`` times the likeliest, in [0, 1].
        repetition_penalty: logits of tokens in prompt or output are divided (if positive) or multiplied by it, in
            [0.01, 100].
        presence_penalty: subtracted once from logits of tokens already in the output, in [-2, 2].
        frequency_penalty: subtracted once per occurrence in the output, in [-2, 2].
        logit_bias: token id to a bias in [-100, 100] added to its logit; at most 1024 of them.
        seed: makes the draws repeatable whatever else is in the batch; None draws a fresh seed for the request.
        stop: strings that end a choice; the text ends before the first of them. At most 128, together of at most
            4096 characters.
        stop_token_ids: token ids that end a choice; at most 128.
        max_tokens: output tokens at the most; None goes on to the model's context length.
        min_tokens: until then EOS and ``stop_token_ids`` are masked, and stop strings are ignored.
        ignore_eos: go on past the model's end-of-sequence token.
        logprobs: return the chosen token's logprob and this many likeliest alternatives (0 to 20).
        prompt_logprobs: the same for every prompt token but the first.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: end the text after, not before, the stop string.
        structured_outputs: what the answer must look like; it ends when it is complete. ``min_tokens`` yields to it.

    Raises:
        ValueError: a value is out of its range; the message names the field, the range and the value.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: dict[int, float] | None = None
    seed: int | None = None
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        stop = self.stop
        if isinstance(stop, str):
            stop = (stop,)
        for name, value, form in (
            ("stop", stop, "a string or a list of strings"),
            ("stop_token_ids", self.stop_token_ids, "a list of token ids"),
        ):
            if not isinstance(value, (list, tuple, NoneType)):
                raise ValueError(f"{name} must be {form}, got {value!r}")
        if not isinstance(self.logit_bias, (dict, NoneType)):
            raise ValueError(f"logit_bias must be a dict of token ids and their biases, got {self.logit_bias!r}")
        if self.structured_outputs is not None:
            object.__setattr__(self, "structured_outputs", StructuredOutputsParams.of(self.structured_outputs))
        object.__setattr__(self, "stop", tuple(stop or ()))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids or ()))
        self._validate()

    def _validate(self) -> None:
        _integer("n", self.n, 1, MAX_CHOICES)
        _number("temperature", self.temperature, 0.0, 100.0)
        _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _integer("top_k", self.top_k, -1, None)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, LEAST_REPETITION_PENALTY, 100.0)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _integer("seed", self.seed, -(2**63), 2**64 - 1, optional=True)
        _integer("max_tokens", self.max_tokens, 1, None, optional=True)
        _integer("min_tokens", self.min_tokens, 0, None)
        _integer("logprobs", self.logprobs, 0, MAX_LOGPROBS, optional=True)
        _integer("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS, optional=True)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        for name, given, most in (
            ("stop", self.stop, MAX_STOPS),
            ("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS),
            ("logit_bias", self.logit_bias, MAX_LOGIT_BIASES),
        ):
            if len(given or ()) > most:
                raise ValueError(f"{name} holds {len(given or ())} entries: give at most {most}")
        for text in self.stop or ():
            if not isinstance(text, str) or not text:
                raise ValueError(f"stop must hold non-empty strings, got {text!r}")
        characters = sum(map(len, self.stop or ()))
        if characters > MAX_STOP_CHARACTERS:
            raise ValueError(
                f"stop holds {characters} characters in all: give at most {MAX_STOP_CHARACTERS}: the beginnings of "
                "long stop strings are enough"
            )
        for token in self.stop_token_ids or ():
            _integer("stop_token_ids", token, 0, None)
        for token, bias in (self.logit_bias or {}).items():
            _integer("logit_bias token id", token, 0, None)
            _number(f"logit_bias[{token}]", bias, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        """True where the likeliest token is always taken."""
        return self.temperature == 0.0

    def with_(self, **changes: Any) -> SamplingParams:
        """A copy with some fields changed, validated anew."""
        return replace(self, **changes)


def _number(name: str, value: Any, low: float, high: float, *, low_open: bool = False) -> None:
    bracket = "(" if low_open else "["
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise ValueError(f"{name} must be a finite number in {bracket}{low:g}, {high:g}], got {value!r}")
    if value < low or value > high or (low_open and value == low):
        raise ValueError(f"{name} must be in {bracket}{low:g}, {high:g}], got {value!r}")


def _integer(name: str, value: Any, low: int, high: int | None, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{name} must be a whole number{' or None' if optional else ''}, got {value!r}")
    if value < low or (high is not None and value > high):
        upper = f" and at most {high}" if high is not None else ""
        raise ValueError(f"{name} must be at least {low}{upper}, got {value}")
