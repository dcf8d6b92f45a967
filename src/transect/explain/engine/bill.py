"""A request's bill: where every millisecond between its arrival and its last token went.

The time is cut at the moments that the decision log holds, and each piece gets one name. So the parts add up to the
whole by construction; nothing is estimated but the division of a step between a request and the others in it
(``StepWork.share``: what the step would have been without them, by their floors).

A request that was continued in another engine has one bill for all engines that had it, if their logs are there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .log import DecisionRunLog, Life, LoggedStep, StepRow
from .work import StepWork

PARTS: Mapping[str, str] = {
    "intake": "on its way into the engine",
    "earlier": "in an earlier engine, whose log is not there, and on its way from it",
    "hand-over": "its engine ended: until another one had taken it",
    "grammar": "its grammar was being compiled",
    "queue: places": "queue: max_num_seqs sequences ran",
    "queue: kv": "queue: too few free KV blocks",
    "queue: adapters": "queue: max_loras other adapters ran",
    "queue: budget": "queue: the step was full of tokens",
    "queue: batch": "queue: the static batch ran",
    "queue: flight": "queue: the step under way had to end first",
    "starved": "admitted, but a step had no room for it",
    "preempted": "preempted; waited to start again",
    "recompute": "recomputed tokens after preemption",
    "ranks": "moving numbers between ranks in its steps, and waiting for the last of them",
    "others": "tokens of others in its steps",
    "compute": "its own tokens",
    "host": "between steps",
}
"""Names of parts with their meanings, in their fixed order."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a request's life in seconds: its parts, their floor, and their sum."""

    seconds: float
    parts: Mapping[str, float]
    floor: float
    """Least time for the span's own tokens alone; 0 if device or model is unknown."""
    tokens: int


@dataclass(frozen=True, slots=True)
class Bill:
    """Time of one choice of a request by cause: up to its first token, and from there to its last."""

    request_id: str
    choice: int
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    finish_reason: str
    """Finish reason; empty while the choice is unfinished."""
    ttft: Span | None
    """Time up to the first token; None before it."""
    decode: Span | None
    engines: int = 1
    """Engines that had the request one after another, of those whose logs are there."""
    drafted_tokens: int = 0
    """Tokens that were drafted for it (speculative decoding), and of these the accepted ones."""
    accepted_tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the bill for JSON; times in milliseconds."""
        found: dict[str, Any] = asdict(self)
        for name in ("ttft", "decode"):
            span = getattr(self, name)
            if span is not None:
                found[name] = {
                    "ms": 1e3 * span.seconds,
                    "parts_ms": {part: 1e3 * value for part, value in span.parts.items()},
                    "floor_ms": 1e3 * span.floor or None,
                    "tokens": span.tokens,
                }
        return found

    def lines(self) -> list[str]:
        """Return the bill in lines of text."""
        cached = f" ({self.cached_tokens} cached)" if self.cached_tokens else ""
        head = f"request {self.request_id}, choice {self.choice}: {self.prompt_tokens} prompt tokens{cached}"
        head = f"{head}, {self.output_tokens} output tokens, {self.finish_reason or 'still running'}"
        found = [head if self.engines == 1 else f"{head}, in {self.engines} engines one after another"]
        if self.ttft is None:
            found.append("no first token yet")
        else:
            found += _span_lines("TTFT", self.ttft)
        if self.decode is not None:
            found += _span_lines("decode", self.decode)
        if self.drafted_tokens:
            share = f"{self.accepted_tokens / self.drafted_tokens:.0%}"
            found.append(f"drafts: {self.drafted_tokens} tokens, {self.accepted_tokens} of them accepted ({share})")
        return found


@dataclass(frozen=True, slots=True)
class _Stay:
    """One choice of a request in one engine."""

    log: DecisionRunLog
    life: Life
    work: StepWork
    known: int
    """Tokens of the choice that were known before."""
    own: list[tuple[int, StepRow]]
    """Its rows in steps that were done, with the indices of the steps."""

    @classmethod
    def of(cls, log: DecisionRunLog, life: Life, work: StepWork, choice: int) -> _Stay:
        """Collect the rows of a choice. The leader computes the prompt for all choices; after that each has rows of its
        own."""
        added = life.added
        first, last, prompt = added.first_seq, added.first_seq + choice, added.prompt_tokens
        own = [(index, row) for index, row in life.steps if row[0] == last or (row[0] == first and row[1] < prompt)]
        own = [(index, row) for index, row in own if log.steps[index].at is not None]
        return cls(log, life, work, added.known[choice] if added.known is not None else 0, own)

    def tokens(self, until: float) -> list[float]:
        """List the times of its tokens after ``known``, up to the answer's token ``until``."""
        first = self.life.added.prompt_tokens
        found: list[float] = []
        for index, row in self.own:
            step = self.log.steps[index]
            if step.at is not None and self.known <= step.end(row) - first < until:
                found += [step.at] * (1 + step.accepted.get(row[0], 0))
        return found

    def drafts(self) -> tuple[int, int]:
        """Count its drafted and accepted tokens."""
        steps = [(self.log.steps[index], row) for index, row in self.own]
        return sum(step.drafted(row) for step, row in steps), sum(step.accepted.get(row[0], 0) for step, row in steps)


def bill(
    log: DecisionRunLog,
    name: str,
    work: StepWork,
    choice: int = 0,
    earlier: Sequence[tuple[DecisionRunLog, StepWork]] = (),
) -> Bill:
    """Return the bill of a request.

    Args:
        log: of the last engine that had it.
        earlier: the logs of other engines; what they have of the request before ``log`` is on the bill too.

    Raises:
        ValueError: the log has no such request, or the request no such choice.
    """
    added = log.life(name).added
    if not 0 <= choice < added.n:
        raise ValueError(f"request {name!r} has choices 0 to {added.n - 1}, not {choice}")
    stays = _stays(log, name, work, choice, earlier)
    life = stays[-1].life
    knowns = [*(stay.known for stay in stays[1:]), math.inf]
    moments = [stay.tokens(until) for stay, until in zip(stays, knowns, strict=True)]
    tokens = [at for each in moments for at in each]
    reason, count, _ = life.ends.get(choice, ("", 0, b""))
    if not reason:
        count = max(0, stays[-1].known) + len(moments[-1])
    own = stays[0].own
    found = Bill(
        added.request_id, choice, added.prompt_tokens, own[0][1][1] if own else 0, count, reason, None, None, len(stays)
    )
    if not tokens:
        return found
    meter = _Meter(stays)
    ttft = meter.span(stays[0].life.added.arrival, tokens[0])
    decode = meter.span(tokens[0], tokens[-1]) if len(tokens) > 1 else None
    drafted, accepted = (sum(counts) for counts in zip(*(stay.drafts() for stay in stays), strict=True))
    return replace(found, ttft=ttft, decode=decode, drafted_tokens=drafted, accepted_tokens=accepted)


def _stays(
    log: DecisionRunLog, name: str, work: StepWork, choice: int, earlier: Sequence[tuple[DecisionRunLog, StepWork]]
) -> list[_Stay]:
    """List the engines that had a choice, oldest first."""
    life = log.life(name)
    exact = life.added.request_id
    before = [(each, each.requests[exact], its_work) for each, its_work in earlier if exact in each.requests]
    before.sort(key=lambda each: each[1].added.at)
    lives = [(log, life, work)]
    while lives[0][1].added.known is not None:
        older = [each for each in before if each[1].added.at < lives[0][1].added.at]
        if not older:
            break
        lives.insert(0, older[-1])
    while len(lives) > 1 and (lives[-1][1].added.known or [0])[choice] < 0:
        lives.pop()  # the choice had ended before
    return [_Stay.of(*each, choice) for each in lives]


class _Meter:
    """Cuts a life into named pieces, in order."""

    def __init__(self, stays: Sequence[_Stay]) -> None:
        self.pieces: list[tuple[float, float, str]] = []
        """(begin, end, part), without holes."""
        self.floors: list[tuple[float, float, int]] = []
        """(end of the step, floor of the own row, its tokens)."""
        self._reached = 0
        """Positions that have been computed."""
        for number, stay in enumerate(stays):
            self._cover(stay, first=number == 0)

    def span(self, begin: float, end: float) -> Span:
        """Return the pieces between two moments."""
        parts = dict.fromkeys(PARTS, 0.0)
        for first, last, name in self.pieces:
            parts[name] += max(0.0, min(last, end) - max(first, begin))
        floor = sum(seconds for at, seconds, _ in self.floors if begin < at <= end)
        tokens = sum(count for at, _, count in self.floors if begin < at <= end)
        return Span(end - begin, {name: value for name, value in parts.items() if value}, floor, tokens)

    def _cover(self, stay: _Stay, first: bool) -> None:
        added, steps = stay.life.added, stay.log.steps
        way = "grammar" if added.grammar else "intake"
        if added.known is not None:
            way = "earlier" if first else "hand-over"
        self._piece(added.arrival, added.at, way)
        at = added.at
        expected = -1
        previous = -1
        for index, row in stay.own:
            step = steps[index]
            assert step.at is not None
            if expected < 0:
                self._queued(steps, at, step)
            else:
                lost = row[1] != expected
                between = [steps[i] for i in range(previous + 1, index)]
                self._between(at, step.begins, between, "preempted" if lost else "starved")
            begins = step.begins + min(step.ranks, step.seconds)
            self._piece(step.begins, begins, "ranks")
            mine = stay.work.share([row], step.rows) * (step.at - begins)
            end = step.end(row)
            anew = max(0, min(self._reached, end) - row[1]) / row[2]
            middle = step.at - mine
            self._piece(begins, middle, "others")
            self._piece(middle, middle + mine * anew, "recompute")
            self._piece(middle + mine * anew, step.at, "compute")
            self.floors.append((step.at, stay.work.floor([row]).seconds, row[2]))
            at, previous = step.at, index
            expected = end
            self._reached = max(self._reached, expected)

    def _queued(self, steps: Sequence[LoggedStep], at: float, first: LoggedStep) -> None:
        """Name the time from joining the queue to the first step, by the reason that each decision in between gave."""
        name = "queue: flight"
        for step in steps:
            moment = step.planned.at
            if moment <= at:
                continue
            if step is first or moment >= first.begins:
                break
            self._piece(at, moment, name)
            at, name = moment, f"queue: {step.planned.held_back or 'flight'}"
        self._piece(at, first.begins, name)

    def _between(self, at: float, until: float, steps: list[LoggedStep], name: str) -> None:
        """Name the time between two of the request's steps, in which other steps ran, or none."""
        for step in steps:
            if step.at is None:
                continue
            self._piece(at, step.begins, "host" if name == "starved" else name)
            self._piece(step.begins, step.at, name)
            at = max(at, step.at)
        self._piece(at, until, "host" if name == "starved" else name)

    def _piece(self, begin: float, end: float, name: str) -> None:
        if self.pieces:
            begin = max(begin, self.pieces[-1][1])
        if end > begin:
            self.pieces.append((begin, end, name))


def _span_lines(name: str, span: Span) -> list[str]:
    head = f"{name} {1e3 * span.seconds:.1f} ms = "
    head += " + ".join(f"{part} {1e3 * value:.1f}" for part, value in span.parts.items())
    if span.floor:
        head += f"; floor {1e3 * span.floor:.1f}"
    rows = [head]
    for part, value in span.parts.items():
        rows.append(f"  {100 * value / span.seconds:5.1f}%  {1e3 * value:9.2f} ms  {PARTS[part]}")
    return rows
