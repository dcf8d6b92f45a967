"""Define a request's sampling parameters and stop conditions, as plain data: no torch, no text processing.

Names and defaults are those of vLLM's ``SamplingParams`` and of the OpenAI API.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import NoneType
from typing import Any

from ...text.grammar.params import StructuredOutputsParams

MAX_LOGPROBS = 20
MAX_CHOICES = 128
MAX_STOPS = 128
MAX_STOP_CHARACTERS = 4096
"""Most characters of all stop strings together: each character is a node of the automaton that searches for them."""
MAX_STOP_TOKEN_IDS = 128
MAX_LOGIT_BIASES = 1024
MAX_ALLOWED_TOKEN_IDS = 2**18
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARACTERS = 4096
LEAST_REPETITION_PENALTY = 0.01
"""Lowest repetition penalty; below it logits soon exceed float32, and no token can be drawn."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Parameters for drawing the tokens of one request.

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
        allowed_token_ids: the only tokens that may be drawn; the end of sequence too must be listed. None for all.
        bad_words: texts that an answer never has as tokens of its own, with a space before them or without; at most
            128, together of at most 4096 characters. (The same letters spelt by other tokens are not kept out.)
        bad_words_token_ids: the same as token ids; an engine with a tokenizer fills it in from ``bad_words``.
        seed: makes the draws repeatable whatever else is in the batch; None draws a fresh seed for the request.
        stop: strings that end a choice; the text ends before the first of them. At most 128, together of at most
            4096 characters.
        stop_token_ids: token ids that end a choice; at most 128.
        max_tokens: most output tokens; None for as many as the context holds.
        min_tokens: output tokens before which EOS and ``stop_token_ids`` are masked, and stop strings are ignored.
        ignore_eos: continue past the model's end-of-sequence token.
        logprobs: return the chosen token's logprob and this many likeliest alternatives (0 to 20).
        prompt_logprobs: the same for every prompt token but the first.
        prompt_logprobs_start: first position of the prompt (after truncation) with log-probabilities; the prefix cache
            can serve the tokens before it. 0 and 1 are the same.
        truncate_prompt_tokens: number of last prompt tokens to keep; -1 for as many as leave room for ``max_tokens``
            (or one token) in the context.
        skip_special_tokens: leave special tokens out of the text.
        include_stop_str_in_output: end the text after, not before, the stop string.
        structured_outputs: form of the answer, which ends when the form is complete, even before ``min_tokens``.

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
    allowed_token_ids: list[int] | tuple[int, ...] | None = None
    bad_words: str | list[str] | tuple[str, ...] | None = None
    bad_words_token_ids: Sequence[Sequence[int]] = ()
    seed: int | None = None
    stop: str | list[str] | tuple[str, ...] | None = None
    stop_token_ids: list[int] | tuple[int, ...] | None = None
    max_tokens: int | None = 16
    min_tokens: int = 0
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    prompt_logprobs_start: int = 0
    truncate_prompt_tokens: int | None = None
    skip_special_tokens: bool = True
    include_stop_str_in_output: bool = False
    structured_outputs: StructuredOutputsParams | None = None

    def __post_init__(self) -> None:
        stop, bad_words = ((value,) if isinstance(value, str) else value for value in (self.stop, self.bad_words))
        for name, value, form in (
            ("stop", stop, "a string or a list of strings"),
            ("bad_words", bad_words, "a list of strings"),
            ("bad_words_token_ids", self.bad_words_token_ids, "a list of lists of token ids"),
            ("allowed_token_ids", self.allowed_token_ids, "a list of token ids"),
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
        object.__setattr__(self, "bad_words", tuple(bad_words or ()))
        object.__setattr__(self, "bad_words_token_ids", tuple(map(tuple, self.bad_words_token_ids or ())))
        if self.allowed_token_ids is not None:
            object.__setattr__(self, "allowed_token_ids", tuple(dict.fromkeys(self.allowed_token_ids)))
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
        _integer("prompt_logprobs_start", self.prompt_logprobs_start, 0, None)
        if self.prompt_logprobs_start and self.prompt_logprobs is None:
            raise ValueError(f"prompt_logprobs_start is {self.prompt_logprobs_start}: set prompt_logprobs too")
        _integer("truncate_prompt_tokens", self.truncate_prompt_tokens, -1, None, optional=True)
        if self.truncate_prompt_tokens == 0:
            raise ValueError("truncate_prompt_tokens must be at least 1, or -1 for what the context holds, got 0")
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens ({self.min_tokens}) must not exceed max_tokens ({self.max_tokens})")
        for name, given, most in (
            ("stop", self.stop, MAX_STOPS),
            ("stop_token_ids", self.stop_token_ids, MAX_STOP_TOKEN_IDS),
            ("logit_bias", self.logit_bias, MAX_LOGIT_BIASES),
            ("allowed_token_ids", self.allowed_token_ids, MAX_ALLOWED_TOKEN_IDS),
            ("bad_words", self.bad_words, MAX_BAD_WORDS),
            ("bad_words_token_ids", self.bad_words_token_ids, 2 * MAX_BAD_WORDS),
        ):
            if len(given or ()) > most:
                raise ValueError(f"{name} holds {len(given or ())} entries: give at most {most}")
        advice = ": the beginnings of long stop strings are enough"
        _texts("stop", self.stop or (), MAX_STOP_CHARACTERS, advice)
        _texts("bad_words", self.bad_words or (), MAX_BAD_WORD_CHARACTERS)
        for token in self.stop_token_ids or ():
            _integer("stop_token_ids", token, 0, None)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids is empty, so no token could be drawn: give some, or leave it out")
        for token in self.allowed_token_ids or ():
            _integer("allowed_token_ids", token, 0, None)
        for word in self.bad_words_token_ids:
            if not 0 < len(word) <= MAX_BAD_WORD_CHARACTERS:
                raise ValueError(f"bad_words_token_ids must hold lists of 1 to {MAX_BAD_WORD_CHARACTERS} token ids")
            for token in word:
                _integer("bad_words_token_ids", token, 0, None)
        for token, bias in (self.logit_bias or {}).items():
            _integer("logit_bias token id", token, 0, None)
            _number(f"logit_bias[{token}]", bias, -100.0, 100.0)

    @property
    def greedy(self) -> bool:
        """True if the likeliest token is always taken."""
        return self.temperature == 0.0

    def with_(self, **changes: Any) -> SamplingParams:
        """Return a copy with some fields changed, after checking it again."""
        return replace(self, **changes)


def _texts(name: str, texts: Sequence[Any], most: int, advice: str = "") -> None:
    for text in texts:
        if not isinstance(text, str) or not text:
            raise ValueError(f"{name} must hold non-empty strings, got {text!r}")
    characters = sum(map(len, texts))
    if characters > most:
        raise ValueError(f"{name} holds {characters} characters in all: give at most {most}{advice}")


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
