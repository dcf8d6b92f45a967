"""Summarize the present work of a server: the newest steps of its decision log in a few figures."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from ...costs.fitting import FEWEST, FittedSteps
from ...engine.scheduling.decisions import Aborted, Done, Planned, TakenBack
from .calibration import drift, host_seconds, measured_steps
from .log import DecisionRunLog, LoggedStep
from .meter import PARTS
from .work import StepWork

WINDOW_S = 10.0
LATE = {
    "host": "the device waited for its next step",
    "grammar": "the device waited for masks of grammars",
    "ranks": "other ranks had to be waited for",
}
"""Descriptions of ``Step.late``."""


@dataclass(frozen=True, slots=True)
class Waiter:
    """A request in the queue."""

    request_id: str
    prompt_tokens: int
    seconds: float
    reason: str


@dataclass(frozen=True, slots=True)
class View:
    """The last ``seconds`` of an engine. Shares are of that time; None if no floor is known."""

    seconds: float
    steps: int
    tokens_per_second: float
    output_tokens_per_second: float
    parts: dict[str, float]
    """Share of the time: ``floor``, ``above the floor``, ``host``, ``idle``, ``under way`` (a step that has not ended);
    they add up to 1."""
    mbu: float | None
    mfu: float | None
    running: int
    waiting: int
    kv_used: float
    step_ms: dict[str, float]
    predicted_ms: float | None
    """Median predicted time of steps with the same rows, by a model of the older steps."""
    reasons: dict[str, float]
    """Share of the steps after which the queue waited, by reason."""
    launched: dict[str, float] = field(default_factory=dict)
    """Share of the steps: replayed as a ``graph``, ``captured`` first, or ``eager``; empty on a CPU."""
    late: dict[str, float] = field(default_factory=dict)
    """Share of the steps that kept the device waiting, by cause: ``Step.late``."""
    waiters: list[Waiter] = field(default_factory=list)
    warning: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return the same as a few lines of text."""
        rows = [
            f"last {self.seconds:.1f} s: {self.steps} steps, {self.tokens_per_second:.0f} tokens/s computed, "
            f"{self.output_tokens_per_second:.0f} tokens/s out",
            "time   " + ", ".join(f"{name} {share:.0%}" for name, share in self.parts.items()),
        ]
        if self.mbu is not None and self.mfu is not None:
            rows.append(f"device MBU {self.mbu:.0%}, MFU {self.mfu:.0%}")
        if self.step_ms:
            predicted = "" if self.predicted_ms is None else f"; predicted p50 {self.predicted_ms:.1f} ms"
            rows.append(f"step   p50 {self.step_ms['p50']:.1f} ms, p99 {self.step_ms['p99']:.1f} ms{predicted}")
        rows.append(f"queue  {self.waiting} wait, {self.running} run; KV {self.kv_used:.0%} in use")
        if self.launched:
            rows.append("device " + ", ".join(f"{name} {share:.0%}" for name, share in self.launched.items()))
        for who, share in self.late.items():
            rows.append(f"late   {LATE[who]}: {share:.1%} of the steps")
        for reason, share in self.reasons.items():
            rows.append(f"waits  {PARTS.get(f'queue: {reason}', reason)}: after {share:.0%} of the steps")
        for each in self.waiters[:5]:
            rows.append(f"  {each.request_id}  {each.prompt_tokens} tokens, {each.seconds:.1f} s: {each.reason}")
        return [*rows, self.warning] if self.warning else rows


def view(log: DecisionRunLog, work: StepWork, now: float | None = None, window: float = WINDOW_S) -> View:
    """Summarize the newest ``window`` seconds of a log.

    Args:
        now: the engine's clock; None for the time of the newest record, or the present if a server gave the log.
    """
    done = [step for step in log.steps if step.at is not None]
    until = now if now is not None else log.newest + log.idle
    begin = max(until - window, log.header.began)
    recent = [step for step in done if (step.at or 0.0) > begin]
    seconds = max(until - begin, 1e-9)
    busy = sum(step.seconds for step in recent)
    loads = [work.load(step.rows) for step in recent]
    floor = min(busy, sum(load.floor for load in loads))
    host = _host(recent)
    last = log.steps[-1].planned if log.steps else None
    rates = work.rates
    times = [1e3 * step.seconds for step in recent]
    names = [step.planned.held_back for step in recent if step.planned.held_back]
    busy = min(busy, seconds)
    parts = {"floor": floor, "above the floor": busy - floor, "host": min(host, seconds - busy)}
    under_way = max(0.0, min(_under_way(log, until), seconds - busy - parts["host"]))
    if under_way:
        parts["under way"] = under_way
    parts["idle"] = seconds - sum(parts.values())
    predicted, warning = _predicted(log, work, recent)
    running = max(0, last.running - _ended(log)) if last else 0
    waiters = _waiters(log, until, last.held_back if last else "")
    return View(
        seconds,
        len(recent),
        sum(load.tokens for load in loads) / seconds,
        _outputs(log, recent) / seconds,
        {name: value / seconds for name, value in parts.items()},
        sum(load.bytes for load in loads) / seconds / rates.bytes_per_second if rates else None,
        sum(load.flops for load in loads) / seconds / rates.flops_per_second if rates else None,
        running,
        last.waiting if last and (running or waiters) else len(waiters),
        1 - last.free_blocks / log.header.scheduler["num_blocks"] if last and running else 0.0,
        {f"p{q}": float(np.percentile(times, q)) for q in (50, 99)} if times else {},
        predicted,
        _shares(names, len(recent)),
        _shares([step.launched for step in recent if step.launched], len(recent)),
        _shares([step.late for step in recent if step.late], len(recent)),
        waiters,
        warning,
    )


def _under_way(log: DecisionRunLog, now: float) -> float:
    """Return the seconds since the step in flight began; 0 if there is none."""
    steps = [step for step in log.steps[-2:] if step.at is None]
    before = max((step.at for step in log.steps[-3:] if step.at is not None), default=0.0)
    return now - max(steps[0].planned.at, before) if steps and steps[0].planned.running else 0.0


def _shares(names: list[str], count: int) -> dict[str, float]:
    return {name: number / count for name, number in Counter(names).most_common()}


def _host(steps: list[LoggedStep]) -> float:
    """Sum the time between steps in which sequences ran."""
    pairs = itertools.pairwise(steps)
    return sum(max(0.0, after.begins - (before.at or 0.0)) for before, after in pairs if before.planned.running)


def _outputs(log: DecisionRunLog, recent: list[LoggedStep]) -> int:
    """Count the rows that drew a token."""
    prompts = {
        life.added.first_seq + choice: life.added.prompt_tokens for life in log.lives for choice in range(life.added.n)
    }
    return sum(start + count >= prompts.get(seq, 0) for step in recent for seq, start, count in step.rows)


def _ended(log: DecisionRunLog) -> int:
    """Count the sequences that ended after the newest step was planned."""
    late = itertools.takewhile(lambda event: not isinstance(event, Planned), reversed(log.events))
    return sum(len(event.ended) for event in late if isinstance(event, (Done, Aborted, TakenBack)))


def _waiters(log: DecisionRunLog, now: float, reason: str) -> list[Waiter]:
    found = []
    for life in log.lives:
        if not life.steps and not life.ends:
            added = life.added
            why = PARTS.get(f"queue: {reason}", "the step under way has to end first")
            found.append(Waiter(added.request_id, added.prompt_tokens, now - added.arrival, why))
    return found


def _predicted(log: DecisionRunLog, work: StepWork, recent: list[LoggedStep]) -> tuple[float | None, str]:
    """Return the median step time that older steps predict for the recent ones, in ms, and a warning if it is off."""
    loads, seconds = measured_steps(log, work)
    count = min(len(recent), len(loads))
    older = len(loads) - count
    if older < FEWEST or not count:
        return None, ""
    model = FittedSteps.fit(loads[:older][-2000:], seconds[:older][-2000:], host_seconds(log))
    predicted = [1e3 * model.seconds(load) for load in loads[-count:]]
    return float(np.median(predicted)), drift(model, loads[-count:], seconds[-count:]) or ""
