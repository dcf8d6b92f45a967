"""Fit a profile on one synthetic sweep of a server: closed loops of growing concurrency, random prompts and answers.

The decision log has the steps; the load generator has what clients saw. Both clocks are the machine's monotonic one, so
the time between them is what requests and tokens spend outside of the engine.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

import msgspec

from ..bench.lengths import Lengths
from ..bench.levels import Level, Result
from ..bench.load import Record
from ..bench.workload import random_work
from ..costs.fitting import FEWEST, Errors, FittedSteps, errors
from ..costs.learning import StepTimes
from ..costs.steps import StepLoad
from ..costs.warmth import Slowdown, Warmth
from ..engine.scheduling.decisions import Done
from ..explain.engine.calibration import host_seconds, known_steps
from ..explain.engine.log import DecisionRunLog, Life
from .profile import FORMAT, Loads, Profile

GAINS = (0.05, 0.1, 0.15, 0.2)
WORTH, LARGE = 0.02, 0.1
"""Share of the error that a slowdown by recent work must explain, and the error of a step that something else held
up."""
FULL = 0.95
"""Quantile of the steps' tokens per second that counts as full work."""
QUANTILES = 50
FEW = 8
"""Fewest first tokens for a median."""
PARTS = 8
"""Parts of the sweep; every second one is held out when errors are computed."""


def sweep(most: int, context: int, requests: int, seed: int = 0, highest: int = 10000) -> list[Level]:
    """Make the levels of the sweep: 1, 2, 4, ... up to ``most`` requests at a time.

    Args:
        context: tokens that a prompt and its answer may have.
        requests: for each place of a level.
    """
    prompt = Lengths.parse(f"lognormal:{max(8, context // 10)},1,{max(16, context // 2)}")
    output = Lengths.parse(f"uniform:{max(2, context // 64)}-{max(4, context // 16)}")
    sizes, levels = [1], []
    while sizes[-1] * 2 <= most:
        sizes.append(sizes[-1] * 2)
    for size in sizes:
        work = random_work(requests * size, prompt, output, vocab=(0, highest), seed=f"sweep {seed} {size}")
        levels.append(Level("at a time", size, work))
    return levels


def profile(
    log: DecisionRunLog,
    results: Sequence[Result],
    rates: tuple[float, float] | None,
    model: str,
    environment: dict[str, Any],
) -> Profile:
    """Fit a profile on the decision log and the clients' records of a sweep.

    Args:
        rates: bytes per second and FLOP/s of the floors; None if not known.

    Raises:
        ValueError: the sweep is too short, or requests failed.
    """
    failed = sum(record.error is not None for result in results for record in result.records)
    if failed:
        raise ValueError(f"{failed} requests of the sweep failed: look at the server's log, or lower --concurrency")
    loads = Loads(log.header, *(rates or (0.0, 0.0)))
    steps = known_steps(log)
    work = [loads.of([(start, count) for _, start, count in step.rows]) for step in steps]
    seconds = [step.seconds for step in steps]
    fitted, warming = warmed(log, loads, work, seconds)
    intake, outlets = outside(log, results)
    return Profile(
        format=FORMAT,
        model=model,
        header=msgspec.to_builtins(log.header),
        bytes_per_second=rates[0] if rates else 0.0,
        flops_per_second=rates[1] if rates else 0.0,
        steps=fitted.to_dict(),
        errors=asdict(held_out(work, seconds)),
        intake=intake,
        outlet=statistics.median(seconds for _, seconds in outlets),
        outlets=by_rows(outlets),
        jitter=jitter(log, results),
        warming={} if warming is None else asdict(warming),
        learned=learned(log),
        measured={
            "steps": len(steps),
            "requests": sum(len(result.records) for result in results),
            "seconds": sum(result.summary["seconds"] for result in results),
        },
        environment=environment,
    )


def held_out(work: Sequence[Any], seconds: Sequence[float]) -> Errors:
    """Compare every second eighth of the steps with a fit on the others.

    Raises:
        ValueError: there are too few steps.
    """
    if len(work) < 4 * FEWEST:
        raise ValueError(f"the sweep has {len(work)} steps, and {4 * FEWEST} are needed: give more --requests")
    size = -(-len(work) // PARTS)
    odd = [bool(place // size % 2) for place in range(len(work))]
    parts = [[place for place, each in enumerate(odd) if each is kind] for kind in (False, True)]
    model = FittedSteps.fit([work[place] for place in parts[0]], [seconds[place] for place in parts[0]])
    predicted = model.predict([work[place] for place in parts[1]])
    import numpy as np

    return errors(predicted, np.array([seconds[place] for place in parts[1]]))


def warmed(
    log: DecisionRunLog, loads: Loads, work: Sequence[StepLoad], seconds: Sequence[float]
) -> tuple[FittedSteps, Slowdown | None]:
    """Fit step times, and how much longer they take after much work (``costs/warmth.py``); None if that explains
    nothing, or on a processor. The work of all steps tells the warmth before each."""
    host = host_seconds(log)
    best: tuple[FittedSteps, Slowdown | None] = FittedSteps.fit(work, seconds, host), None
    if log.header.device.get("kind") != "cuda":
        return best
    done = [step for step in log.steps if step.at is not None and step.seconds > 0]
    counts = [step.tokens for step in done]
    rates = sorted(count / step.seconds for count, step in zip(counts, done, strict=True))
    full, known = rates[int(FULL * (len(rates) - 1))], {step.number: place for place, step in enumerate(done)}
    warmth, before = Warmth(Slowdown(0.0, full)), []
    for count, step in zip(counts, done, strict=True):
        before.append(warmth.before(step.begins))
        warmth.worked(count, step.begins, step.seconds)
    levels = [before[known[step.number]] for step in known_steps(log)]
    least = _error(best[0], work, seconds) * (1 - WORTH)
    for gain in GAINS:
        slower = [1 + gain * level for level in levels]
        alone = [each / factor for each, factor in zip(seconds, slower, strict=True)]
        fitted = FittedSteps.fit(work, alone, host)
        error = _error(fitted, work, alone)
        if error < least:
            least, best = error, (fitted, Slowdown(gain, full))
    return best


def learned(log: DecisionRunLog) -> dict[str, Any]:
    """Return what the engine has learned of its step times; empty if it does not size steps by time."""
    times, rows = StepTimes(), {step.number: step.rows for step in log.steps}
    for event in log.events:
        if isinstance(event, Done) and event.learned and event.step in rows:
            times.learn(StepLoad.of((start, count) for _, start, count in rows[event.step]), event.learned)
    return times.state() if times.steps else {}


def _error(model: FittedSteps, work: Sequence[StepLoad], seconds: Sequence[float]) -> float:
    """Return the mean relative error; large ones count as ``LARGE``."""
    errors_of = (abs(model.seconds(load) / each - 1) for load, each in zip(work, seconds, strict=True))
    return statistics.fmean(min(each, LARGE) for each in errors_of)


def by_rows(outlets: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    """Return the median seconds of steps with like numbers of rows, as (median rows, seconds) by rows."""
    groups: dict[int, list[tuple[int, float]]] = {}
    for rows, seconds in outlets:
        groups.setdefault((rows - 1).bit_length(), []).append((rows, seconds))
    kept = [group for _, group in sorted(groups.items()) if len(group) >= FEW]
    medians = [tuple(statistics.median(each) for each in zip(*group, strict=True)) for group in kept]
    return [(rows, seconds) for rows, seconds in medians]


def jitter(log: DecisionRunLog, results: Sequence[Result]) -> list[tuple[float, list[float]]]:
    """Return quantiles of how much the time from a step to the client deviates from one token to the next, by the rows
    of the step."""
    groups: dict[int, list[tuple[int, float]]] = {}
    for began, record, life in matched(log, results):
        steps = [log.steps[index] for index, row in life.steps if row[1] + row[2] >= life.added.prompt_tokens]
        if len(steps) != len(record.moments):
            continue
        delays = [began + moment - step.committed for moment, step in zip(record.moments, steps, strict=True)]
        for step, (before, after) in zip(steps[1:], pairwise(delays), strict=True):
            groups.setdefault((len(step.rows) - 1).bit_length(), []).append((len(step.rows), after - before))
    found = []
    for _, group in sorted(groups.items()):
        if len(group) < QUANTILES:
            continue
        # The difference of two deviations is larger than one by this factor.
        cuts = statistics.quantiles((each / math.sqrt(2) for _, each in group), n=QUANTILES)
        found.append((statistics.median(rows for rows, _ in group), cuts))
    return found


def matched(log: DecisionRunLog, results: Sequence[Result]) -> Iterator[tuple[float, Record, Life]]:
    """Yield the start of its run, the record and the life of each request, matched in the order in which they came."""
    lives = sorted(log.lives, key=lambda life: life.added.at)
    records = sorted(
        ((result.began + record.sent, result.began, record) for result in results for record in result.records),
        key=lambda each: each[0],
    )
    lives = lives[len(lives) - len(records) :]  # those before warmed the server up
    for (_, began, record), life in zip(records, lives, strict=True):
        yield began, record, life


def outside(log: DecisionRunLog, results: Sequence[Result]) -> tuple[float, list[tuple[int, float]]]:
    """Return the median seconds from sending a request until an idle engine has it; and for each first token the rows
    of its step, and the seconds from that step until the client has the token."""
    alone = results[0]
    intakes: list[float] = []
    outlets: list[tuple[int, float]] = []
    for began, record, life in matched(log, results):
        if began == alone.began and record in alone.records:
            intakes.append(max(0.0, life.added.at - began - record.sent))
        first = next(
            (log.steps[index] for index, row in life.steps if row[1] + row[2] >= life.added.prompt_tokens), None
        )
        if first is not None and record.moments:
            outlets.append((len(first.rows), max(0.0, began + record.moments[0] - first.committed)))
    return statistics.median(intakes), outlets
