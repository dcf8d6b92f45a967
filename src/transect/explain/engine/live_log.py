"""Follow the decision log of a running engine as it grows: new steps, requests, ends."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from ...engine.scheduling.decisions import Aborted, Added, CacheReset, Done, Header, Planned, TakenBack, read_events
from .log import LoggedStep, StepReader


@dataclass(slots=True)
class End:
    """The end of one choice of a request."""

    leader: int
    """Sequence number of the request's first choice."""
    choice: int
    reason: str
    tokens: int
    at: float


@dataclass(slots=True)
class LogNews:
    """Events of a log since the last look, each kind in its order."""

    added: list[Added] = field(default_factory=list)
    steps: list[LoggedStep] = field(default_factory=list)
    """Steps that were done."""
    ends: list[End] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)
    """Times of rare events with their descriptions: the prefix cache was emptied, a step failed."""

    def __bool__(self) -> bool:
        return bool(self.added or self.steps or self.ends or self.marks)


@dataclass(slots=True)
class QueueState:
    """Facts of the newest plan of a step."""

    at: float = 0.0
    held_back: str = ""
    """See ``decisions.Planned``."""
    waiting: int = 0
    running: int = 0
    free_blocks: int = 0
    step: int = 0
    """Number of the step; 0 if nothing could run."""
    in_flight: bool = False
    """True if that step has no result yet."""


class LiveLog:
    """The unfinished requests of an engine, and its queue. Old events are not kept.

    Args:
        header: of the engine's decision log.
    """

    def __init__(self, header: Header) -> None:
        self.header = header
        self.requests: dict[int, Added] = {}
        """Unfinished requests by the sequence number of their first choice."""
        self.queue = QueueState(free_blocks=header.scheduler.get("num_blocks", 0))
        self._reader = StepReader(header, complete=False)
        self._leaders: dict[int, int] = {}
        self._left: dict[int, int] = {}
        self._gone: set[int] = set()
        """Ended sequences of requests that were never described, until ``adopt``."""

    def adopt(self, requests: Iterable[Added]) -> None:
        """Add unfinished requests of a snapshot, which joined before the first event that was taken."""
        for each in requests:
            if each.first_seq in self.requests or each.first_seq in self._gone:
                continue
            ended = [(each.known or [0] * each.n)[choice] < 0 for choice in range(each.n)]
            gone = sum(end or each.first_seq + choice in self._gone for choice, end in enumerate(ended))
            if gone < each.n:
                self._add(each, each.n - gone)
        self._gone.clear()

    def leader(self, seq: int) -> int | None:
        """Return the first sequence of the unfinished request that has ``seq``; None if there is none."""
        return self._leaders.get(seq)

    def take(self, data: bytes) -> LogNews:
        """Read the next records."""
        news = LogNews()
        for event in read_events(data):
            match event:
                case Added():
                    self._add(event, event.n)
                    news.added.append(event)
                case Planned():
                    self._reader.planned(event)
                    self.queue = QueueState(
                        event.at, event.held_back, event.waiting, event.running, event.free_blocks, event.step, True
                    )
                case Done():
                    step = self._reader.done(event)
                    if step is not None:
                        news.steps.append(step)
                    if event.step == self.queue.step:
                        self.queue.in_flight = False
                case TakenBack():
                    news.steps += self._reader.taken_back(event)
                    self.queue.in_flight = False
                    news.marks.append((event.at, f"a step failed and is computed again: {event.reason}"))
                case CacheReset():
                    news.marks.append((self.queue.at, "the prefix cache was emptied"))
            if isinstance(event, (Done, Aborted, TakenBack)):
                for seq, reason, tokens, _ in event.ended:
                    self._end(seq, reason, tokens, event.at, news)
        return news

    def _add(self, added: Added, left: int) -> None:
        self.requests[added.first_seq] = added
        self._left[added.first_seq] = left
        for choice in range(added.n):
            self._leaders[added.first_seq + choice] = added.first_seq

    def _end(self, seq: int, reason: str, tokens: int, at: float, news: LogNews) -> None:
        leader = self._leaders.get(seq)
        if leader is None:
            self._gone.add(seq)
            return
        news.ends.append(End(leader, seq - leader, reason, tokens, at))
        self._left[leader] -= 1
        if not self._left[leader]:
            del self._left[leader]
            for choice in range(self.requests.pop(leader).n):
                del self._leaders[leader + choice]
