"""Disturbances of a simulated fleet: engines that fail, leave or are replaced, a router that dies, clients that hang
up."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Protocol

from ..bench.traces.asked import Asked
from ..engine.scheduling.policies.routing import Router, Ticket
from ..engine.scheduling.simulation import SimulatedEngine, Timeline

Action = Callable[[float], None]
"""Called with the time, in seconds."""


class Disturbance(Protocol):
    """A disturbance of a fleet. Times are seconds since the first arrival could come."""

    def begin(self, fleet: Disturbed) -> None:
        """Plan its events by ``fleet.at``."""
        ...


@dataclass(frozen=True, slots=True)
class Kill:
    """An engine that fails at ``at`` seconds, and comes back ``back`` seconds later (``inf``: never). The router sends
    requests there for ``notice`` more seconds. Then all requests of the engine continue elsewhere from the tokens that
    are known."""

    at: float
    engine: int = 0
    back: float = 60.0
    notice: float = 0.0

    def begin(self, fleet: Disturbed) -> None:
        """Plan the failure, and the moment when it is noticed."""
        fleet.at(self.at, lambda now: fleet.silence(self.engine, now))
        fleet.at(self.at + self.notice, lambda now: fleet.lose(self.engine, self.at, now, self.at + self.back))


@dataclass(frozen=True, slots=True)
class Leave:
    """An engine that gets no more requests from ``at`` on, and stops after its last one, or after ``limit`` seconds."""

    at: float
    engine: int = 0
    limit: float = math.inf

    def begin(self, fleet: Disturbed) -> None:
        """Plan the departure."""
        fleet.at(self.at, lambda now: fleet.retire(self.engine, now, self.limit))


@dataclass(frozen=True, slots=True)
class Roll:
    """All engines are replaced, one after another: a new one starts within ``start_s``, then an old one leaves."""

    at: float
    start_s: float
    limit: float = math.inf

    def begin(self, fleet: Disturbed) -> None:
        """Plan the first replacement; each plans the next."""

        def replace(old: list[int], now: float) -> None:
            if old:
                fleet.start(now, now + self.start_s)
                fleet.at(
                    now + self.start_s,
                    lambda ready: fleet.retire(old[0], ready, self.limit, lambda gone: replace(old[1:], gone)),
                )

        fleet.at(self.at, lambda now: replace(fleet.engines(), now))


@dataclass(frozen=True, slots=True)
class RouterDeath:
    """A router that dies at ``at``, and takes requests again ``back`` seconds later. All streams break off."""

    at: float
    back: float

    def begin(self, fleet: Disturbed) -> None:
        """Plan the outage."""
        fleet.at(self.at, lambda now: fleet.break_off(now + self.back))


@dataclass(frozen=True, slots=True)
class HangUp:
    """Clients that leave at ``at``, before their answers are complete: those of the requests with these numbers."""

    at: float
    requests: frozenset[int]

    def begin(self, fleet: Disturbed) -> None:
        """Plan the moment."""
        fleet.at(self.at, lambda now: fleet.hang_up(self.requests))


@dataclass(slots=True)
class Sent:
    """A request in progress."""

    number: int
    asked: Asked
    ticket: Ticket | None
    line: Timeline
    told: int = 0
    before: list[float] = field(default_factory=list)
    """Times of tokens drawn by engines that have failed since."""


class Member:
    """An engine of the fleet."""

    def __init__(self, engine: SimulatedEngine, began: float) -> None:
        self.engine, self.began, self.ended = engine, began, -1.0
        self.ready_at, self.draining, self.silent = began, False, False
        self.sent: dict[str, Sent] = {}
        self.then: Action | None = None
        """Called when the engine has stopped."""

    @property
    def alive(self) -> bool:
        """True until the engine has stopped, or its failure was noticed."""
        return self.ended < 0


class Disturbed:
    """The part of ``Fleet`` that disturbances use: events, and what they do to engines and requests."""

    _router: Router
    _send: Callable[..., None]
    _stop: Callable[[Member, float], None]
    _run_to: Action
    start: Callable[[float, float], None]

    def __init__(self, disturbances: Sequence[Disturbance]) -> None:
        self._disturbances = disturbances
        self._events: list[tuple[float, int, Action]] = []
        self._order = count()
        self._members: list[Member] = []
        """Engines by the router's number; a new engine replaces one that has ended."""
        self._down_until, self._dropped = -1.0, 0

    def plan_events(self) -> None:
        """Let all disturbances plan their events."""
        for disturbance in self._disturbances:
            disturbance.begin(self)

    def at(self, time: float, action: Action) -> None:
        """Call ``action`` at ``time``, in the order of these calls if times are equal."""
        if time < math.inf:
            heapq.heappush(self._events, (time, next(self._order), action))

    def happen(self, until: float) -> None:
        """Let the events up to ``until`` happen."""
        while self._events and self._events[0][0] <= until:
            time, _, action = heapq.heappop(self._events)
            self._run_to(time)
            action(time)

    def engines(self) -> list[int]:
        """List the engines that have not stopped, by number."""
        return [place for place, each in enumerate(self._members) if each.alive]

    def silence(self, engine: int, now: float) -> None:
        """Let an engine compute nothing any more, unnoticed."""
        self._members[engine].silent = True

    def lose(self, engine: int, failed: float, now: float, back: float) -> None:
        """Notice that an engine has failed at ``failed``; another one is ready at ``back``."""
        member = self._members[engine]
        if not member.alive:
            return
        self._stop(member, failed)
        if back < math.inf:
            self.start(failed, back)
        self._send_again(member, failed, now)

    def retire(self, engine: int, now: float, limit: float, then: Action | None = None) -> None:
        """Send an engine no more requests, so that it stops after its last one. Those left after ``limit`` seconds
        continue on others. ``then`` is called when the engine has stopped."""
        member = self._members[engine]
        member.draining, member.then = True, then

        def end(late: float) -> None:
            if member.alive:
                self._send_again(member, late, late)
                self._stop(member, late)

        self.at(now + limit, end)

    def break_off(self, back: float) -> None:
        """Drop all requests, and those that come before ``back``."""
        self._down_until = back
        self.hang_up(None)

    def hang_up(self, numbers: frozenset[int] | None) -> None:
        """Drop the requests with these numbers, or all."""
        for member in self._members:
            for name, sent in list(member.sent.items()):
                if numbers is None or sent.number in numbers:
                    del member.sent[name]
                    member.engine.core.abort(name)
                    self._dropped += 1
                    if sent.ticket is not None:
                        self._router.done(sent.ticket)

    def _send_again(self, member: Member, failed: float, now: float) -> None:
        lost = list(member.sent.values())
        member.sent.clear()
        for sent in lost:
            if sent.ticket is not None:
                self._router.done(sent.ticket)
            known = sent.before + [moment for moment in sent.line.moments if moment <= failed]
            if len(known) >= sent.asked.output_tokens:
                known = known[: sent.asked.output_tokens - 1]
            self._send(sent.number, sent.asked, now, known)
