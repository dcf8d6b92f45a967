"""Define results for callers: the request, its choices, and log-probabilities, with vLLM's names.

Plain dataclasses; logprobs are natural logarithms, times are seconds of the clock that the OutputProcessor was given.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Logprob:
    """The log-probability of one token at one position.

    ``rank`` is 1 for the likeliest token of that position. ``decoded_token`` is the token's own text; a token that
    holds only a part of a character shows U+FFFD there.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


PositionLogprobs = dict[int, Logprob]
"""Log-probabilities of one position, by token id: first the chosen token, then the requested likeliest ones."""


@dataclass(slots=True)
class CompletionOutput:
    """One choice of a request.

    Attributes:
        index: 0 .. n-1.
        text: the text so far; a stop string and what follows it is cut off (``include_stop`` keeps the stop string).
        token_ids: every token the choice is charged for: an end-of-sequence or stop token that ended it is the last
            one, and after a stop string the last one is the token that completed it, although its text may be cut.
        cumulative_logprob: sum over ``token_ids``; None when logprobs were not asked for.
        logprobs: one dict for each of ``token_ids``; None when not asked for.
        finish_reason: None while running, then "stop", "length", "abort" or "error".
        stop_reason: the stop string or the stop token id that ended it; None for end-of-sequence and all other endings.
        error: reason, for finish_reason "error".
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(slots=True)
class RequestMetrics:
    """Times of events of a request; None for those that have not happened yet."""

    arrival_time: float
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request and all its choices, cumulative.

    ``prompt`` is None when the request came as token ids. ``prompt_logprobs`` (None when not asked for) has one entry
    for each prompt token; the first is None because nothing predicts it, and so are those before
    ``prompt_logprobs_start``. ``num_cached_tokens`` counts the prompt tokens whose KV came from the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[PositionLogprobs | None] | None
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int
    metrics: RequestMetrics
    pooled: bytes | None = None
    """Pooled vector of the prompt, float64, if the request was for one."""

    @property
    def num_output_tokens(self) -> int:
        """Completion tokens of all choices together, as charged."""
        return sum(len(choice.token_ids) for choice in self.outputs)
