"""Replay the requests of a decision log on a virtual clock, with changed settings.

The shipping ``EngineCore`` and ``Scheduler`` run the same requests at their recorded arrival times. Steps take the time
that the fitted model predicts (``costs/fitting.py``). Requests end after as many tokens as recorded, also those whose
client left. Clients that waited for an answer before their next request would have arrived earlier after a faster one:
arrivals are not changed, and the result says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ...costs.fitting import FittedSteps
from ...costs.floors import Rates
from ...costs.storage import Storage, storage_for
from ...engine.scheduling.batch import ScheduledBatch
from ...engine.scheduling.drafters.registry import MODEL_METHODS
from ...engine.scheduling.policies.admission import QueueFull
from ...engine.scheduling.scheduler_config import SchedulerConfig
from ...engine.scheduling.simulation import SimulatedEngine
from ...spec.numbers.registry import roundings
from .log import DecisionRunLog, Life
from .replay import ReplayScript
from .work import StepWork

MACHINE = ("preset", "quantization")
"""Settings of a what-if that are not settings of the scheduler."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """Percentiles over all requests that had a first token, in seconds."""

    requests: int
    output_tokens: int
    seconds: float
    """Seconds from the first arrival to the last token."""
    ttft: Mapping[str, float]
    itl: Mapping[str, float]

    @property
    def tokens_per_second(self) -> float:
        """Output tokens per second."""
        return self.output_tokens / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON; seconds."""
        return {**dataclasses.asdict(self), "tokens_per_second": self.tokens_per_second}


class _Seconds:
    """Step times of a log's engine, as ``model`` predicts them. With ``other``, the same work on another device, they
    are scaled by the floors."""

    def __init__(self, model: FittedSteps, work: StepWork, other: StepWork | None) -> None:
        self.model, self.work, self.other = model, work, other

    def __call__(self, batch: ScheduledBatch) -> float:
        rows = [(0, start, count) for start, count in batch.spans()]
        seconds = self.model.seconds(self.work.load(rows))
        if self.other is not None:
            seconds *= self.other.floor(rows).seconds / self.work.floor(rows).seconds
        return seconds


def changed(log: DecisionRunLog, work: StepWork, changes: Mapping[str, Any]) -> tuple[SchedulerConfig, StepWork | None]:
    """Return the changed scheduler settings, and the work on another device or in another format (None if the same).

    Raises:
        ValueError: no such setting, a value out of range, or no floor to scale step times by.
    """
    names = [field.name for field in dataclasses.fields(SchedulerConfig)]
    for name in changes:
        if name not in names and name not in MACHINE:
            raise ValueError(f"--set {name}: no such setting; there are: {', '.join([*names, *MACHINE])}")
    settings = {name: value for name, value in changes.items() if name in names}
    kept = {} if acceptance_of(log) is not None else {"speculation": None}  # a log has no tokens to draft from
    config = SchedulerConfig(**{**log.header.scheduler, **kept, **settings})
    machine = {name: value for name, value in changes.items() if name in MACHINE}
    if not machine:
        return config, None
    if work.config is None or work.rates is None:
        raise ValueError(f"--set {next(iter(machine))} scales by floors, and this log has none: give --preset as well")
    rates: Rates = work.rates
    if "preset" in machine:
        from .rates import rates_for

        rates = rates_for(log.header, machine["preset"]) or rates
    storage: Storage = work.storage
    if "quantization" in machine:
        if machine["quantization"] not in (*roundings(), None):
            known = ", ".join((*roundings(), "null"))
            raise ValueError(f"--set quantization must be one of {known}, not {machine['quantization']!r}")
        native = log.header.device.get("kind") == "cpu"
        packed = storage_for(2, machine["quantization"], native=native)
        storage = dataclasses.replace(storage, linear=packed.linear, matrices=())
    return config, StepWork(work.config, storage, rates)


def acceptance_of(log: DecisionRunLog) -> float | None:
    """Return the share of drafts that were right where those before them were; None if nothing was drafted, or by a
    model, whose times a log does not have."""
    speculation = log.header.scheduler.get("speculation")
    if not speculation or speculation.get("method") in MODEL_METHODS:
        return None
    hits = trials = 0
    for step in log.steps:
        for row in step.rows:
            if drafted := step.drafted(row):
                accepted = step.accepted[row[0]]
                hits, trials = hits + accepted, trials + accepted + (accepted < drafted)
    return hits / trials if trials else None


def simulate(
    log: DecisionRunLog, model: FittedSteps, work: StepWork, config: SchedulerConfig, other: StepWork | None = None
) -> Latencies:
    """Run the requests of ``log`` under ``config``, with step times predicted by ``model``.

    Raises:
        ValueError: a request does not fit under ``config``.
    """
    limits = dataclasses.replace(config, max_queue=None, max_queue_bytes=None, max_queue_wait=None)
    seconds = _Seconds(model, work, other)
    acceptance = acceptance_of(log)
    engine = SimulatedEngine(limits, seconds, lag=log.header.lag, host=model.host, acceptance=acceptance)
    script = ReplayScript(log)
    lives = sorted((life for life in log.lives if life.ends), key=lambda life: life.added.at)
    if not lives:
        raise ValueError("no request of this log has ended: log a longer run")
    began = lives[0].added.arrival
    intake = _intake(lives)
    arrival: dict[str, float] = {}
    for life in sorted(lives, key=lambda life: _there(life, intake)):
        engine.run(_there(life, intake) - began)
        name = str(len(arrival))
        arrival[name] = life.added.arrival - began
        _add(engine, script, life, name)
    engine.run()
    return _latencies(arrival, {(line.request_id, line.index): line.moments for line in engine.done if line.moments})


def _intake(lives: Sequence[Life]) -> float:
    """Estimate the seconds from an arrival until the engine can see the request: those of the fastest 5%, which came
    just before the engine looked."""
    return float(np.percentile([max(0.0, life.added.at - life.added.arrival) for life in lives], 5))


def _there(life: Life, intake: float) -> float:
    """Return the earliest time at which the engine could see a request: with other steps it would have looked at
    another time."""
    added = life.added
    return added.at if added.grammar else min(added.at, added.arrival + intake)


def _add(engine: SimulatedEngine, script: ReplayScript, life: Life, name: str) -> None:
    longest = max(count for _, count, _ in life.ends.values())
    request = script.request(life, name, life.added.arrival)
    cut = any(reason in ("abort", "error") for reason, _, _ in life.ends.values())
    limit = max(1, longest) if cut else request.params.max_tokens
    request = msgspec.structs.replace(request, params=request.params.with_(max_tokens=limit))
    try:
        engine.add(request, [script.output(life, choice) for choice in range(life.added.n)])
    except (ValueError, QueueFull) as error:
        raise ValueError(f"request {life.added.request_id} would be refused: {error}") from None


def recorded(log: DecisionRunLog) -> Latencies:
    """Return the recorded latencies, by the same definitions."""
    arrival: dict[str, float] = {}
    tokens: dict[tuple[str, int], list[float]] = {}
    began = min((life.added.arrival for life in log.lives if life.ends), default=0.0)
    for number, life in enumerate(log.lives):
        if not life.ends:
            continue
        name = str(number)
        arrival[name] = life.added.arrival - began
        first, prompt = life.added.first_seq, life.added.prompt_tokens
        for index, (seq, start, count) in life.steps:
            at = log.steps[index].committed
            if log.steps[index].at is None or start + count < prompt:
                continue
            # The last chunk of the prompt draws for all choices.
            drawn = range(life.added.n) if start < prompt and seq == first else [seq - first]
            for choice in drawn:
                if choice in life.ends and len(tokens.get((name, choice), ())) < life.ends[choice][1]:
                    tokens.setdefault((name, choice), []).append(at - began)
    return _latencies(arrival, tokens)


def _latencies(arrival: Mapping[str, float], tokens: Mapping[tuple[str, int], Sequence[float]]) -> Latencies:
    first: dict[str, float] = {}
    between: list[float] = []
    for (name, _), times in tokens.items():
        first[name] = min(first.get(name, times[0]), times[0])
        between.extend(np.diff(times))
    ttft = [first[name] - arrival[name] for name in first]
    count = sum(map(len, tokens.values()))
    last = max((times[-1] for times in tokens.values()), default=0.0)
    return Latencies(len(first), count, last, _percentiles(ttft), _percentiles(between))


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    if not len(values):
        return {}
    return {f"p{q}": float(np.percentile(values, q)) for q in (50, 90, 99)}
