"""The cards and layout that serve a load within a target. Arithmetic ranks every choice, simulation decides between the
best, and says what bounds each and what breaks first when the load grows by half."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..engine.scheduling.drafters.registry import SpeculativeConfig
from ..spec.model import ModelConfig
from .capacity import WARM, RatePoint, RequestLoad, Shape, TraceLoad, estimate, highest_rate, simulate, steady_step
from .choices import CardChoice
from .fleet import EngineModel
from .profile import MeasuredChoice
from .target import LatencyTarget

Way = CardChoice | MeasuredChoice
GROWTH = 1.5
"""Growth of the load for which the plan says what breaks first."""
MORE = 1.02
"""Factor between the numbers of engines that the search tries."""
LEAST_RATE = 1e-3
"""Lowest useful rate of an engine, in requests per second."""
MOST_ENGINES = 64
"""Most engines of a fleet in a simulation of a trace."""
CAUSES = {
    "kv": "the KV cache is full",
    "places": "max_num_seqs sequences run",
    "adapters": "sequences with max_loras adapters run",
    "budget": "prompts fill the steps",
    "": "each step takes too long",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The load of the whole service: ``rate`` requests per second, or ``users`` who think for ``think`` seconds between
    an answer and the next question.

    Attributes:
        load: requests at any rate.
        fleet: simulate all engines and the router on a trace, not one engine on its share.
        hits: share of prompt tokens that prefix caches are expected to hold, for the arithmetic.
        speculation: speculative decoding, and the chance that a draft is right if those before it are. The arithmetic
            that ranks choices does not count it; simulations do.
        draft: the model that drafts, if one does.
    """

    load: RequestLoad
    rate: float = 0.0
    users: int = 0
    think: float = 0.0
    fleet: bool = False
    hits: float = 0.0
    speculation: tuple[SpeculativeConfig, float] | None = None
    draft: ModelConfig | None = None

    def engine(self, choice: Way) -> EngineModel:
        """Return the engine of a choice, as the load finds it."""
        if self.speculation is None:
            return choice.engine
        if self.draft is None or isinstance(choice, MeasuredChoice):
            return choice.engine.drafting(*self.speculation)
        return choice.engine_beside(self.draft).drafting(*self.speculation, choice.seconds_of(self.draft))

    def rate_for(self, e2e: float) -> float:
        """Return the requests per second of the whole service, if an answer takes ``e2e`` seconds."""
        return self.users / (self.think + e2e) if self.users else self.rate


@dataclass(slots=True)
class Estimated:
    """A choice by arithmetic: requests per second of one engine, what bounds it, engines, and dollars per hour; without
    prices cards stand for dollars."""

    choice: Way
    rate: float
    bound: str
    engines: int
    per_hour: float

    @property
    def cards(self) -> int:
        """Cards of all engines."""
        return self.engines * self.choice.cards


@dataclass(slots=True)
class SimulatedChoice:
    """A simulated choice.

    Attributes:
        most: the highest rate of one engine within the target; in a fleet, of all engines.
        missed: figures that the next higher rate misses, the worst first. cause: of the misses.
        engines: that the load needs. rate: of the whole service.
        level: the service under its load. grown: under ``GROWTH`` times as much.
        parts: seconds of a typical step by cause.
        points: all simulated rates of one engine, for curves.
    """

    estimated: Estimated
    most: RatePoint
    missed: list[str]
    cause: str
    engines: int
    rate: float
    level: RatePoint
    grown: RatePoint
    breaks: list[str]
    breaks_cause: str
    parts: Mapping[str, float]
    points: list[RatePoint] = field(default_factory=list)

    @property
    def choice(self) -> Way:
        """The card, the layout and the formats."""
        return self.estimated.choice

    @property
    def cards(self) -> int:
        """Cards of all engines."""
        return self.engines * self.choice.cards


@dataclass(slots=True)
class FleetPlan:
    """Simulated choices, the cheapest first; the rest by arithmetic; and the reasons against others."""

    demand: Demand
    target: LatencyTarget
    answers: list[SimulatedChoice]
    estimated: list[Estimated]
    refused: list[tuple[Way, str]]
    prices: Mapping[str, float]

    def cost(self, answer: SimulatedChoice) -> dict[str, float]:
        """Return dollars per hour, per million output tokens, per million tokens and per user and hour; empty without a
        price. ``joules_per_output_token`` is at the most power of the cards while they are busy; 0 if not known."""
        card, run = answer.choice.card, answer.level.run
        requests = len(run.records)
        tokens_out = sum(each.output_tokens for each in run.records)
        joules = card.watts * answer.choice.cards * run.busy
        found = {"joules_per_output_token": joules / tokens_out}
        price = self.prices.get(card.name)
        if price is not None:
            hourly = price * answer.cards
            per_hour = 3600 * answer.rate / requests
            tokens = tokens_out + sum(each.input_tokens for each in run.records)
            found |= {
                "dollars_per_hour": hourly,
                "dollars_per_million_output_tokens": hourly / (per_hour * tokens_out) * 1e6,
                "dollars_per_million_tokens": hourly / (per_hour * tokens) * 1e6,
            }
            if self.demand.users:
                found["dollars_per_user_hour"] = hourly / self.demand.users
        return found


def plan_serving(
    ways: Sequence[tuple[Way, str]],
    demand: Demand,
    target: LatencyTarget,
    *,
    prices: Mapping[str, float] | None = None,
    simulated: int = 3,
) -> FleetPlan:
    """Plan a service.

    Args:
        ways: choices, each with why it cannot be (``choices.choices``).
        prices: dollars per hour of a card, by its name.
        simulated: choices that are simulated, the cheapest by arithmetic.

    Raises:
        ValueError: no choice fits, or none meets the target at any rate.
    """
    prices = prices or {}
    possible = [choice for choice, why in ways if not why]
    refused = [(choice, why) for choice, why in ways if why]
    if not possible:
        raise ValueError(
            f"no choice can serve this model: {refused[0][0]}: {refused[0][1]}" if refused else "no choice"
        )
    shape = Shape.of(demand.load.at(1.0), demand.hits)
    ranked = sorted(
        (_estimated(choice, shape, demand, target, prices) for choice in possible),
        key=lambda each: (each.per_hour, each.cards, -each.rate),
    )
    answers: list[SimulatedChoice] = []
    waiting = list(ranked)
    while waiting and len(answers) < simulated:
        found = _answer(waiting.pop(0), shape, demand, target)
        if found is not None:
            answers.append(found)
    if not answers:
        raise ValueError(f"no choice keeps {target} at any rate: allow more time, or name other cards or formats")
    answers.sort(key=lambda each: (prices.get(each.choice.card.name, 1.0) * each.cards, -each.most.rate))
    kept = {id(each.estimated) for each in answers}
    return FleetPlan(demand, target, answers, [each for each in ranked if id(each) not in kept], refused, prices)


def _estimated(
    choice: Way, shape: Shape, demand: Demand, target: LatencyTarget, prices: Mapping[str, float]
) -> Estimated:
    rate, bound = estimate(choice.steps, choice.kv_tokens, shape, target)
    step = steady_step(choice.steps, shape, rate)
    e2e = shape.output * step[0] if step is not None else math.inf
    engines = math.ceil(demand.rate_for(e2e) / rate) if rate >= LEAST_RATE else 10**6
    return Estimated(choice, rate, bound, engines, engines * choice.cards * prices.get(choice.card.name, 1.0))


def _answer(estimated: Estimated, shape: Shape, demand: Demand, target: LatencyTarget) -> SimulatedChoice | None:
    """Simulate a choice; None if it meets the target at no rate."""
    if estimated.rate < LEAST_RATE:
        return None
    choice = estimated.choice
    if demand.fleet and isinstance(demand.load, TraceLoad):
        return _fleet_answer(estimated, shape, demand, target, demand.load)
    engine = demand.engine(choice)
    points: list[RatePoint] = []
    most, worst = highest_rate(engine, demand.load, target, 0.9 * estimated.rate, points.append)
    if most is None:
        return None
    total = demand.rate_for(most.summary["e2e"]["mean"])
    engines = max(1, math.ceil(total / most.rate - 1e-9))
    while True:
        level = simulate(engine, demand.load, total / engines)
        points.append(level)
        if not target.missed(level.summary):
            break
        engines = math.ceil(MORE * engines)  # another rate has other requests side by side
    total = demand.rate_for(level.summary["e2e"]["mean"])
    grown = simulate(engine, demand.load, GROWTH * total / engines)
    points.append(grown)
    return _with_reasons(estimated, shape, target, most, worst, engines, total, level, grown, points)


def _fleet_answer(
    estimated: Estimated, shape: Shape, demand: Demand, target: LatencyTarget, load: TraceLoad
) -> SimulatedChoice | None:
    """Search for the fewest engines behind a router that keep the target on a trace at its own times."""
    choice, rate = estimated.choice, demand.rate
    engine = demand.engine(choice)
    tried: dict[int, RatePoint] = {}

    def met(engines: int) -> bool:
        if engines not in tried:
            tried[engines] = simulate(engine, load, rate, engines)
        return not target.missed(tried[engines].summary)

    engines = min(MOST_ENGINES, max(1, estimated.engines))
    while not met(engines):
        if engines == MOST_ENGINES:
            return None
        engines = min(MOST_ENGINES, max(engines + 1, math.ceil(1.25 * engines)))
    while engines > 1 and met(engines - 1):
        engines -= 1
    level = tried[engines]
    grown = simulate(engine, load, GROWTH * rate, engines)
    fewer = tried.get(engines - 1, grown)
    points = [replace(point, rate=rate / number) for number, point in tried.items()]
    return _with_reasons(estimated, shape, target, level, fewer, engines, rate, level, grown, points)


def _with_reasons(
    estimated: Estimated, shape: Shape, target: LatencyTarget, most: RatePoint, worst: RatePoint, engines: int,
    rate: float, level: RatePoint, grown: RatePoint, points: list[RatePoint],
) -> SimulatedChoice:  # fmt: skip
    choice = estimated.choice
    own = Shape(shape.prompt, shape.prompt * (1 - level.summary["prefix_hit_share"]), shape.output)
    step = steady_step(choice.steps, own, rate / engines)
    parts = choice.steps.parts(step[1]) if step is not None else {}
    breaks = target.missed(grown.summary)
    return SimulatedChoice(
        estimated, most, target.missed(worst.summary), cause(worst), engines, rate, level, grown, breaks,
        cause(grown) if breaks else "", parts, sorted(points, key=lambda point: point.rate),
    )  # fmt: skip


def cause(point: RatePoint) -> str:
    """Return the reason that held requests back at a simulated rate: the most frequent one, if it is frequent."""
    held, looks = point.summary["held_back"], max(1, point.run.gauges.looks)
    if point.run.preemptions > 0.02 * len(point.run.records):
        return CAUSES["kv"]
    often = max(held, key=lambda name: held[name], default="")
    return CAUSES.get(often, often) if held.get(often, 0) > 0.2 * looks else CAUSES[""]


def levels(answer: SimulatedChoice) -> list[dict[str, Any]]:
    """Return the simulated rates as ``bench serve`` writes its levels; the first is the load of the service."""
    shown = [answer.level, *(point for point in answer.points if point is not answer.level)]
    return [{"load": point.rate, "load_unit": "requests/s", "warm_up_share": WARM, **point.summary} for point in shown]
