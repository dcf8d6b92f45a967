"""What would have been: the requests of a decision log on a virtual clock, with something changed.

The shipping ``EngineCore`` and ``Scheduler`` run the same requests, which come when they came. Steps take what the
fitted model says (``costs/fitting.py``). Requests end where they ended; one whose client left after so many tokens ends
after as many. Clients that waited for an answer before they asked again would have come earlier after a faster one:
arrivals stay as they were, and the result says so.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from ...costs.fitting import FittedSteps
from ...costs.floors import Rates
from ...costs.storage import Storage, storage_for
from ...engine.scheduling.batch import Handle, ScheduledBatch, StepResult
from ...engine.scheduling.clock import VirtualClock
from ...engine.scheduling.core import EngineCore
from ...engine.scheduling.scheduler import Scheduler
from ...engine.scheduling.scheduler_config import SchedulerConfig
from ...engine.scheduling.waiting_queue import QueueFull
from ...spec.numbers.registry import roundings
from .log import Life, RunLog
from .replay import Script
from .work import StepWork

MACHINE = ("preset", "quantization")
"""Settings of a what-if that are not the scheduler's."""


@dataclass(frozen=True, slots=True)
class Latencies:
    """All requests that had a first token: seconds, by percentile."""

    requests: int
    output_tokens: int
    seconds: float
    """From the first arrival to the last token."""
    ttft: Mapping[str, float]
    itl: Mapping[str, float]

    @property
    def tokens_per_second(self) -> float:
        """Output tokens."""
        return self.output_tokens / self.seconds if self.seconds else 0.0

    def to_dict(self) -> dict[str, Any]:
        """For JSON; seconds."""
        return {**dataclasses.asdict(self), "tokens_per_second": self.tokens_per_second}


class Device:
    """An executor whose steps take predicted times, one after the other.

    Args:
        clock: moved to a step's end when its result is asked for.
        model, work: predict times on the device of the log.
        other: the same work elsewhere; times are scaled by the floors.
    """

    def __init__(self, clock: VirtualClock, model: FittedSteps, work: StepWork, other: StepWork | None) -> None:
        self.clock, self.model, self.work, self.other = clock, model, work, other
        self.outputs: dict[int, Iterator[int]] = {}
        self.free_at = 0.0
        self.steps = 0

    def submit(self, batch: ScheduledBatch) -> Handle:
        """Begin the step when the one before is done."""
        rows = [(row.seq_id, row.start, row.num_tokens) for row in batch.rows]
        seconds = self.model.seconds(self.work.load(rows))
        if self.other is not None:
            seconds *= self.other.floor(rows).seconds / self.work.floor(rows).seconds
        self.clock.advance(self.model.host)
        self.free_at = max(self.free_at, self.clock.now()) + seconds
        self.steps += 1
        result = StepResult({})
        for row in batch.rows:
            for draw in row.draws:
                result.tokens[draw.seq_id] = next(self.outputs[draw.seq_id])
            if row.prompt_logprobs is not None:
                result.prompt_logprobs[row.seq_id] = ()
        return _Pending(self, self.free_at, result)


@dataclass(slots=True)
class _Pending:
    device: Device
    until: float
    step_result: StepResult

    def draw(self) -> None:
        """Nothing waits for it."""

    def result(self) -> StepResult:
        """Moves the clock to the end of the step."""
        self.device.clock.advance(max(0.0, self.until - self.device.clock.now()))
        return self.step_result


def changed(log: RunLog, work: StepWork, changes: Mapping[str, Any]) -> tuple[SchedulerConfig, StepWork | None]:
    """The scheduler of a what-if, and the work on another device or in another format (None: the same).

    Raises:
        ValueError: no such setting, a value out of range, or no floor to scale step times by.
    """
    names = [field.name for field in dataclasses.fields(SchedulerConfig)]
    for name in changes:
        if name not in names and name not in MACHINE:
            raise ValueError(f"--set {name}: no such setting; there are: {', '.join([*names, *MACHINE])}")
    settings = {name: value for name, value in changes.items() if name in names}
    # A log has no tokens to draft from.
    config = SchedulerConfig(**{**log.header.scheduler, "speculation": None, **settings})
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


def simulate(
    log: RunLog, model: FittedSteps, work: StepWork, config: SchedulerConfig, other: StepWork | None = None
) -> Latencies:
    """Run the requests of ``log`` under ``config``, on a device whose steps take what ``model`` says.

    Raises:
        ValueError: a request does not fit under ``config``.
    """
    clock = VirtualClock()
    device = Device(clock, model, work, other)
    scheduler = Scheduler(dataclasses.replace(config, max_queue=None), clock)
    core = EngineCore(scheduler, device, lag=log.header.lag)
    script = Script(log)
    lives = sorted((life for life in log.lives if life.ends), key=lambda life: life.added.at)
    if not lives:
        raise ValueError("no request of this log has ended: log a longer run")
    began = lives[0].added.arrival
    intake = _intake(lives)
    lives.sort(key=lambda life: _there(life, intake))
    waiting = list(reversed(lives))
    arrival: dict[str, float] = {}
    tokens: dict[tuple[str, int], list[float]] = {}
    while waiting or core.has_work:
        if waiting and not core.has_work:
            clock.advance(max(0.0, _there(waiting[-1], intake) - began - clock.now()))
        while waiting and _there(waiting[-1], intake) - began <= clock.now():
            life = waiting.pop()
            name = str(len(arrival))
            arrival[name] = life.added.arrival - began
            _add(core, device, script, life, name)
        for output in core.step():
            if output.new_token_ids:
                tokens.setdefault((output.request_id, output.index), []).append(clock.now())
    return _latencies(arrival, tokens)


def _intake(lives: Sequence[Life]) -> float:
    """Seconds from an arrival until the engine can see the request: those of the quickest twentieth, which came when
    the engine was about to look."""
    return float(np.percentile([max(0.0, life.added.at - life.added.arrival) for life in lives], 5))


def _there(life: Life, intake: float) -> float:
    """When the engine could see a request: with other steps it would not have looked when it did."""
    added = life.added
    return added.at if added.grammar else min(added.at, added.arrival + intake)


def _add(core: EngineCore, device: Device, script: Script, life: Life, name: str) -> None:
    longest = max(count for _, count, _ in life.ends.values())
    request = script.request(life, name, life.added.arrival)
    cut = any(reason in ("abort", "error") for reason, _, _ in life.ends.values())
    limit = max(1, longest) if cut else request.params.max_tokens
    request = msgspec.structs.replace(request, params=request.params.with_(max_tokens=limit))
    try:
        core.add(request)
    except (ValueError, QueueFull) as error:
        raise ValueError(f"request {life.added.request_id} would be refused: {error}") from None
    first = core.scheduler.requests[name].leader.seq_id
    for choice in range(life.added.n):
        device.outputs[first + choice] = script.output(life, choice)


def recorded(log: RunLog) -> Latencies:
    """What was measured, by the same definitions."""
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
