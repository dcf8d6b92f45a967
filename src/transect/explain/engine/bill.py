"""A request's bill: where every millisecond between its arrival and its last token went.

The time is cut at the moments that the decision log holds, and each piece gets one name. So the parts add up to the
whole by construction; nothing is estimated but the division of a step between a request and the others in it
(``StepWork.share``: what the step would have been without them, by their floors).

A request that was continued in another engine has one bill for all engines that had it, if their logs are there.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from .log import DecisionRunLog, Life, StepRow
from .meter import PARTS, Meter, Span
from .work import StepWork


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
    """Number of engines with a log that had the request, one after another."""
    drafted_tokens: int = 0
    """Tokens that were drafted for it (speculative decoding), and of these the accepted ones."""
    accepted_tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return the bill for JSON; times in milliseconds."""
        found: dict[str, Any] = asdict(self)
        for name in ("ttft", "decode"):
            span = getattr(self, name)
            if span is not None:
                found[name] = span.to_dict()
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
    meter = _measured(stays)
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


def _measured(stays: Sequence[_Stay]) -> Meter:
    """Cut a life in several engines, oldest first, into named pieces."""
    meter = Meter()
    for number, stay in enumerate(stays):
        meter.begin(stay.life.added, first=number == 0)
        rows = dict(stay.own)
        steps = stay.log.steps
        first = bisect_right(steps, stay.life.added.at, key=lambda step: step.planned.at)
        for index in range(min(first, *rows, len(steps)), max(rows, default=-1) + 1):
            if steps[index].at is not None:
                meter.take(steps[index], rows.get(index), stay.work)
    return meter


def _span_lines(name: str, span: Span) -> list[str]:
    head = f"{name} {1e3 * span.seconds:.1f} ms = "
    head += " + ".join(f"{part} {1e3 * value:.1f}" for part, value in span.parts.items())
    if span.floor:
        head += f"; floor {1e3 * span.floor:.1f}"
    rows = [head]
    for part, value in span.parts.items():
        rows.append(f"  {100 * value / span.seconds:5.1f}%  {1e3 * value:9.2f} ms  {PARTS[part]}")
    return rows
