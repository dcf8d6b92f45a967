"""A request as it arrives (``Request``), and its state in the scheduler (``RequestState``, ``Sequence``)."""

from __future__ import annotations

import math
from enum import Enum
from typing import Any

import msgspec

from ...text.grammar.bad_words import WithoutSequences
from .batch import Draw, ScheduledRow, StepResult, TokenLogprobs
from .constraint import Constraint
from .outputs import EngineOutput, RequestTimes
from .policies.admission import Claim
from .policies.order import Turn
from .sampling_params import SamplingParams

_MASK64 = 2**64 - 1

Rank = tuple[float, float, int, int, int]
"""``policies.order.Key``, then the order of arrival, then the choice."""


BYTES, NUMBER_BYTES = 4096, 36
"""Estimates of the memory of a request, and of a number in a list of it."""


class Request(msgspec.Struct, frozen=True):
    """Prompt to be continued ``params.n`` times.

    Attributes:
        request_id: unique among the unfinished requests of an engine.
        prompt_token_ids: at least one token; any sequence of non-negative ints is taken and kept as a tuple.
        params: parameters of drawing and stopping. Stop *strings* are checked by the ``OutputProcessor``.
        priority: whole number, lower runs earlier (as in vLLM), where the scheduling policy is "priority"; else 0.
            Waiting raises the rank (``policies/order.py``).
        arrival_time: seconds on the engine's clock; None for the moment of ``Scheduler.add``. For metrics only, the
            order is the order of ``add``.
        eos_token_ids: the model's end-of-sequence tokens.
        constraint: form of the answers, in its initial state; each choice gets a fork of it.
        pooling: "last" or "mean": a vector of the prompt is wanted (``executors/pooling.py``).
        client: name of who asks. Clients share the engine by their weights.
        weight: of that client, above 0.
        output_token_ids: set where begun answers are continued, in another engine or later: for each choice the tokens
            that it has drawn already, () for none, or None if the choice has ended. They count as output for penalties,
            ``min_tokens``, ``max_tokens`` and the grammar, and the next tokens are those of an undisturbed run with the
            same seed. None for a new request.
        given: True if a client gave ``output_token_ids``: the request then waits for its turn like a new one.
        adapter: content id of the adapter that computes it, 64 hexadecimal digits (``checkpoints/adapter_served.py``);
            empty for the base. The prefix cache keeps the keys and values of each apart.

    Raises:
        ValueError: the prompt is empty or holds something that is not a token id, or ``output_token_ids`` does not fit
            ``params``.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    arrival_time: float | None = None
    eos_token_ids: tuple[int, ...] = ()
    constraint: Constraint | None = None
    pooling: str | None = None
    client: str = ""
    weight: float = 1.0
    output_token_ids: tuple[tuple[int, ...] | None, ...] | None = None
    adapter: str = ""
    given: bool = False

    @property
    def carried_over(self) -> bool:
        """True if another engine has admitted the request and begun its answers."""
        return self.output_token_ids is not None and not self.given

    @property
    def in_one_piece(self) -> bool:
        """True if only the complete result is of use to the client: a vector, or log-probabilities of the prompt."""
        return self.pooling is not None or self.params.prompt_logprobs is not None

    @property
    def nbytes(self) -> int:
        """Estimate of the memory that the request holds while it waits."""
        params = self.params
        numbers = len(self.prompt_token_ids) + len(params.allowed_token_ids or ()) + 4 * len(params.logit_bias or ())
        form = 0 if params.structured_outputs is None else params.structured_outputs.nbytes
        return BYTES + NUMBER_BYTES * numbers + form

    @property
    def scored_from(self) -> int | None:
        """First position of the prompt whose log-probability is requested; None if none is."""
        return None if self.params.prompt_logprobs is None else max(self.params.prompt_logprobs_start, 1)

    @property
    def cacheable(self) -> int:
        """Leading tokens of the prompt whose results are not requested, so that the prefix cache may serve them."""
        if self.pooling == "mean":
            return 0
        return len(self.prompt_token_ids) if self.scored_from is None else self.scored_from - 1

    def new_constraint(self) -> Constraint | None:
        """Build the constraint of one more choice, before its first token; None if any token may come."""
        constraint = None if self.constraint is None else self.constraint.fork()
        if not self.params.bad_words_token_ids:
            return constraint
        return WithoutSequences(self.params.bad_words_token_ids, constraint)  # type: ignore[arg-type,return-value]

    def __post_init__(self) -> None:
        prompt = tuple(self.prompt_token_ids)
        if not prompt:
            raise ValueError("the prompt is empty: give at least one token")
        if set(map(type, prompt)) != {int} or min(prompt) < 0 or max(prompt) >= 2**31:
            for token in prompt:  # find the wrong one, if it is not a subclass
                if not isinstance(token, int) or not 0 <= token < 2**31:
                    raise ValueError(f"prompt_token_ids must be whole numbers in [0, 2**31), got {token!r}")
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise ValueError(f"priority must be a whole number (lower runs earlier), got {self.priority!r}")
        if not 0 < self.weight < float("inf"):
            raise ValueError(f"weight must be a number above 0, got {self.weight!r}")
        if self.params.prompt_logprobs_start >= max(len(prompt), 2):
            raise ValueError(
                f"prompt_logprobs_start is {self.params.prompt_logprobs_start}, but the prompt has {len(prompt)} "
                f"tokens: give at most {len(prompt) - 1}"
            )
        msgspec.structs.force_setattr(self, "prompt_token_ids", prompt)
        msgspec.structs.force_setattr(self, "eos_token_ids", tuple(self.eos_token_ids))
        if self.output_token_ids is not None:
            self._check_output(self.output_token_ids)

    def _check_output(self, given: tuple[tuple[int, ...] | None, ...]) -> None:
        params = self.params
        if len(given) != params.n or all(tokens is None for tokens in given):
            raise ValueError(f"output_token_ids must have the tokens of {params.n} choices, one of which is unfinished")
        if params.seed is None and params.temperature:
            raise ValueError("output_token_ids were drawn with a seed that is not known: give params.seed")
        if params.max_tokens is not None and any(len(tokens or ()) >= params.max_tokens for tokens in given):
            raise ValueError(f"output_token_ids has a choice with all of its {params.max_tokens} tokens: give None")


ELSEWHERE = "elsewhere"
"""``Sequence.finish_reason`` of a choice that had ended before its request came here."""


class Status(Enum):
    """State of a sequence."""

    UNBORN = "unborn"
    """A further choice of a request whose prompt is not complete: it holds nothing yet."""
    WAITING = "waiting"
    """In the queue, without KV blocks: new, or preempted."""
    RUNNING = "running"
    """Holds KV blocks and takes part in steps."""
    GONE = "gone"
    """Finished and out of all lists. Its blocks may be held until a step in flight is done."""


class Sequence:
    """One choice of a request: its tokens, how far they are computed, and the KV blocks that hold them.

    ``length`` counts prompt, known output and the tokens that steps in flight are about to draw; ``scheduled`` counts
    the positions whose KV is written or will be by steps in flight. ``length - scheduled`` tokens are to be computed.
    Choice 0 is the leader of its request: it computes the prompt for all of them.
    """

    __slots__ = (
        "adapter",
        "block_hashes",
        "block_ids",
        "cached",
        "constraint",
        "draws",
        "finish_reason",
        "first_token_time",
        "index",
        "last_step",
        "length",
        "max_length",
        "num_cached",
        "num_registered",
        "output_token_ids",
        "plain",
        "prompt_len",
        "prompt_token_ids",
        "rank",
        "request",
        "request_id",
        "scheduled",
        "seq_id",
        "shared_block",
        "status",
        "stop_ids",
    )

    def __init__(self, request: RequestState, seq_id: int, index: int, rank: Rank, seed: int) -> None:
        spec = request.spec
        params = spec.params
        self.request = request
        self.seq_id = seq_id
        self.index = index
        self.rank = rank
        """Rank; the smallest is served first and preempted last."""
        self.status = Status.UNBORN
        self.finish_reason: str | None = None
        self.output_token_ids: list[int] = []
        self.request_id = spec.request_id
        self.adapter = spec.adapter
        self.prompt_token_ids = spec.prompt_token_ids
        self.stop_ids = request.stop_ids
        self.prompt_len = len(spec.prompt_token_ids)
        self.length = self.prompt_len
        self.max_length = request.max_length
        self.scheduled = 0
        self.last_step = 0
        """Number of the last step that computes something of this sequence or draws for it."""
        self.cached = 0
        """Tokens of the sequence that the prefix cache held on arrival; 0 once it has been preempted."""
        self.block_ids: list[int] = []
        self.shared_block: int | None = None
        """Index of the partly filled block that was shared at the fork and must not be written while shared."""
        self.block_hashes: list[bytes] = []
        self.num_registered = 0
        """Leading blocks that have been offered to the prefix cache."""
        self.first_token_time: float | None = None
        self.plain = False
        """True if the first token is out and no logprobs are requested: a step's output is then a token alone."""
        self.num_cached = 0
        """``RequestState.num_cached_tokens``, once ``plain``."""
        self.constraint: Constraint | None = spec.new_constraint()
        """Constraint that has accepted ``output_token_ids``."""
        self.draws: tuple[Draw, ...] = (
            Draw(
                seq_id=seq_id,
                choice=index,
                seed=seed & _MASK64,
                params=params,
                prompt_token_ids=spec.prompt_token_ids,
                output_token_ids=self.output_token_ids,
                stop_ids=self.stop_ids,
                min_position=self.prompt_len + params.min_tokens,
                constraint=self.constraint,
            ),
        )

    def restart(self) -> None:
        """Discard KV blocks and draws in flight; the known tokens, and the state derived from them, are kept."""
        self.length = self.prompt_len + len(self.output_token_ids)
        self.scheduled = self.last_step = self.cached = self.num_registered = 0
        self.block_ids, self.shared_block, self.block_hashes = [], None, []
        if self.constraint is not None:
            self.constraint = self.request.spec.new_constraint()
            assert self.constraint is not None
            for token in self.output_token_ids:
                self.constraint.accept(token)
            self.draws = (msgspec.structs.replace(self.draws[0], constraint=self.constraint),)

    @property
    def to_compute(self) -> int:
        """Tokens that are expected to be computed once the waiting sequence runs."""
        return self.length - self.cached

    def token(self, position: int) -> int:
        """Return the known token at ``position`` of prompt + output."""
        if position < self.prompt_len:
            return self.request.spec.prompt_token_ids[position]
        return self.output_token_ids[position - self.prompt_len]

    def tokens(self, start: int, end: int) -> tuple[int, ...]:
        """Return the known tokens at positions ``start .. end - 1``."""
        prompt = self.request.spec.prompt_token_ids
        if end <= self.prompt_len:
            return prompt[start:end]
        return (*prompt[start:], *self.output_token_ids[max(start - self.prompt_len, 0) : end - self.prompt_len])

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.spec.request_id}/{self.index}, {self.status.value}, {self.scheduled} of "
            f"{self.length} tokens computed, {len(self.block_ids)} blocks)"
        )


class RequestState:
    """State of one request in the scheduler, until its last choice has ended."""

    __slots__ = (
        "arrival",
        "choices",
        "claim",
        "eos",
        "first_scheduled",
        "max_length",
        "num_cached_tokens",
        "num_live",
        "pooled",
        "prompt_done",
        "prompt_logprobs",
        "spec",
        "stop_ids",
        "turn",
    )

    def __init__(self, spec: Request, arrival: float, max_length: int) -> None:
        params = spec.params
        self.spec = spec
        self.arrival = arrival
        self.max_length = max_length
        """Most prompt + output tokens: the context length or max_tokens, whichever comes first."""
        self.eos = frozenset(() if params.ignore_eos else spec.eos_token_ids)
        self.stop_ids: tuple[int, ...] = tuple(sorted(self.eos.union(params.stop_token_ids or ())))
        self.choices: list[Sequence] = []
        self.num_live = params.n
        self.prompt_done = False
        """True if the last chunk of the prompt is scheduled (or done), and the choices have forked."""
        self.first_scheduled: float | None = None
        self.num_cached_tokens = 0
        self.turn: Turn
        """Key in the order of service, set on arrival."""
        self.claim: Claim
        """Share of the queue's memory and work, set on arrival."""
        self.pooled: Any = None
        """Partial result for ``Request.pooling``."""
        self.prompt_logprobs: list[TokenLogprobs | None] | None = None
        """Log-probabilities of the prompt by position, None before ``Request.scored_from``; None if not requested or
        already sent."""
        if params.prompt_logprobs is not None:
            self.prompt_logprobs = [None] * len(spec.prompt_token_ids)

    def asked(self, end: int) -> tuple[int | None, int, str | None]:
        """Return ``prompt_logprobs``, ``scored_from`` and ``pooling`` of a row of the prompt that ends at ``end``."""
        first = self.spec.scored_from
        if self.prompt_done:
            return None, 1, None
        if first is None or end < first:
            return None, 1, self.spec.pooling
        return self.spec.params.prompt_logprobs, first, self.spec.pooling

    def unscored(self, start: int) -> float:
        """Return the number of tokens from position ``start`` on, to the first whose logits are needed for a
        log-probability of the prompt; infinity if none are."""
        first = self.spec.scored_from
        return math.inf if first is None or self.prompt_done else max(0, first - 1 - start)

    @property
    def computed_tokens(self) -> int:
        """Tokens that were computed and drawn so far, for the client's account."""
        if self.first_scheduled is None:
            return 0
        prompt = len(self.spec.prompt_token_ids) - self.num_cached_tokens
        return prompt + sum(len(choice.output_token_ids) for choice in self.choices)

    def begin(self, now: float) -> list[Sequence]:
        """Adopt the tokens that the choices have drawn elsewhere. Returns the sequences that have tokens to compute:
        only the leader, unless the prompt was complete there."""
        given = self.spec.output_token_ids
        if given is None:
            return [self.leader]
        for choice, tokens in zip(self.choices, given, strict=True):
            if tokens is None:
                choice.finish_reason = ELSEWHERE
                self.num_live -= 1
            else:
                choice.output_token_ids.extend(tokens)
        going = self.restart()
        if self.prompt_done:
            self.first_scheduled, self.prompt_logprobs = None if self.spec.given else now, None
        return going

    def restart(self) -> list[Sequence]:
        """Discard KV blocks and draws in flight of all choices. Returns the sequences that have tokens to compute."""
        self.prompt_done = any(c.output_token_ids or c.finish_reason == ELSEWHERE for c in self.choices)
        going = []
        for choice in self.choices:
            choice.restart()
            ended = choice.finish_reason is not None
            choice.status = Status.GONE if ended else Status.UNBORN
            if choice is self.leader if not self.prompt_done else not ended:
                going.append(choice)
        return going

    def take_prompt(self, row: ScheduledRow, result: StepResult) -> None:
        """Keep a step's results for the prompt: logprobs of its tokens, a part of its vector."""
        if self.prompt_logprobs is not None and (scored := row.scored):
            entries = result.prompt_logprobs.get(row.seq_id, ())
            self.prompt_logprobs[scored.start : scored.start + len(entries)] = entries
        part = result.pooled.get(row.seq_id)
        if part is not None:  # a preempted prompt restarts
            begins = row.pooling == "last" or row.start == 0
            self.pooled = part if begins else self.pooled + part

    def give_prompt(self, output: EngineOutput) -> None:
        """Move the kept results for the prompt to the first output of the request."""
        output.prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        if self.pooled is not None:
            mean = self.spec.pooling == "mean"
            output.pooled = (self.pooled / len(self.spec.prompt_token_ids) if mean else self.pooled).tobytes()
            self.pooled = None

    @property
    def leader(self) -> Sequence:
        """The choice that computes the prompt."""
        return self.choices[0]

    def times(self, choice: Sequence, finished: float | None) -> RequestTimes:
        """Return the times to report with an output of ``choice``."""
        return RequestTimes(self.arrival, self.first_scheduled, choice.first_token_time, finished)
