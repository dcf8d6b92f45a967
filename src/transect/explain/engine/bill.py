"""A request's bill: where every millisecond between its arrival and its last token went.

The time is cut at the moments that the decision log holds, and each piece gets one name. So the parts add up to the
whole by construction; nothing is estimated but the division of a step between a request and the others in it
(``StepWork.share``: what the step would have been without them, by their floors).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .log import Life, LoggedStep, RunLog, StepRow
from .work import StepWork

PARTS: Mapping[str, str] = {
    "intake": "on its way into the engine",
    "grammar": "its grammar was being compiled",
    "queue: places": "queue: max_num_seqs sequences ran",
    "queue: kv": "queue: too few free KV blocks",
    "queue: budget": "queue: the step was full of tokens",
    "queue: batch": "queue: the static batch ran",
    "queue: flight": "queue: the step under way had to end first",
    "starved": "admitted, but a step had no room for it",
    "preempted": "its KV blocks were taken; waited to begin anew",
    "recompute": "computed anew what it had lost",
    "ranks": "moving numbers between ranks in its steps, and waiting for the last of them",
    "others": "tokens of others in its steps",
    "compute": "its own tokens",
    "host": "between steps",
}
"""Name of a part, and what it means. They are always given in this order."""


@dataclass(frozen=True, slots=True)
class Span:
    """A stretch of a request's life in seconds: its parts, their floor, and their sum."""

    seconds: float
    parts: Mapping[str, float]
    floor: float
    """The least time for its own tokens alone; 0 where device or model is not known."""
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
    """Empty while the choice is unfinished."""
    ttft: Span | None
    """Time up to the first token; None before it."""
    decode: Span | None
    drafted_tokens: int = 0
    """Tokens that were drafted for it (speculative decoding), and of these the accepted ones."""
    accepted_tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        """For JSON; times in milliseconds."""
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
        found = [f"{head}, {self.output_tokens} output tokens, {self.finish_reason or 'still running'}"]
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


def bill(log: RunLog, name: str, work: StepWork, choice: int = 0) -> Bill:
    """Return the bill of a request.

    Raises:
        ValueError: the log has no such request, or the request no such choice.
    """
    life = log.life(name)
    if not 0 <= choice < life.added.n:
        raise ValueError(f"request {name!r} has choices 0 to {life.added.n - 1}, not {choice}")
    prompt = life.added.prompt_tokens
    first, last = life.added.first_seq, life.added.first_seq + choice
    # The leader computes the prompt for all choices; from there on each has rows of its own.
    own = [(index, row) for index, row in life.steps if row[0] == last or (row[0] == first and row[1] < prompt)]
    own = [(index, row) for index, row in own if log.steps[index].at is not None]
    reason, count, _ = life.ends.get(choice, ("", 0, b""))
    tokens = [index for index, row in own if row[1] + row[2] >= prompt]
    if not reason:
        count = len(tokens)
    cached = own[0][1][1] if own else 0
    if not tokens:
        return Bill(life.added.request_id, choice, prompt, cached, count, reason, None, None)
    split = tokens[0]
    meter = _Meter(log, life, own, work)
    until = log.steps[split].at
    assert until is not None
    ttft = meter.span(life.added.arrival, until)
    final = log.steps[tokens[-1]].at
    assert final is not None
    decode = meter.span(until, final) if len(tokens) > 1 else None
    drafted = sum(log.steps[index].drafted(row) for index, row in own)
    accepted = sum(log.steps[index].accepted.get(row[0], 0) for index, row in own)
    return Bill(life.added.request_id, choice, prompt, cached, count, reason, ttft, decode, drafted, accepted)


class _Meter:
    """Names the pieces of a life, one after the other."""

    def __init__(self, log: RunLog, life: Life, own: list[tuple[int, StepRow]], work: StepWork) -> None:
        self.log, self.life, self.work = log, life, work
        self.pieces: list[tuple[float, float, str]] = []
        """(begin, end, part), without holes."""
        self.floors: list[tuple[float, float, int]] = []
        """(end of the step, floor of the own row, its tokens)."""
        self._cover(own)

    def span(self, begin: float, end: float) -> Span:
        """Return the pieces between two moments."""
        parts = dict.fromkeys(PARTS, 0.0)
        for first, last, name in self.pieces:
            parts[name] += max(0.0, min(last, end) - max(first, begin))
        floor = sum(seconds for at, seconds, _ in self.floors if begin < at <= end)
        tokens = sum(count for at, _, count in self.floors if begin < at <= end)
        return Span(end - begin, {name: value for name, value in parts.items() if value}, floor, tokens)

    def _cover(self, own: list[tuple[int, StepRow]]) -> None:
        added = self.life.added
        self._piece(added.arrival, added.at, "grammar" if added.grammar else "intake")
        at = added.at
        expected = -1
        reached = 0
        previous = -1
        for index, row in own:
            step = self.log.steps[index]
            assert step.at is not None
            if expected < 0:
                self._queued(at, step)
            else:
                lost = row[1] != expected
                between = [self.log.steps[i] for i in range(previous + 1, index)]
                self._between(at, step.begins, between, "preempted" if lost else "starved")
            begins = step.begins + min(step.ranks, step.seconds)
            self._piece(step.begins, begins, "ranks")
            mine = self.work.share([row], step.rows) * (step.at - begins)
            end = step.end(row)
            anew = max(0, min(reached, end) - row[1]) / row[2]
            middle = step.at - mine
            self._piece(begins, middle, "others")
            self._piece(middle, middle + mine * anew, "recompute")
            self._piece(middle + mine * anew, step.at, "compute")
            self.floors.append((step.at, self.work.floor([row]).seconds, row[2]))
            at, previous = step.at, index
            expected = end
            reached = max(reached, end)

    def _queued(self, at: float, first: LoggedStep) -> None:
        """From joining the queue to the first step: named by what each decision in between held against the head."""
        name = "queue: flight"
        for step in self.log.steps:
            moment = step.planned.at
            if moment <= at:
                continue
            if step is first or moment >= first.begins:
                break
            self._piece(at, moment, name)
            at, name = moment, f"queue: {step.planned.held_back or 'flight'}"
        self._piece(at, first.begins, name)

    def _between(self, at: float, until: float, steps: list[LoggedStep], name: str) -> None:
        """Between two own steps: other steps ran, or none."""
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
