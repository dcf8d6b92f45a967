"""The highest rate that one engine keeps within a target: first by arithmetic for every choice, then by simulation."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from ..bench.load import Run
from ..bench.summary import summarize
from ..bench.traces.asked import Asked, faster, rate_of
from ..bench.traces.mix import Mix
from ..costs.steps import StepLoad
from .fleet import EngineModel, Fleet, FleetRun
from .target import LatencyTarget

PRECISION = 0.02
"""Relative width at which the search for a rate ends."""
WARM = 0.15
"""Share of the requests at the beginning that are not counted: the engine is empty then."""
FULL = 0.95
"""Share of the KV cache that arithmetic lets sequences fill."""


class StepTimeModel(Protocol):
    """Step times by their work."""

    def seconds(self, load: StepLoad) -> float:
        """Predict the seconds of a step."""
        ...


class RequestLoad(Protocol):
    """Requests at any rate."""

    def at(self, rate: float) -> list[Asked]:
        """Return requests at ``rate`` per second."""
        ...


@dataclass(frozen=True, slots=True)
class MixLoad:
    """Generated requests, ``number`` of them and at least ``seconds`` long."""

    mix: Mix
    number: int = 400
    seconds: float = 30.0
    most: int = 3000
    seed: int = 0

    def at(self, rate: float) -> list[Asked]:
        """Draw requests at ``rate``: the same ones at every rate, if conversations have one turn."""
        return self.mix.generate(rate, min(self.most, max(self.number, int(rate * self.seconds))), self.seed)


@dataclass(frozen=True, slots=True)
class TraceLoad:
    """Requests of a trace, faster or slower than recorded."""

    asked: list[Asked]

    def at(self, rate: float) -> list[Asked]:
        """Return the trace at ``rate`` on average."""
        return faster(self.asked, rate / rate_of(self.asked))


@dataclass(frozen=True, slots=True)
class Shape:
    """Mean lengths of requests, in tokens: of prompts, of what prefix caches leave of them, of answers."""

    prompt: float
    computed: float
    output: float

    @classmethod
    def of(cls, asked: list[Asked], hits: float = 0.0) -> Shape:
        """Take the means; ``hits``: the share of prompt tokens that caches hold."""
        prompt = sum(each.prompt_tokens for each in asked) / len(asked)
        return cls(prompt, (1 - hits) * prompt, sum(each.output_tokens for each in asked) / len(asked))


@dataclass(frozen=True, slots=True)
class RatePoint:
    """One simulated rate: the summary with the keys of ``bench serve``, and the state of the engines."""

    rate: float
    summary: dict[str, Any]
    run: FleetRun


def steady_step(steps: StepTimeModel, shape: Shape, rate: float) -> tuple[float, StepLoad] | None:
    """Find the step that an engine repeats under ``rate``, and its seconds: each request has a row in as many steps as
    it has output tokens, and its prompt's tokens come beside them. None if steps would grow without end."""
    seconds = 1e-3
    for _ in range(200):
        decodes, starts = rate * shape.output * seconds, rate * seconds
        prompts = starts * shape.computed
        middle = shape.prompt + shape.output / 2
        load = StepLoad(
            max(1, round(decodes + prompts)), round(decodes * middle), round(prompts * shape.prompt / 2),
            max(1, round(decodes + starts)), round(starts + 0.5), max(1, round(decodes + prompts)),
        )  # fmt: skip
        found = steps.seconds(load)
        if found > 10.0:
            return None
        if abs(found - seconds) < 1e-3 * seconds:
            return found, load
        seconds = 0.5 * (seconds + found)
    return seconds, load


def estimate(steps: StepTimeModel, kv_tokens: int, shape: Shape, target: LatencyTarget) -> tuple[float, str]:
    """Estimate the highest rate of an engine by arithmetic, and what bounds it: ``kv``, ``itl``, or ``compute``."""
    limit = target.limit("itl") or target.limit("tpot") or 0.2

    def bound(rate: float) -> str:
        found = steady_step(steps, shape, rate)
        if found is None:
            return "compute"
        seconds = found[0]
        if rate * shape.output * seconds * (shape.prompt + shape.output / 2) > FULL * kv_tokens:
            return "kv"
        return "itl" if seconds > limit else ""

    low, high = 0.0, 1.0
    while not bound(high) and high < 1e5:
        low, high = high, 2 * high
    while high - low > 0.01 * high:
        middle = 0.5 * (low + high)
        low, high = (low, middle) if bound(middle) else (middle, high)
    return low, bound(high)


def simulate(model: EngineModel, load: RequestLoad, rate: float, engines: int = 1, **options: Any) -> RatePoint:
    """Run the requests at ``rate`` through ``engines`` engines; ``options`` are those of ``Fleet``."""
    run = Fleet(model, engines, **options).run(load.at(rate))
    return RatePoint(rate, summary_of(run, warm=WARM), run)


def summary_of(run: FleetRun, warm: float = 0.0) -> dict[str, Any]:
    """Summarize records as ``bench serve`` does, without the first share ``warm`` of them, and add the figures that
    only a simulation has."""
    records = run.records[int(warm * len(run.records)) :]
    found = summarize(Run(records, run.seconds, 0.0))
    gauges = run.gauges
    found["generator"]["cpu"] = 0.0
    return found | {
        "kv_usage": {"mean": gauges.kv / max(1, gauges.looks), "max": gauges.kv_peak},
        "prefix_hit_share": run.prefix_hits,
        "preemptions": run.preemptions,
        "busy_share": run.busy / run.engine_seconds if run.engine_seconds else 0.0,
        "steps": run.steps,
        "held_back": dict(gauges.held),
    }


def highest_rate(
    model: EngineModel,
    load: RequestLoad,
    target: LatencyTarget,
    start: float,
    keep: Callable[[RatePoint], object] = lambda point: None,
) -> tuple[RatePoint | None, RatePoint]:
    """Search for the highest rate at which the target is met.

    Args:
        start: the first rate to try.
        keep: receives each simulated point.

    Returns:
        The highest point that meets it, None if none does, and the lowest one found that does not.

    Raises:
        ValueError: the target is met at any rate, or a request cannot fit.
    """

    def run(rate: float) -> tuple[RatePoint, bool]:
        point = simulate(model, load, rate)
        keep(point)
        return point, not target.missed(point.summary)

    point, met = run(start)
    best, worst = (point, None) if met else (None, point)
    while best is None or worst is None:
        if best is not None:
            if best.rate > 1e5:
                raise ValueError("the target is met at any rate: give a shorter one")
            point, met = run(1.4 * best.rate)
        else:
            assert worst is not None
            if worst.rate < 1e-3 * start:
                return None, worst
            point, met = run(0.6 * worst.rate)
        best, worst = (point, worst) if met else (best, point)
    while worst.rate - best.rate > PRECISION * worst.rate:
        point, met = run(0.5 * (best.rate + worst.rate))
        best, worst = (point, worst) if met else (best, point)
    return best, worst
