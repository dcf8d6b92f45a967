"""Some engines behind a router on one virtual clock: the shipping scheduler, prefix cache, router and scaling policy.

Each engine has a clock of its own. When a request comes, all run up to that moment, as far as their steps allow; then
the router chooses. Engines may start, drain and fail while requests come.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, repeat
from operator import add
from random import Random
from typing import Any

from ..bench.load import Record
from ..bench.traces.asked import Asked
from ..costs.steps import StepLoad
from ..costs.warmth import Slowdown
from ..engine.scheduling.drafters.registry import SpeculativeConfig
from ..engine.scheduling.leap import DecodeSeconds
from ..engine.scheduling.policies.routing import TYPICAL_OUTPUT, Router
from ..engine.scheduling.policies.scaling import Scaler, Seen
from ..engine.scheduling.scheduler_config import SchedulerConfig
from ..engine.scheduling.simulation import SimulatedEngine, Timeline
from ..engine.scheduling.virtual_device import StepSeconds
from .disturbances import Disturbance, Disturbed, Kill, Member, Sent
from .requests import Tokens, shares_prefixes

LESSONS, LESSON_CONTEXT = 3, 512
"""Rounds of steps whose times an engine knows from the start, and the positions of a sequence in them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineModel:
    """Behaviour of one engine. Times are seconds.

    Attributes:
        scheduler: its limits.
        seconds: of a step. by_load: of a step with this work, for steps that only decode and for what an engine has
            learned of its steps before it is looked at.
        latency: from the beginning of a step until its tokens are known, where stages of a pipeline work on several
            steps at a time; None if that is ``seconds``.
        lag: steps that are planned ahead of the tokens.
        host: of the host before each step.
        intake: from a request's arrival until the engine has it; the next request waits for that.
        outlet: from a token until the client has it.
        outlets: the same for steps with different numbers of rows, as (rows, seconds) by rows; if there are any, they
            replace ``outlet``.
        jitter: (rows, quantiles) by rows: deviations of a token's ``outlet``, in seconds.
        warming: effect of a device's work on its steps, if that is known.
        learned: ``StepTimes.state`` of an engine that has served before, if that is known.
        acceptance: chance that a draft is right if those before it are, where the scheduler drafts.
        drafter: seconds of a step of the model that drafts, if one does.
    """

    scheduler: SchedulerConfig
    seconds: StepSeconds
    by_load: DecodeSeconds
    latency: StepSeconds | None = None
    lag: int = 0
    host: float = 0.0
    intake: float = 0.0
    outlet: float = 0.0
    outlets: tuple[tuple[float, float], ...] = ()
    jitter: tuple[tuple[float, tuple[float, ...]], ...] = ()
    warming: Slowdown | None = None
    learned: Mapping[str, Any] | None = None
    acceptance: float | None = None
    drafter: DecodeSeconds | None = None

    def drafting(
        self, speculation: SpeculativeConfig, acceptance: float, drafter: DecodeSeconds | None = None
    ) -> EngineModel:
        """Return this engine with speculative decoding.

        Args:
            drafter: seconds of a step of the model that drafts, if one does.

        Raises:
            ValueError: a model drafts, whose times are not known, or ``acceptance`` is not a share.
        """
        if speculation.drafts_by_model and drafter is None:
            raise ValueError(
                "a profile has no step times of a model that drafts: plan for --gpu, or take the speculative method "
                "ngram or suffix"
            )
        if not 0.0 <= acceptance <= 1.0:
            raise ValueError(f"acceptance must be from 0 to 1, got {acceptance}")
        limits = replace(self.scheduler, speculation=speculation)
        return replace(self, scheduler=limits, acceptance=acceptance, drafter=drafter)

    def start(self, now: float, prefixes: bool) -> SimulatedEngine:
        """Make an engine that begins at ``now``."""
        limits = self.scheduler if prefixes else replace(self.scheduler, enable_prefix_caching=False)
        engine = SimulatedEngine(
            limits, self.seconds, lag=self.lag, host=self.host, decodes=self.by_load, latency=self.latency, now=now,
            acceptance=self.acceptance, drafter=self.drafter, warming=self.warming,
        )  # fmt: skip
        self.teach(engine)
        return engine

    def outlet_of(self, rows: int) -> float:
        """Return the seconds from the end of a step until clients have its tokens. ``rows``: of the step."""
        place = bisect_left(self.outlets, (rows, 0.0))
        if not 0 < place < len(self.outlets):
            return self.outlets[min(place, len(self.outlets) - 1)][1] if self.outlets else self.outlet
        (low, before), (high, after) = self.outlets[place - 1 : place + 1]
        return before + (after - before) * (rows - low) / (high - low)

    def shown(self, moments: list[float], rows: int, number: int) -> list[float]:
        """Return the moments at which the client has a request's tokens. ``number``: of the request, a seed."""
        outlet = self.outlet_of(rows)
        late = [moment + outlet for moment in moments] if outlet else moments
        if not self.jitter:
            return late
        _, deviations = min(self.jitter, key=lambda each: abs(each[0] - rows))
        drawn = [0.0, *Random(number).choices(deviations, k=len(late) - 1)]
        return list(accumulate(map(add, late, drawn), max))

    def teach(self, engine: SimulatedEngine) -> None:
        """Let an engine whose steps are sized by time know step times, as one that has served before."""
        if self.scheduler.itl_target is None and self.scheduler.speculation is None:
            return
        if self.learned is not None:
            engine.scheduler.times.restore(self.learned)
            return
        most, rows = self.scheduler.max_num_batched_tokens, self.scheduler.max_num_seqs
        for _ in range(LESSONS):
            for count in _doubled(rows):
                keys = count * LESSON_CONTEXT
                load = StepLoad(count, keys, 0, count, 0, count)
                engine.scheduler.times.learn(load, self.by_load(load))
                tokens = min(most, count + 16 * count)
                load = StepLoad(tokens, keys, (tokens - count) * LESSON_CONTEXT // 2, count + 1, 1, tokens)
                engine.scheduler.times.learn(load, self.by_load(load))


def _doubled(most: int) -> list[int]:
    """List 1, 2, 4, ... up to ``most``."""
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


@dataclass(slots=True)
class FleetGauges:
    """Sums over observations of engines, one for each arrival.

    Attributes:
        looks: number of them.
        kv, kv_peak: share of the KV blocks in use.
        waiting, running: requests. held: looks at which the head of a queue waited, by cause.
    """

    looks: int = 0
    kv: float = 0.0
    kv_peak: float = 0.0
    waiting: int = 0
    running: int = 0
    held: dict[str, int] = field(default_factory=dict)

    def look(self, engine: SimulatedEngine) -> None:
        """Add one observation of an engine."""
        scheduler = engine.scheduler
        used = 1 - scheduler.cache.num_free / scheduler.config.num_blocks
        self.looks += 1
        self.kv += used
        self.kv_peak = max(self.kv_peak, used)
        self.waiting += len(scheduler.waiting)
        self.running += len(scheduler.running)
        if scheduler.held_back:
            self.held[scheduler.held_back] = self.held.get(scheduler.held_back, 0) + 1


@dataclass(slots=True)
class FleetRun:
    """Outcome of a simulated load: requests and engines.

    Attributes:
        records: of the requests, in the order of the trace, as the load generator has them.
        seconds: until the last answer. engine_seconds: of all engines, from start to stop. busy: of their devices.
        prefix_hits: prompt tokens found in prefix caches, over all. sizes: (second, engines) at each change.
        dropped: number of requests that were broken off or refused.
    """

    records: list[Record]
    seconds: float
    engine_seconds: float
    busy: float
    steps: int
    preemptions: int
    prefix_hits: float
    gauges: FleetGauges
    sizes: list[tuple[float, int]]
    dropped: int = 0


class Fleet(Disturbed):
    """A number of like engines.

    Args:
        model: of each engine.
        engines: number at the start.
        scaler: changes the number, every ``interval`` seconds; None if it stays.
        start_s: seconds that an engine takes to start.
        kills, events: engines that fail; other disturbances.
        router: makes what chooses engines, from the tokens that each one's cache holds and the tokens of a block.
    """

    def __init__(
        self,
        model: EngineModel,
        engines: int = 1,
        *,
        scaler: Scaler | None = None,
        interval: float = 15.0,
        start_s: float = 60.0,
        kills: Sequence[Kill] = (),
        events: Sequence[Disturbance] = (),
        router: Callable[[list[int], int], Router] = Router,
    ) -> None:
        self.model, self.scaler, self.interval, self.start_s = model, scaler, interval, start_s
        super().__init__((*kills, *events))
        self._tokens = Tokens()
        places = engines if scaler is None else 2 * max(engines, scaler.most)  # some drain while others start
        places += engines if events else 0
        limits = model.scheduler
        self._router = router([limits.num_blocks * limits.block_size] * places, limits.block_size)
        self._engines = engines
        self._routes = engines > 1 or scaler is not None or bool(self._disturbances)
        self._gone: list[Member] = []
        self._gauges = FleetGauges()
        self._sizes: list[tuple[float, int]] = []
        self._done: list[tuple[Sent, Timeline]] = []

    def run(self, asked: Sequence[Asked]) -> FleetRun:
        """Send the requests at their times, and run to the last answer.

        Raises:
            ValueError: a request can never fit into an engine.
        """
        self._prefixes = self.model.scheduler.enable_prefix_caching and shares_prefixes(asked)
        for _ in range(self._engines):
            self.start(0.0, ready_at=0.0)
        self.plan_events()
        look, arrived, free = self.interval, 0, 0.0
        for number, each in enumerate(asked):
            began = max(each.at, free)  # a server reads and tokenizes one request after the other
            due, free = began + self.model.intake, began + self.model.intake / max(1, self._alive)
            self.happen(due)
            while self.scaler is not None and look <= due:
                self._scale(look, (number - arrived) / self.interval)
                look, arrived = look + self.interval, number
            self._run_to(due)
            self._send(number, each, due)
        self.happen(math.inf)
        for member in self._members:
            if member.alive:
                member.engine.run()
            self._collect(member)
        return self._result(len(asked))

    # Engines

    def start(self, now: float, ready_at: float) -> None:
        member = Member(self.model.start(ready_at, self._prefixes), now)
        member.ready_at = ready_at
        place = next((place for place, each in enumerate(self._members) if not each.alive), len(self._members))
        if place == len(self._members):
            self._members.append(member)
        else:
            self._gone.append(self._members[place])
            self._members[place] = member
            self._router.forget(place)
        self._changed(now)

    @property
    def _alive(self) -> int:
        return self._sizes[-1][1]

    def _changed(self, now: float) -> None:
        self._sizes.append((now, sum(each.alive for each in self._members)))

    def _ready(self, now: float) -> list[int]:
        return [
            place
            for place, each in enumerate(self._members)
            if each.alive and each.ready_at <= now and not each.draining
        ]

    def _run_to(self, now: float) -> None:
        for member in self._members:
            if member.alive and member.ready_at <= now and not member.silent:
                member.engine.run(now)
                self._collect(member)
                if member.draining and not member.sent:
                    self._stop(member, now)

    def _stop(self, member: Member, now: float) -> None:
        member.ended = now
        self._changed(now)
        if member.then is not None:
            member.then(now)

    def _scale(self, now: float, rate: float) -> None:
        assert self.scaler is not None
        self._run_to(now)
        ready = [self._members[place].engine.scheduler for place in self._ready(now)]
        starting = sum(each.alive and each.ready_at > now for each in self._members)
        blocks = max(1, sum(each.config.num_blocks for each in ready))
        used = 1 - sum(each.cache.num_free for each in ready) / blocks
        waiting, running = sum(len(each.waiting) for each in ready), sum(len(each.running) for each in ready)
        queued = sum(self._router.load(place) for place in self._ready(now))
        seen = Seen(now, len(ready), starting, waiting, running, used, rate, queued, self._tokens_per_s(now))
        wanted = self.scaler.engines(seen)
        here = len(ready) + starting
        for _ in range(wanted - here):
            self.start(now, now + self.start_s)
        for place in self._ready(now)[wanted:] if wanted < here else ():
            self._members[place].draining = True

    def _tokens_per_s(self, now: float) -> float:
        """Return the highest mean rate of an engine's tokens while it was busy; 0 before any was."""
        rates = [0.0]
        for member in (self._members[place] for place in self._ready(now)):
            stats, busy = member.engine.scheduler.stats(), member.engine.device.busy
            if busy > 0:
                rates.append((stats.prompt_tokens - stats.prefix_hit_tokens + stats.generation_tokens) / busy)
        return max(rates)

    # Requests

    def _send(self, number: int, asked: Asked, now: float, known: Sequence[float] | None = None) -> None:
        if now < self._down_until:
            self._dropped += 1
            return
        ready = self._ready(now)
        if not ready:  # the service is down: requests wait for the next engine
            place = min((m.ready_at, i) for i, m in enumerate(self._members) if m.alive)[1]
            ready, now = [place], self._members[place].ready_at
        name = f"{number}" if known is None else f"{number}+{len(known)}"
        request = self._tokens.request(name, asked, None if known is None else len(known))
        ticket, place = None, ready[0]
        if self._routes:
            outputs = min(asked.output_tokens, TYPICAL_OUTPUT)
            ticket = self._router.send(request.prompt_token_ids, outputs, ready)
            place = ticket.engine
        member = self._members[place]
        if not member.silent:
            member.engine.run(now)
        member.engine.add(request, [repeat(self._tokens.answer(asked))])
        sent = Sent(number, asked, ticket, member.engine.lines[name, 0], before=list(known or ()))
        member.sent[name] = sent
        self._gauges.look(member.engine)

    def _collect(self, member: Member) -> None:
        """Take finished requests, and report new tokens to the router."""
        for line in member.engine.done:
            sent = member.sent.pop(line.request_id, None)
            if sent is not None:
                if sent.ticket is not None:
                    self._router.done(sent.ticket)
                self._done.append((sent, line))
        member.engine.done.clear()
        if self._routes:
            for sent in member.sent.values():
                new = len(sent.line.moments) - sent.told
                if new and sent.ticket is not None:
                    self._router.drawn(sent.ticket, new)
                    sent.told += new

    def _result(self, count: int) -> FleetRun:
        records: list[Record | None] = [None] * count
        end = 0.0
        for sent, line in self._done:
            moments = sent.before + line.moments
            shown = self.model.shown(moments, line.rows, sent.number)
            end = max(end, shown[-1])
            at = sent.asked.at
            records[sent.number] = Record(
                at, at, shown, shown[-1], sent.asked.prompt_tokens, len(shown), None
            )  # fmt: skip
        members = [*self._members, *self._gone]
        stats = [member.engine.scheduler.stats() for member in members]
        asked_for = sum(each.prefix_query_tokens for each in stats)
        return FleetRun(
            [each for each in records if each is not None],
            end,
            sum((member.ended if not member.alive else end) - member.began for member in members),
            sum(member.engine.device.busy for member in members),
            sum(member.engine.device.steps for member in members),
            sum(each.preemptions for each in stats),
            sum(each.prefix_hit_tokens for each in stats) / asked_for if asked_for else 0.0,
            self._gauges,
            self._sizes,
            self._dropped,
        )
