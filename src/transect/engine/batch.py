"""What the scheduler hands to an executor, and what comes back: the one interface between bookkeeping and tensors.

Plain Python, so that the shipping scheduler can be driven by a fake executor (fuzzing), by a cost model (planning) or by
the real Runner. Times are seconds; token and block numbers are plain ints.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from .sampling_params import SamplingParams

PLACEHOLDER = -1
"""Stands in ``ScheduledRow.token_ids`` for the token that a batch still in flight is about to sample for this sequence."""


class Clock(Protocol):
    """Where the scheduler gets the time: the wall clock in production, a virtual one in tests and in planning."""

    def now(self) -> float:
        """Seconds since some fixed moment; never goes back."""
        ...


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to sample from the last logits row of a scheduled row.

    ``position`` is the index that the drawn token will have in prompt + output; with the seed and ``choice`` it is the
    key of the random draw. ``output_token_ids`` are the choice's tokens so far (penalties, min_tokens need them); with
    async scheduling its last entry may be PLACEHOLDER.
    """

    seq_id: int
    choice: int
    position: int
    seed: int
    params: SamplingParams
    prompt_token_ids: tuple[int, ...]
    output_token_ids: tuple[int, ...]
    masked_token_ids: tuple[int, ...] = ()
    """Tokens that must not be drawn now: EOS and stop tokens while ``min_tokens`` is not reached."""


@dataclass(frozen=True, slots=True)
class ScheduledRow:
    """A run of consecutive tokens of one sequence that this step computes.

    Tokens ``token_ids`` stand at positions ``start .. start + len(token_ids) - 1``; the KV of positions before ``start``
    is already in ``block_ids``, which covers every position up to the last of these tokens.
    """

    seq_id: int
    token_ids: tuple[int, ...]
    start: int
    block_ids: tuple[int, ...]
    draws: tuple[Draw, ...] = ()
    """Empty for a prefill chunk that is not the last; n draws when the prompt of a request with n choices completes."""
    prompt_logprobs: int | None = None
    """Number of alternatives wanted for each prompt token that these tokens predict; None for none."""
    next_prompt_token_ids: tuple[int, ...] = ()
    """With prompt_logprobs: the prompt tokens that rows 0.. of this chunk predict (may be one fewer than the chunk)."""


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One engine step: the copies to make first, then the rows of the ragged batch."""

    step: int
    rows: tuple[ScheduledRow, ...]
    block_copies: tuple[tuple[int, int], ...] = ()
    """(source block, destination block) pairs to copy before anything is written: copy-on-write of shared blocks."""

    @property
    def num_tokens(self) -> int:
        return sum(len(row.token_ids) for row in self.rows)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural log, after penalties and temperature are NOT applied: of the model's raw logits).

    ``top`` holds (token id, logprob), likeliest first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """What an executor returns for a batch.

    ``tokens[seq_id]`` is the drawn token for every draw of the batch. ``errors[seq_id]`` is set instead where a draw
    could not be made (logits not finite): that sequence ends with an error, the others go on.
    """

    tokens: dict[int, int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """By the row's seq_id: one entry for each of ``next_prompt_token_ids``."""
    errors: dict[int, str] = field(default_factory=dict)


class Handle(Protocol):
    """A submitted batch. ``result`` blocks until the device is done and may be called once or more."""

    def result(self) -> StepResult: ...


class Executor(Protocol):
    """Runs batches in the order of submission. ``submit`` may return before the work is done."""

    def submit(self, batch: ScheduledBatch) -> Handle: ...
