"""Define batches for executors and the results they return: the one interface between bookkeeping and tensors.

Plain Python, so that the shipping scheduler can be driven by a fake executor (fuzzing), by a cost model (planning) or
by the real Runner. Times are seconds; token and block numbers are plain ints.

Rows and draws refer to lists that the scheduler keeps using, so that the cost of a step does not depend on the length
of sequences. An executor must treat these lists as read-only. Until ``Handle.result`` has returned, an executor may
rely on two facts, even if it reads late or in another thread: ``output_token_ids`` only grows at its end, and the first
``num_blocks`` entries of ``block_ids`` do not change (a list whose early entries must change is replaced by another
list, so
``row.block_ids is the_list_seen_before`` tells that a cached block table can be extended in place).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import msgspec

from .constraint import Constraint
from .sampling_params import SamplingParams

PLACEHOLDER = -1
"""Placeholder in ``ScheduledRow.token_ids`` for a token that a batch in flight will draw for the sequence."""


class Clock(Protocol):
    """Source of the scheduler's time: the wall clock in production, a virtual one in tests and in planning."""

    def now(self) -> float:
        """Return the seconds since some fixed moment; never decreases."""
        ...


class Draw(msgspec.Struct, frozen=True, gc=False):
    """Drawing of tokens for one choice of a request. The same object serves every step of that choice.

    The token that a row draws will stand at ``position = row.end`` in prompt + output; with ``seed`` and ``choice`` it
    is the key of the random draw. ``position - len(prompt_token_ids)`` output tokens precede it. ``output_token_ids``
    is a live list of those known so far (penalties need them): one fewer while the step before is still in flight, and
    it may already hold later ones when it is read late.
    """

    seq_id: int
    choice: int
    seed: int
    """Seed in [0, 2**64)."""
    params: SamplingParams
    prompt_token_ids: tuple[int, ...]
    output_token_ids: list[int]
    stop_ids: tuple[int, ...] = ()
    """EOS (unless ignored) and stop tokens."""
    min_position: int = 0
    """First position at which ``stop_ids`` may be drawn; before it, ``min_tokens`` is not reached."""
    constraint: Constraint | None = None
    """Allowed next tokens; the constraint's state precedes the token to draw only once ``Handle.draw`` is called, not
    earlier."""

    @property
    def biased(self) -> bool:
        """True if logits change equally at every position: by ``logit_bias``, or by a list of allowed tokens."""
        return bool(self.params.logit_bias) or self.params.allowed_token_ids is not None

    def masked_at(self, position: int) -> tuple[int, ...]:
        """Return the token ids that must not be drawn at ``position``."""
        return self.stop_ids if position < self.min_position else ()


class ScheduledRow(msgspec.Struct, frozen=True, gc=False):
    """A run of ``num_tokens`` consecutive tokens of one sequence, from position ``start`` on, that this step computes.

    The KV of positions before ``start`` is already in ``block_ids``, which covers every position up to the last of
    these tokens: position p lives in block ``block_ids[p // block_size]``, slot ``p % block_size``.
    """

    seq_id: int
    start: int
    num_tokens: int
    prompt_token_ids: tuple[int, ...]
    output_token_ids: list[int]
    """Live list of output tokens, see the top of this file."""
    block_ids: list[int]
    """Live list of blocks; it may be longer than this row needs."""
    draws: tuple[Draw, ...] = ()
    """Draws of the row: none for a prefill chunk that is not the last; several when the prompt of a request with n > 1
    completes, all from the logits of the row's last token."""
    prompt_logprobs: int | None = None
    """Requested alternatives for each position of ``scored``; None if there are none."""
    scored_from: int = 1
    """First position of the prompt whose log-probabilities are requested, if ``prompt_logprobs`` is set."""
    pooling: str | None = None
    """Requested vector of the prompt: "mean" sums this row's hidden states, "last" takes its last one if the row draws.
    None for no vector."""
    drafts: tuple[int, ...] = ()
    """Guesses at the end of the ``num_tokens`` tokens. The row draws after its last known token and after each draft;
    see ``StepResult.accepted``. Executors below ``executors/drafted.py`` see rows of one token instead."""
    adapter: str = ""
    """See ``Request``."""

    @property
    def end(self) -> int:
        """Position after the last token: the length of the sequence, and the position of the drawn token."""
        return self.start + self.num_tokens

    @property
    def known_end(self) -> int:
        """Position after the last token that is not a draft: the first position that is drawn."""
        return self.start + self.num_tokens - len(self.drafts)

    @property
    def token_ids(self) -> list[int]:
        """The ``num_tokens`` input tokens. PLACEHOLDER replaces a token that the batch in flight draws."""
        if self.drafts:
            known = self.num_tokens - len(self.drafts)
            before = msgspec.structs.replace(self, num_tokens=known, drafts=()).token_ids if known else []
            return [*before, *self.drafts]
        prompt = len(self.prompt_token_ids)
        first, last = self.start - prompt, self.end - prompt
        if first >= 0:
            tokens = self.output_token_ids[first:last]
        else:
            tokens = [*self.prompt_token_ids[self.start : self.end], *self.output_token_ids[: max(last, 0)]]
        if len(tokens) < self.num_tokens:
            tokens.extend([PLACEHOLDER] * (self.num_tokens - len(tokens)))
        return tokens

    @property
    def scored(self) -> range:
        """Positions of the prompt that this row's tokens predict, and whose log-probabilities are requested. The token
        at position p predicts position p + 1."""
        if self.prompt_logprobs is None:
            return range(0)
        return range(max(self.start + 1, self.scored_from), min(self.end + 1, len(self.prompt_token_ids)))

    def num_blocks(self, block_size: int) -> int:
        """Return the number of ``block_ids`` that this row reads or writes."""
        return -(-self.end // block_size)


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One engine step: the copies to make first, then the rows of the ragged batch."""

    step: int
    rows: tuple[ScheduledRow, ...]
    block_copies: tuple[tuple[int, int], ...] = ()
    """(source block, destination block) pairs to copy before anything is written: copy-on-write of shared blocks. No
    block is both a source and a destination."""
    again: bool = False
    """True only if every row has one token and one draw, and continues the row at its index in the previous step (in a
    pipeline ``pipeline_depth`` steps before), in the same lists. May be False for such a step too."""

    @property
    def num_tokens(self) -> int:
        return sum(row.num_tokens for row in self.rows)

    @property
    def scored(self) -> int:
        """Prompt tokens whose log-probabilities are requested."""
        return sum(len(row.scored) for row in self.rows)

    def spans(self) -> Iterator[tuple[int, int]]:
        """Yield (first position, tokens) of each row as an executor computes it: drafts are rows of one token."""
        for row in self.rows:
            yield row.start, row.num_tokens - len(row.drafts)
            for at in range(len(row.drafts)):
                yield row.known_end + at, 1


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Log-probabilities (natural log) of the model's raw logits, before penalties and temperature.

    ``top`` holds (token id, logprob), likeliest first.
    """

    token_id: int
    logprob: float
    rank: int
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of an executor for a batch.

    ``tokens[draw.seq_id]`` is the drawn token for every draw of the batch. ``errors[draw.seq_id]`` is set instead if a
    draw was impossible (logits not finite): that sequence ends with an error, the others continue. An error under the
    ``seq_id`` of a row without draws ends that sequence, and while the prompt is not complete all choices of the
    request with it.
    """

    tokens: dict[int, int]
    logprobs: dict[int, TokenLogprobs] = field(default_factory=dict)
    prompt_logprobs: dict[int, tuple[TokenLogprobs, ...]] = field(default_factory=dict)
    """By the row's seq_id: one entry for each position of ``ScheduledRow.scored``."""
    pooled: dict[int, Any] = field(default_factory=dict)
    """By the row's seq_id: numpy, float64 ``[D]``, for ``ScheduledRow.pooling``."""
    errors: dict[int, str] = field(default_factory=dict)
    accepted: dict[int, list[int]] = field(default_factory=dict)
    """By the seq_id of a row with drafts: the leading drafts that equal the draws at their positions. ``tokens`` or
    ``errors`` has the draw after them."""
    accepted_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    """Entries for each of ``accepted``, by seq_id, if logprobs are requested."""
    sound: set[int] = field(default_factory=set)
    """Seq_ids in ``errors`` whose model logits were finite: the error lies in the sampling settings, and the KV that
    this step wrote is valid."""


class Handle(Protocol):
    """A submitted batch. ``draw`` is called once, after the previous tokens of its sequences have been committed: draws
    with a ``constraint`` must wait for that. Then ``result`` may be called, once or more; it blocks until the device is
    done. A handle that knows without waiting if the device is done has an attribute ``over``."""

    def draw(self) -> None: ...
    def result(self) -> StepResult: ...


class LateWork(NamedTuple):
    """Counts of start-up work that an executor did after its start, while requests waited."""

    captures: int = 0
    """CUDA graphs captured."""
    compilations: int = 0
    """Kernels compiled, or read from the compiler's cache."""


class Executor(Protocol):
    """Runs batches in the order of submission. ``submit`` may return before the work is done.

    An executor that can launch a step in several ways has an attribute ``launched`` with the way of the newest step
    (``graph``, ``captured`` for a graph that had to be made, or ``eager``, kernel by kernel).

    If ``submit`` or a handle raises, the engine calls ``abandon``, if the executor has it. It waits until the device
    is idle and forgets all steps and sequences; earlier handles are not used again. Step numbers continue.
    """

    def submit(self, batch: ScheduledBatch) -> Handle: ...
