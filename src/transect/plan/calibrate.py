"""Fit a profile on one synthetic sweep of a server: closed loops of growing concurrency, random prompts and answers.

The decision log has the steps; the load generator has what clients saw. Both clocks are the machine's monotonic one, so
the time between them is what requests and tokens spend outside of the engine.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import msgspec

from ..bench.lengths import Lengths
from ..bench.levels import Level, Result
from ..bench.workload import random_work
from ..costs.fitting import FEWEST, Errors, FittedSteps, errors
from ..explain.engine.calibration import host_seconds, known_steps
from ..explain.engine.log import DecisionRunLog
from .profile import FORMAT, Loads, Profile

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
    fitted = FittedSteps.fit(work, seconds, host_seconds(log))
    intake, outlet = outside(log, results)
    return Profile(
        format=FORMAT,
        model=model,
        header=msgspec.to_builtins(log.header),
        bytes_per_second=rates[0] if rates else 0.0,
        flops_per_second=rates[1] if rates else 0.0,
        steps=fitted.to_dict(),
        errors=asdict(held_out(work, seconds)),
        intake=intake,
        outlet=outlet,
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


def outside(log: DecisionRunLog, results: Sequence[Result]) -> tuple[float, float]:
    """Return the median seconds from sending a request until an idle engine has it, and from the first token's step
    until the client has that token. Requests are matched in the order in which they came."""
    alone = results[0]
    lives = sorted(log.lives, key=lambda life: life.added.at)
    records = sorted(
        ((result.began + record.sent, result.began, record) for result in results for record in result.records),
        key=lambda each: each[0],
    )
    lives = lives[len(lives) - len(records) :]  # those before warmed the server up
    intakes, outlets = [], []
    for (sent, began, record), life in zip(records, lives, strict=True):
        if record in alone.records:
            intakes.append(max(0.0, life.added.at - sent))
        first = next(
            (log.steps[index] for index, row in life.steps if row[1] + row[2] >= life.added.prompt_tokens), None
        )
        if first is not None and record.moments:
            outlets.append(max(0.0, began + record.moments[0] - first.committed))
    return statistics.median(intakes), statistics.median(outlets)
