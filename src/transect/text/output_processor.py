"""Conversion of the engine's token ids to text and log-probabilities, with one terminal event for every choice.

The engine knows token ids only. Here they become text; stop strings, which only text can show, are found; and each
choice gets exactly one terminal event, whatever the engine still sends for it afterwards (with async scheduling it may
be a step ahead when a stop string turns up). The server and ``LLM`` share this class, so both cut the same text.

Rules:

* A token that the engine says ended the choice (finish_reason "stop": end of sequence or a stop token) is the last of
  ``token_ids`` and is charged for, but leaves no text unless ``include_stop`` is set, or the answer is complete under
  its grammar with it.
* A stop string ends the choice at the token that completes it. That token is charged for and keeps its logprobs; later
  tokens of the same step are dropped with theirs. ``Update.aborts`` tells the engine to end the choice.
* The text of the first ``min_tokens`` tokens is not searched for stop strings.
* Text that may still turn out to begin a stop string, and bytes that are not yet a character, are held back.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from .detokenizer import IncrementalDetokenizer, TokenTable
from .outputs import CompletionOutput, Logprob, PositionLogprobs, RequestMetrics, RequestOutput
from .stop import StopAutomaton, StopMatcher


class TokenTexts(TokenTable, Protocol):
    """Part of a tokenizer that the processor uses."""

    def token_text(self, token_id: int) -> str: ...


class TokenLogprobsLike(Protocol):
    """The chosen token of a position, and the likeliest ones, likeliest first, as (token id, logprob)."""

    @property
    def token_id(self) -> int: ...
    @property
    def logprob(self) -> float: ...
    @property
    def rank(self) -> int: ...
    @property
    def top(self) -> Sequence[tuple[int, float]]: ...


class EngineOutputLike(Protocol):
    """Output of one engine step for one choice (the fields of the engine's EngineOutput)."""

    @property
    def request_id(self) -> str: ...
    @property
    def index(self) -> int: ...
    @property
    def new_token_ids(self) -> Sequence[int]: ...
    @property
    def logprobs(self) -> Sequence[TokenLogprobsLike] | None: ...
    @property
    def prompt_logprobs(self) -> Sequence[TokenLogprobsLike | None] | None: ...
    @property
    def finish_reason(self) -> str | None: ...
    @property
    def complete(self) -> bool: ...
    @property
    def stop_reason(self) -> int | str | None: ...
    @property
    def num_cached_tokens(self) -> int: ...
    @property
    def error(self) -> str | None: ...


@dataclass(slots=True)
class Update:
    """New output of one choice.

    ``text``, ``token_ids`` and ``logprobs`` (None when not asked for) are deltas; ``text`` may be empty while tokens
    are not, and vice versa. ``finish_reason`` is set once for each choice: in its terminal event. ``aborts``
    names the (request id, choice) pairs that the engine must now end. ``final`` is the whole request, set in the event
    that ends its last choice; from then on the processor has forgotten it.
    """

    request_id: str
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[PositionLogprobs] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    error: str | None = None
    aborts: list[tuple[str, int]] = field(default_factory=list)
    num_cached_tokens: int = 0
    times: Any = None
    """The engine's ``RequestTimes``, where it sent them."""
    final: RequestOutput | None = None
    given: bool = False
    """True for the tokens that the request gave the choice to begin with."""
    approximate: bool = False
    """True if another engine, with other bits, continues the choices: the rest may differ from the first engine's
    answer."""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def absorb(self, later: Update) -> None:
        """Merge the choice's next update into this one."""
        self.text += later.text
        self.token_ids.extend(later.token_ids)
        if later.logprobs is not None:
            self.logprobs = [*(self.logprobs or ()), *later.logprobs]
        self.finish_reason, self.stop_reason, self.error = later.finish_reason, later.stop_reason, later.error
        self.aborts.extend(later.aborts)
        self.num_cached_tokens = max(self.num_cached_tokens, later.num_cached_tokens)
        self.times = later.times if later.times is not None else self.times
        self.final = later.final
        self.approximate = self.approximate or later.approximate


Given = tuple[tuple[int, ...] | None, ...]
"""Tokens that each choice of a request begins with; None for a choice that has ended elsewhere."""


def together(updates: list[Update | Exception]) -> list[Update | Exception]:
    """Merge consecutive updates of the same choice; ``updates`` are those of one request, in order."""
    if len(updates) == 1:
        return updates
    merged: list[Update | Exception] = []
    for update in updates:
        last = merged[-1] if merged else None
        if isinstance(last, Update) and isinstance(update, Update) and last.index == update.index:
            last.absorb(update)
        else:
            merged.append(update)
    return merged


class _Choice:
    """The running state of one choice."""

    __slots__ = ("detokenizer", "matcher", "output", "pieces")

    def __init__(self, index: int, detokenizer: IncrementalDetokenizer, matcher: StopMatcher) -> None:
        self.output = CompletionOutput(index)
        self.pieces: list[str] = []
        self.detokenizer = detokenizer
        self.matcher = matcher


@dataclass(slots=True)
class RunningRequest:
    """Tokens and text of a request that has not ended, and the bytes that may still become text."""

    prompt: str | None
    prompt_token_ids: list[int]
    choices: list[_Choice]
    min_tokens: int
    include_stop: bool
    metrics: RequestMetrics
    prompt_logprobs: list[PositionLogprobs | None] | None = None
    num_cached_tokens: int = 0
    pooled: bytes | None = None

    def output_token_ids(self) -> tuple[tuple[int, ...] | None, ...]:
        """Return the tokens of each choice; None for one that has ended."""
        outputs = (choice.output for choice in self.choices)
        return tuple(None if output.finished else tuple(output.token_ids) for output in outputs)


class OutputProcessor:
    """Holds the text side of every running request.

    Args:
        tokenizer: gives the text and bytes of tokens.
        clock: seconds, for ``RequestMetrics``.
    """

    def __init__(self, tokenizer: TokenTexts, clock: Callable[[], float] = time.monotonic) -> None:
        self._tokenizer = tokenizer
        self._clock = clock
        self._requests: dict[str, RunningRequest] = {}
        self._automata: weakref.WeakValueDictionary[tuple[str, ...], StopAutomaton] = weakref.WeakValueDictionary()
        """Automata of running requests, by their stop strings: the prompts and choices of a request share one."""

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def __len__(self) -> int:
        return len(self._requests)

    @property
    def request_ids(self) -> list[str]:
        """Running requests, oldest first."""
        return list(self._requests)

    def add(
        self,
        request_id: str,
        prompt: str | None,
        prompt_token_ids: Sequence[int],
        *,
        n: int = 1,
        stop: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
        arrival_time: float | None = None,
    ) -> None:
        """Prepare for a request that is about to be submitted to the engine.

        Raises:
            ValueError: the id is already running, n is below 1, or a stop string is empty.
        """
        self._check_new(request_id)
        if n < 1:
            raise ValueError(f"n must be at least 1, got {n}")
        automaton = self._automaton(tuple(stop))
        choices = [
            _Choice(
                index,
                IncrementalDetokenizer(self._tokenizer, skip_special_tokens, continues_text=bool(prompt_token_ids)),
                StopMatcher(automaton, include_stop),
            )
            for index in range(n)
        ]
        arrival = self._clock() if arrival_time is None else arrival_time
        self._requests[request_id] = RunningRequest(
            prompt, list(prompt_token_ids), choices, min_tokens, include_stop, RequestMetrics(arrival)
        )

    def begin(self, request_id: str, given: Given) -> list[Update]:
        """Give the choices of a new request the tokens that they begin with. Returns the updates, with their text; a
        stop string in them ends its choice."""
        request, updates = self._requests[request_id], []
        for choice, tokens in zip(request.choices, given, strict=True):
            update = Update(request_id, choice.output.index, given=True)
            if tokens is None:
                choice.output.finish_reason = "abort"
                continue
            for token in tokens:
                update.token_ids.append(token)
                choice.output.token_ids.append(token)
                stopped = self._take_text(request, choice, update, choice.detokenizer.push((token,)))
                if stopped is not None:
                    self._end(request, choice, update, "stop", stopped, None)
                    break
            updates.append(update)
        return updates

    def _automaton(self, stop: tuple[str, ...]) -> StopAutomaton:
        automaton = self._automata.get(stop)
        if automaton is None:
            automaton = self._automata[stop] = StopAutomaton(stop)
        return automaton

    def release(self, request_id: str) -> RunningRequest | None:
        """Release a request unfinished, to be continued by another processor; None if it has ended."""
        return self._requests.pop(request_id, None)

    def adopt(self, request_id: str, state: RunningRequest) -> None:
        """Adopt a request that another processor, with an equal tokenizer, has released.

        Raises:
            ValueError: the id is already running.
        """
        self._check_new(request_id)
        self._requests[request_id] = state

    def _check_new(self, request_id: str) -> None:
        if request_id in self._requests:
            raise ValueError(f"request id {request_id!r} is already running: choose another or wait for its end")

    def process(self, output: EngineOutputLike) -> Update | None:
        """Process the output of one engine step for one choice.

        Returns:
            What is new; None when the request or the choice has already ended (such output comes late and is dropped).
        """
        request = self._requests.get(output.request_id)
        if request is None or not 0 <= output.index < len(request.choices):
            return None
        choice = request.choices[output.index]
        if choice.output.finished:
            return None
        request.num_cached_tokens = max(request.num_cached_tokens, output.num_cached_tokens)
        if output.prompt_logprobs is not None:
            request.prompt_logprobs = [
                None if entry is None else self._position(entry) for entry in output.prompt_logprobs
            ]
        request.pooled = getattr(output, "pooled", None) or request.pooled
        update = Update(output.request_id, output.index, num_cached_tokens=request.num_cached_tokens)
        update.times = getattr(output, "times", None)
        stopped = self._take_tokens(request, choice, output, update)
        if stopped is not None:
            if output.finish_reason is None:
                update.aborts.append((output.request_id, output.index))
            self._end(request, choice, update, "stop", stopped, None)
        elif output.finish_reason is not None:
            self._end(request, choice, update, output.finish_reason, output.stop_reason, output.error)
        return update

    def finish(
        self, request_id: str, reason: str = "abort", error: str | None = None, choice: int | None = None
    ) -> list[Update]:
        """End every running choice of a request, or one of them, from outside the engine, e.g. because its client or
        the engine has ended.

        Returns:
            One terminal update for each choice that was running, with its held-back text; [] for an unknown request.
            Each names itself in ``aborts``, because the engine may still be working on it.
        """
        request = self._requests.get(request_id)
        if request is None:
            return []
        updates = []
        for each in request.choices:
            index = each.output.index
            if not each.output.finished and choice in (None, index):
                update = Update(request_id, index, num_cached_tokens=request.num_cached_tokens)
                update.aborts.append((request_id, index))
                self._end(request, each, update, reason, None, error)
                updates.append(update)
        return updates

    def snapshot(self, request_id: str) -> RequestOutput:
        """Return the request as it stands now; a copy that later updates do not change.

        Raises:
            ValueError: no such request is running.
        """
        request = self._requests.get(request_id)
        if request is None:
            raise ValueError(f"request {request_id!r} is not running: it has ended or was never added")
        return self._request_output(request_id, request)

    def _take_tokens(
        self, request: RunningRequest, choice: _Choice, output: EngineOutputLike, update: Update
    ) -> str | None:
        """Append the step's tokens and their text up to the one that completes a stop string; return that string."""
        tokens = output.new_token_ids
        if not tokens:
            return None
        now = self._clock()
        if request.metrics.first_token_time is None:
            request.metrics.first_token_time = now
        request.metrics.last_token_time = now
        ended_by_last = output.finish_reason == "stop" and not (request.include_stop or output.complete)
        stopped: str | None = None
        for position, token in enumerate(tokens):
            update.token_ids.append(token)
            choice.output.token_ids.append(token)
            if ended_by_last and position == len(tokens) - 1:
                break
            text = choice.detokenizer.push((token,))
            stopped = self._take_text(request, choice, update, text)
            if stopped is not None:
                break
        if output.logprobs is not None:
            taken = output.logprobs[: len(update.token_ids)]
            update.logprobs = [self._position(entry) for entry in taken]
            if choice.output.logprobs is None:
                choice.output.logprobs, choice.output.cumulative_logprob = [], 0.0
            choice.output.logprobs.extend(update.logprobs)
            choice.output.cumulative_logprob = (choice.output.cumulative_logprob or 0.0) + sum(
                entry.logprob for entry in taken
            )
        return stopped

    @staticmethod
    def _take_text(request: RunningRequest, choice: _Choice, update: Update, text: str) -> str | None:
        stopped: str | None = None
        if len(choice.output.token_ids) > request.min_tokens:
            text, stopped = choice.matcher.push(text)
        if text:
            update.text += text
            choice.pieces.append(text)
        return stopped

    def _end(
        self,
        request: RunningRequest,
        choice: _Choice,
        update: Update,
        reason: str,
        stop_reason: int | str | None,
        error: str | None,
    ) -> None:
        """Record the terminal event of a choice: release held-back text, and close the request with its last choice."""
        if choice.matcher.stopped is None:
            stopped = self._take_text(request, choice, update, choice.detokenizer.flush())
            if stopped is not None and reason in ("stop", "length"):
                reason, stop_reason = "stop", stopped
            tail = choice.matcher.flush()
            if tail:
                update.text += tail
                choice.pieces.append(tail)
        for target in (update, choice.output):
            target.finish_reason, target.stop_reason, target.error = reason, stop_reason, error
        if all(each.output.finished for each in request.choices):
            request.metrics.finished_time = self._clock()
            del self._requests[update.request_id]
            update.final = self._request_output(update.request_id, request)

    def _position(self, entry: TokenLogprobsLike) -> PositionLogprobs:
        """Convert one position to vLLM's form: the chosen token, then the likeliest ones."""
        text = self._tokenizer.token_text
        position = {entry.token_id: Logprob(entry.logprob, entry.rank, text(entry.token_id))}
        for rank, (token, logprob) in enumerate(entry.top, start=1):
            if token not in position:
                position[token] = Logprob(logprob, rank, text(token))
        return position

    @staticmethod
    def _request_output(request_id: str, request: RunningRequest) -> RequestOutput:
        outputs = []
        for choice in request.choices:
            output = choice.output
            logprobs = None if output.logprobs is None else list(output.logprobs)
            outputs.append(
                replace(output, text="".join(choice.pieces), token_ids=list(output.token_ids), logprobs=logprobs)
            )
        return RequestOutput(
            request_id=request_id,
            prompt=request.prompt,
            prompt_token_ids=list(request.prompt_token_ids),
            prompt_logprobs=None if request.prompt_logprobs is None else list(request.prompt_logprobs),
            outputs=outputs,
            finished=all(output.finished for output in outputs),
            num_cached_tokens=request.num_cached_tokens,
            metrics=replace(request.metrics),
            pooled=request.pooled,
        )
