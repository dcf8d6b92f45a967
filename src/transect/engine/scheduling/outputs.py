"""Define the engine's outputs: one ``EngineOutput`` per choice and step with new tokens, and the counters for
metrics."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from .batch import TokenLogprobs


class RequestTimes(msgspec.Struct, frozen=True):
    """Times in the life of one choice, in seconds of the engine's clock; None for stages that it did not reach."""

    arrival: float
    first_scheduled: float | None
    """Time at which the request's first tokens were scheduled; the time since ``arrival`` is the time in the queue."""
    first_token: float | None
    """Time at which this choice's first token was known; minus ``arrival`` it is the TTFT within the engine."""
    finished: float | None = None


class EngineOutput(msgspec.Struct, omit_defaults=True, gc=False):
    """New tokens of one choice of one request. For every choice exactly one output has a ``finish_reason``, its last.

    The choice's text is the concatenation of ``new_token_ids``. A stop token or EOS that ended the choice is its last
    token. When a choice is aborted or fails the list is empty.
    """

    request_id: str
    index: int
    new_token_ids: list[int]
    logprobs: list[TokenLogprobs] | None = None
    """Log-probabilities, one entry for each of ``new_token_ids``, if requested."""
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    """Log-probabilities of the prompt, if requested: one entry per prompt token, None before
    ``Request.scored_from``. Set once per request, on the first output of any of its choices that carries a token."""
    pooled: bytes | None = None
    """Pooled vector, float64 ``[D]``, set with the first token of a request with ``pooling``."""
    finish_reason: str | None = None
    """"stop", "length", "abort" or "error"; None while the choice is unfinished."""
    complete: bool = False
    """True, with "stop", if the answer is complete under its grammar, and its last token is part of it."""
    stop_reason: int | str | None = None
    """Id out of ``stop_token_ids`` that ended the choice, with "stop"; None for EOS."""
    num_cached_tokens: int = 0
    """Prompt tokens whose KV came from the prefix cache when the request was first admitted."""
    error: str | None = None
    times: RequestTimes | None = None
    """Times of the choice, set on its first output that carries a token, and on its last."""


class SchedulerStats(msgspec.Struct):
    """Gauges of this moment and counters since the scheduler was made. Blocks and tokens are counts."""

    waiting: int
    """Requests in the queue that never ran."""
    preempted: int
    """Sequences that wait to be recomputed after a preemption."""
    running: int
    """Sequences that hold KV blocks (a request whose prompt is not complete counts as one)."""
    kv_blocks_total: int
    kv_blocks_used: int
    """Blocks that a sequence or a step in flight refers to."""
    kv_blocks_cached: int
    """Unused blocks whose contents the prefix cache can still find; they are free to take."""
    prefix_query_tokens: int
    prefix_hit_tokens: int
    preemptions: int
    prompt_tokens: int
    """Prompt tokens of admitted requests, cached ones included."""
    generation_tokens: int
    jumped_tokens: int
    """Tokens among ``generation_tokens`` that a grammar forced, without a draw."""
    steps: int
    timed_steps: int
    """Steps whose time was measured: with ``itl_target`` all of them."""
    step_seconds: float
    """Time of the timed steps, in seconds."""
    predicted_step_seconds: float
    """Predicted time of these steps, in seconds."""
    finished: dict[str, int]
    """Choices by finish reason."""
    drafted_tokens: int = 0
    """Tokens that were drafted for verification."""
    accepted_at: dict[str, int] = {}
    """Accepted drafted tokens, by their index among the drafts of a row, from "0" on."""
    late_captures: int = 0
    """CUDA graphs that were captured after the start, while requests waited."""
    late_compilations: int = 0
    """Kernels that were compiled, or read from the compiler's cache, after the start."""
    kv_evictions: int = 0
    """Cached blocks whose contents were dropped for new ones."""
    grammar_cache_bytes: int = 0
    """Memory of compiled grammars that are kept."""
    next_step_seconds: float = 0.0
    """Predicted time of a step that decodes the running sequences; 0 if there are none, or no times are learned."""
    next_row_seconds: float = 0.0
    """Predicted time that one more sequence adds to that step; 0 if no times are learned."""

    @classmethod
    def sum(cls, stats: Sequence[SchedulerStats]) -> SchedulerStats:
        """Add up the gauges and counters of several schedulers; predicted times of a step are means."""
        total: dict[str, Any] = {}
        for field in msgspec.structs.fields(cls):
            values = [getattr(each, field.name) for each in stats]
            if isinstance(values[0], dict):
                names = dict.fromkeys(name for each in values for name in each)
                total[field.name] = {name: sum(each.get(name, 0) for each in values) for name in names}
            else:
                total[field.name] = sum(values) / (len(values) if field.name.startswith("next_") else 1)
        return cls(**total)

    def of_the_past(self) -> SchedulerStats:
        """Return the counters of a scheduler that has ended: its gauges are 0."""
        blocks = ("kv_blocks_total", "kv_blocks_used", "kv_blocks_cached")
        times = ("next_step_seconds", "next_row_seconds")
        gauges = ("waiting", "preempted", "running", *blocks, *times, "grammar_cache_bytes")
        return msgspec.structs.replace(self, **dict.fromkeys(gauges, 0))

    @property
    def kv_usage(self) -> float:
        """Share of the pool in use, 0 to 1."""
        return self.kv_blocks_used / self.kv_blocks_total


def first_tokens_first(outputs: list[EngineOutput]) -> list[EngineOutput]:
    """Sort the outputs of a step: those that begin an answer come first, because each output costs time and a first
    token has waited longest."""

    def goes_on(output: EngineOutput) -> bool:
        return output.times is None or output.finish_reason is not None

    return sorted(outputs, key=goes_on)
