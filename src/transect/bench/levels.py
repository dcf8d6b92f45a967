"""A load test: the levels of load, in sequence, their arrivals and their results."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from .energy import EnergyMeter
from .lengths import Lengths
from .load import Record, closed_loop, open_loop
from .objectives import Objectives
from .summary import summarize
from .target import Target
from .traces.asked import faster, work_of
from .traces.reading import read_trace
from .workload import Work, at_times, random_work, read_conversations

WARM_UP_AT_ONCE = 8


@dataclass(frozen=True, slots=True)
class WorkSource:
    """Source of prompts and lengths. Each name given to ``draw`` has its own prompts, the same in every run.

    Attributes:
        prompt: lengths of random prompts.
        output: lengths of answers; None for those in the conversation file.
        conversations: a file of them, instead of random token ids.
        highest_id: random token ids are 0 to this.
        seed: decides every draw.
    """

    prompt: Lengths
    output: Lengths | None
    conversations: Path | None = None
    highest_id: int = 10000
    seed: int = 0

    def draw(self, count: int, name: str) -> list[Work]:
        """Draw ``count`` requests without arrival times."""
        seed = f"{self.seed} {name}"
        if self.conversations is not None:
            return read_conversations(self.conversations, count, output=self.output, seed=seed) if count else []
        if self.output is None:
            raise ValueError("random prompts need output lengths")
        return random_work(count, self.prompt, self.output, vocab=(0, self.highest_id), seed=seed)


@dataclass(frozen=True, slots=True)
class Level:
    """One level of load: ``value`` requests per second, requests at a time, or times the speed of a trace."""

    unit: Literal["requests/s", "at a time", "x trace"]
    value: float
    work: list[Work]

    def __str__(self) -> str:
        return f"{self.value:g} {self.unit}"


def rate_levels(source: WorkSource, count: int, rates: Sequence[float], burstiness: float = 1.0) -> list[Level]:
    """Build levels of ``count`` requests at each rate. Every level has its own prompts, so that prefix caches do not
    hold them."""
    levels = []
    for rate in sorted(rates):
        name = f"rate {rate:g}"
        arrivals = random_arrivals(count, rate, burstiness=burstiness, seed=f"{source.seed} {name}")
        levels.append(Level("requests/s", rate, at_times(source.draw(count, name), arrivals)))
    return levels


def concurrency_levels(source: WorkSource, count: int, sizes: Sequence[int]) -> list[Level]:
    """Build levels of ``count`` requests at each concurrency, but at least one for each place."""
    return [Level("at a time", size, source.draw(max(count, size), f"concurrency {size}")) for size in sorted(sizes)]


def trace_level(
    source: WorkSource, path: Path, speed: float = 1.0, limit: int | None = None, start: float | None = None
) -> Level:
    """Return the requests of a trace (``traces/reading.py``) at their recorded times, or ``speed`` times as fast.

    Args:
        start: second of the trace at which to begin.

    Raises:
        ValueError: the file is not a trace, or ``speed`` is not above 0.
    """
    asked = faster(read_trace(path, limit=limit, start=start, seed=source.seed), speed)
    return Level("x trace", speed, work_of(asked, vocab=(0, source.highest_id), seed=source.seed))


@dataclass(frozen=True, slots=True)
class Result:
    """A level's summary (JSON), its requests, and the start of their clock (``time.perf_counter``)."""

    level: Level
    summary: dict[str, Any]
    records: list[Record]
    began: float = 0.0


async def run_levels(
    target: Target,
    levels: Sequence[Level],
    *,
    warm_up: Sequence[Work] = (),
    objectives: Objectives | None = None,
    meter: EnergyMeter | None = None,
) -> list[Result]:
    """Run one level after the other. ``warm_up`` runs first, to its end, and is not counted."""
    if warm_up:
        await closed_loop(target, warm_up, WARM_UP_AT_ONCE)
    results = []
    for level in levels:
        measuring: AbstractContextManager[Any] = nullcontext() if meter is None else meter
        with measuring:
            if level.unit == "at a time":
                run = await closed_loop(target, level.work, int(level.value))
            else:
                run = await open_loop(target, level.work)
        summary = summarize(run, objectives, None if meter is None else meter.result)
        summary = {"load": level.value if level.value != math.inf else "inf", "load_unit": level.unit, **summary}
        results.append(Result(level, summary, run.records, run.began))
    return results


def records_table(results: Sequence[Result]) -> Iterator[dict[str, Any]]:
    """Yield one row for each request of each level: the data behind the summaries."""
    for result in results:
        for record in result.records:
            yield {
                "load": result.level.value,
                "due": record.due,
                "sent": record.sent,
                "ended": record.ended,
                "ttft": record.ttft if record.moments else None,
                "tpot": record.tpot if record.moments else None,
                "input_tokens": record.input_tokens,
                "output_tokens": record.output_tokens,
                "error": record.error,
            }


def random_arrivals(count: int, rate: float, *, burstiness: float = 1.0, seed: int | str = 0) -> list[float]:
    """Draw ``count`` arrival times at ``rate`` per second on average, in seconds from the start, sorted.

    Args:
        rate: requests per second; infinite lets all of them arrive at once.
        burstiness: squared coefficient of variation of the gaps, which are gamma distributed: 1 is a Poisson process,
            0 an even beat, more than 1 comes in bursts.
        seed: same seed, same arrivals.

    Raises:
        ValueError: ``rate`` is not above 0, or ``burstiness`` is negative.
    """
    if not rate > 0:
        raise ValueError(f"the request rate must be above 0, got {rate:g}: use inf for all at once")
    if not 0 <= burstiness < math.inf:
        raise ValueError(f"burstiness must be 0 (even), 1 (Poisson) or another number from 0 on, got {burstiness:g}")
    rng = random.Random(f"arrivals {seed}")
    at, arrivals = 0.0, []
    for _ in range(count):
        arrivals.append(at)
        if rate != math.inf:
            at += rng.gammavariate(1 / burstiness, burstiness / rate) if burstiness else 1 / rate
    return arrivals
