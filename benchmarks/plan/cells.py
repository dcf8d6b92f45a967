"""Cells of ``validation.py``: loads on a server that were not fitted, measured and predicted, and the knee of both.

A server is started, a profile is fitted on one synthetic sweep (``transect plan calibrate``), and the knee is found by
simulation. Then traces of three burstinesses at 30, 60 and 90% of the knee are measured, each with several seeds, and
those of the first seed twice: the spread of what was measured. The same requests at the same times are simulated from
the profile. One stream of requests is measured at rates around the knee until it both meets and misses the target, and
simulated at the same rates; that is done twice as well.

A shared machine is slower at one moment than at another, so a cell on such a machine has a second prediction: at each
moment steps get on as quickly as those of the measured run did. That leaves out what no model can know beforehand, the
speed of the machine, and keeps all else: arrivals, queue, scheduler, steps by their work.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import math
import os
import statistics
import time
from bisect import bisect_right
from collections.abc import Callable, Sequence
from itertools import pairwise
from math import inf
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.plan.kept_runs import KeptRuns, kept_log, kept_runs
from transect.bench.lengths import Lengths
from transect.bench.levels import Level, Result, run_levels
from transect.bench.load import Run
from transect.bench.summary import summarize
from transect.bench.target import Target, served_model
from transect.bench.traces.asked import Asked, work_of
from transect.bench.traces.mix import Mix
from transect.cli.plan_calibrate import server
from transect.engine.scheduling.batch import ScheduledBatch
from transect.engine.scheduling.simulation import SimulatedEngine
from transect.explain.engine.calibration import known_steps
from transect.explain.engine.log import DecisionRunLog, load
from transect.explain.engine.rates import rates_for
from transect.plan.calibrate import profile, sweep
from transect.plan.capacity import WARM, MixLoad, highest_rate, summary_of
from transect.plan.fleet import EngineModel, Fleet, FleetRun
from transect.plan.profile import Loads, Profile
from transect.plan.target import LatencyTarget

BURSTINESS = (0.25, 1.0, 4.0)
SHARES = (0.3, 0.6, 0.9)
"""Loads, as shares of the load at the knee."""
AROUND = (0.96, 1.04)
"""Rates at which the knee is searched, as shares of the predicted one; beyond them in steps of ``STEP``."""
STEP, MOST_AROUND = 0.07, 5
KNEE_SEED = 0
Keep = Callable[[dict[str, Any]], None]
SETTLE_S = 1.5
"""Seconds until the decision log has all steps of a run."""
FIGURES = (
    ("ttft", "p50"),
    ("ttft", "p90"),
    ("ttft", "p99"),
    ("itl", "p50"),
    ("itl", "p99"),
    ("e2e", "p50"),
    ("e2e", "p99"),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """A server and the loads on it.

    Attributes:
        flags: of ``transect serve``.
        prompt, output: lengths of requests, in tokens.
        knee: the target whose highest rate is the knee. start: the first rate of the search for it.
        at_once: most requests at a time in the sweep. context: tokens of its longest prompt and answer.
        highest: the largest token id of prompts.
        shared: other programs slow the machine down, so steps at the speed of each moment are simulated too.
        seconds: least length of a cell; 0 if the number of requests alone decides. knee_seconds: of a rate around the
            knee.
    """

    flags: tuple[str, ...]
    prompt: str
    output: str
    knee: str
    start: float
    at_once: int
    context: int
    highest: int = 10000
    shared: bool = False
    seconds: float = 0.0
    knee_seconds: float = 30.0

    def mix(self, burstiness: float) -> Mix:
        """Return the kind of load with this burstiness."""
        return Mix(prompt=Lengths.parse(self.prompt), output=Lengths.parse(self.output), burstiness=burstiness)


CPU = Place(
    flags=("--device", "cpu", "--max-num-seqs", "16", "--max-model-len", "1024", "--no-prefix-caching"),
    prompt="uniform:16-96", output="uniform:8-24", knee="ttft.p99=3s,itl.p99=1s", start=2.0, at_once=16, context=512,
    shared=True,
)  # fmt: skip
GPU = Place(
    flags=("--load-format", "dummy", "--no-prefix-caching", "--max-queue", "2048"), prompt="uniform:240-960",
    output="uniform:60-240", knee="ttft.p99=300ms,itl.p99=100ms", start=30.0, at_once=128, context=2048, seconds=5.0,
    knee_seconds=8.0,
)  # fmt: skip
"""Random weights of the shape of Llama-3.1-8B."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AtSpeed(EngineModel):
    """An engine on a machine whose speed changes.

    Attributes:
        spans: (beginning, end, speed) of the steps of a measured run, in seconds; the speed is their predicted over
            their measured time. Between two of them it is that of the step before.
    """

    spans: list[tuple[float, float, float]]

    def start(self, now: float, prefixes: bool) -> SimulatedEngine:
        """Make an engine whose steps get on as quickly as those that were measured at the same moments."""
        limits = dataclasses.replace(self.scheduler, enable_prefix_caching=prefixes)
        engine = SimulatedEngine(limits, lambda batch: 0.0, lag=self.lag, host=self.host, now=now)
        begins = [begin for begin, _, _ in self.spans]

        def seconds(batch: ScheduledBatch) -> float:
            left, at = self.seconds(batch), engine.clock.time
            place = max(0, bisect_right(begins, at) - 1)
            while left > 0:
                speed = self.spans[place][2]
                until = begins[place + 1] if place + 1 < len(begins) else inf
                step = min(left / speed, max(0.0, until - at))
                left, at, place = left - step * speed, at + step, place + 1
                if place == len(begins):
                    break
            return at - engine.clock.time

        engine.device.seconds = seconds
        self.teach(engine)
        return engine


def at_speed(engine: EngineModel, made: Profile, log: DecisionRunLog, result: Result) -> tuple[EngineModel, float]:
    """Return the engine on the machine as it was during a measured run, and by how much that was slower in all."""
    loads, fitted = Loads(log.header, made.bytes_per_second, made.flops_per_second), made.times.fitted
    end = result.began + result.summary["seconds"]
    steps = [step for step in known_steps(log) if result.began <= step.begins <= end]
    known = [fitted.seconds(loads.of([(start, count) for _, start, count in step.rows])) for step in steps]
    spans = [
        (step.begins - result.began, step.begins + step.seconds - result.began, guess / step.seconds)
        for step, guess in zip(steps, known, strict=True)
    ]
    plain = {field.name: getattr(engine, field.name) for field in dataclasses.fields(engine)}
    return AtSpeed(**plain, spans=spans), sum(step.seconds for step in steps) / sum(known)


def as_sent(engine: EngineModel, asked: list[Asked], result: Result) -> FleetRun:
    """Simulate measured requests. They come when the load generator sent them, which is up to 2 ms late; their times
    count from when they were due, as the measured ones do."""
    sent = [dataclasses.replace(each, at=known.sent) for each, known in zip(asked, result.records, strict=True)]
    run = Fleet(engine).run(sorted(sent, key=lambda each: each.at))
    order = sorted(range(len(sent)), key=lambda place: sent[place].at)
    records = list(run.records)
    for place, found in zip(order, run.records, strict=True):
        records[place] = dataclasses.replace(found, due=asked[place].at)
    run.records = records
    return run


def figures(summary: dict[str, Any]) -> dict[str, float]:
    """Pick the figures that are compared, in seconds."""
    return {f"{name} {share}": summary[name][share] for name, share in FIGURES if share in summary[name]}


def measure(place: Place, model: str, folder: Path, options: argparse.Namespace, keep: Keep) -> None:
    """Calibrate, measure and predict on this machine. ``keep`` gets what is there after each cell."""
    file = folder / "decisions.log"
    kept = KeptRuns(options.keep, file)
    try:
        with server(model, ["--decision-log", str(file), *place.flags]) as url:
            asyncio.run(_Measurement(place, model, url, file, options, keep, kept).run())
    finally:
        kept.add_log()


async def fit(
    place: Place, target: Target, model: str, file: Path, options: argparse.Namespace, kept: KeptRuns
) -> Profile:
    """Fit a profile on one synthetic sweep of a server, whose decision log is ``file``."""
    began = time.monotonic()
    warm = work_of(place.mix(1.0).generate(1.0, 8, "warm"), vocab=(0, place.highest))
    levels = sweep(place.at_once, place.context, options.sweep, highest=place.highest)
    results = await run_levels(target, levels, warm_up=warm)
    await asyncio.sleep(SETTLE_S)
    for result in results:
        kept.add(result, kind="sweep", environment=record.environment())
    made = fitted(load(file), results, model)
    print(f"sweep of {time.monotonic() - began:.0f} s", flush=True)
    return made


def fitted(log: DecisionRunLog, results: list[Result], model: str) -> Profile:
    """Fit a profile on the log and the results of a sweep."""
    rates = rates_for(log.header)
    known = None if rates is None else (rates.bytes_per_second, rates.flops_per_second)
    made = profile(log, results, known, model, record.environment())
    print(
        f"{made.measured}, {made.errors}, intake {1e3 * made.intake:.2f} ms, outlet {1e3 * made.outlet:.2f} ms",
        flush=True,
    )
    return made


async def replay(place: Place, target: Target, asked: list[Asked]) -> Result:
    """Measure requests at their times. Their tokens are others each time."""
    work = work_of(asked, vocab=(0, place.highest), seed=f"{time.time()}")
    (result,) = await run_levels(target, [Level("x trace", 1.0, work)])
    return result


class Findings:
    """Measurements on a place, with predictions from one profile."""

    def __init__(self, place: Place, model: str, made: Profile, requests: int) -> None:
        self.place, self.model, self.made, self.requests = place, model, made, requests
        self.engine = made.engine
        knee, _ = highest_rate(self.engine, self.stream, LatencyTarget.parse(place.knee), place.start)
        assert knee is not None, "the target is missed at any rate"
        self.knee = knee.rate
        print(f"knee {self.knee:.2f} requests/s", flush=True)
        self.cells: list[dict[str, Any]] = []
        self.points: list[dict[str, Any]] = []
        self._first: dict[tuple[float, float, int], Result] = {}
        """First result of each load."""

    @property
    def stream(self) -> MixLoad:
        """Requests whose highest rate is the knee."""
        return MixLoad(self.place.mix(1.0), 200, self.place.knee_seconds, seed=KNEE_SEED)

    def cell(self, asked: list[Asked], result: Result, **facts: Any) -> None:
        """Add measured requests, and predict them."""
        plain = as_sent(self.engine, asked, result)
        found = facts | {
            "measured": figures(result.summary),
            "predicted": figures(summary_of(plain)),
            "ttft_error_each": _each(result, plain),
        }
        first = self._first.setdefault((facts["share"], facts["burstiness"], facts["seed"]), result)
        if first is not result:
            found["ttft_spread_each"] = _each(first, result)
        self.cells.append(found)

    def at_speed(self, asked: list[Asked], result: Result, log: DecisionRunLog) -> None:
        """Predict the last cell with the speed of the machine at each moment."""
        slow, slower = at_speed(self.engine, self.made, log, result)
        scaled = as_sent(slow, asked, result)
        self.cells[-1] |= {
            "slower": slower,
            "predicted_at_speed": figures(summary_of(scaled)),
            "ttft_error_each_at_speed": _each(result, scaled),
        }

    def point(self, rate: float, again: bool, result: Result) -> float:
        """Add a rate around the knee, without its beginning, and predict it. Returns how far the target is missed: the
        largest ratio of a measured figure to its limit."""
        asked = self.place.mix(1.0).generate(rate, len(result.records), KNEE_SEED)
        run = as_sent(self.engine, asked, result)
        later = Run(result.records[int(WARM * len(asked)) :], result.summary["seconds"], 0.0)
        self.points.append({
            "rate": rate, "again": again, "measured": _latencies(summarize(later)),
            "predicted": _latencies(summary_of(run, warm=WARM)),
        })  # fmt: skip
        print(f"around the knee: {self.points[-1]}", flush=True)
        return max(LatencyTarget.parse(self.place.knee).ratios(self.points[-1]["measured"]).values())

    def found(self) -> dict[str, Any]:
        """Return all of it."""
        target, made = LatencyTarget.parse(self.place.knee), self.made
        rounds = [
            sorted((p for p in self.points if p["again"] is again), key=lambda p: p["rate"]) for again in (False, True)
        ]
        measured = [crossing([(each["rate"], each["measured"]) for each in points], target) for points in rounds]
        once = {each["rate"]: each["predicted"] for each in self.points}
        return {
            "model": self.model,
            "requests": self.requests,
            "least_seconds": self.place.seconds,
            "work": {"prompt": self.place.prompt, "output": self.place.output},
            "sweep": made.measured
            | {"step_errors": made.errors, "intake_s": made.intake, "outlet_s": made.outlet},
            "knee_requests_per_second": self.knee,
            "knee_target": self.place.knee,
            "knee": {
                "points": self.points,
                "measured": measured[0],
                "measured_again": measured[1],
                "predicted": crossing(sorted(once.items()), target),
            },
            "within": within(self.cells),
            "cells": self.cells,
        }  # fmt: skip


class _Measurement:
    """The sweep, the cells and the knee of one server."""

    def __init__(
        self, place: Place, model: str, url: str, file: Path, options: argparse.Namespace, keep: Keep, kept: KeptRuns
    ) -> None:
        self.keep, self.kept = keep, kept
        self.place, self.model, self.url, self.file, self.options = place, model, url, file, options
        self.until = time.monotonic() + options.limit

    async def run(self) -> None:
        """Measure and predict all of it, as far as there is time."""
        place, options = self.place, self.options
        self.target = Target(self.url, await served_model(self.url))
        made = await fit(place, self.target, self.model, self.file, options, self.kept)
        found = self.findings = Findings(place, self.model, made, options.requests)
        seeds = [int(each) for each in options.seeds.split(",")]
        cells = [(share, burst, seed) for seed in [seeds[0], *seeds] for burst in BURSTINESS for share in SHARES]
        once = len(BURSTINESS) * len(SHARES)
        for number, (share, burst, seed) in enumerate(cells):
            if number == once:
                await self._around(again=False)
            if time.monotonic() > self.until:
                print(f"stopped after {number} of {len(cells)} cells", flush=True)
                break
            rate = share * found.knee
            count = max(options.requests, int(rate * place.seconds))
            await self._cell(rate, count, share=share, burstiness=burst, seed=seed, repeated=seed == seeds[0])
            _show(found.cells[-1])
            self.keep(found.found())
        await self._around(again=True)
        self.keep(found.found())

    async def _cell(self, rate: float, count: int, **facts: Any) -> None:
        """Measure requests at their times, and predict them."""
        asked = self.place.mix(facts["burstiness"]).generate(rate, count, facts["seed"])
        before = os.getloadavg()[0]
        result = await replay(self.place, self.target, asked)
        facts |= {"machine_load": [before, os.getloadavg()[0]]}
        self.kept.add(result, kind="cell", rate=rate, count=count, **facts)
        self.findings.cell(asked, result, **facts)
        if self.place.shared:
            await asyncio.sleep(SETTLE_S)
            self.findings.at_speed(asked, result, load(self.file))

    async def _around(self, again: bool) -> None:
        """Measure one stream of requests at rates around the knee, until it both meets and misses the target."""
        missed: dict[float, bool] = {}
        while time.monotonic() < self.until and len(missed) < MOST_AROUND:
            share = next((each for each in AROUND if each not in missed), None)
            if share is None:
                if len(set(missed.values())) > 1:
                    break
                share = min(missed) - STEP if all(missed.values()) else max(missed) + STEP
            rate = share * self.findings.knee
            result = await replay(self.place, self.target, self.findings.stream.at(rate))
            self.kept.add(result, kind="knee", rate=rate, again=again)
            missed[share] = self.findings.point(rate, again, result) > 1


def predict_again(place: Place, folder: Path, requests: int) -> dict[str, Any]:
    """Predict kept runs from a profile that is fitted again on their sweep."""
    sweep_results: list[Result] = []
    found: Findings | None = None
    for facts, result in kept_runs(folder):
        kind = facts.pop("kind")
        if kind == "sweep":
            sweep_results.append(result)
            environment = facts["environment"]
            continue
        if found is None:
            made = fitted(kept_log(folder, until=result.began), sweep_results, "")
            found = Findings(place, "", made, requests)
        if kind == "knee":
            found.point(facts["rate"], facts["again"], result)
            continue
        rate, count = facts.pop("rate"), facts.pop("count")
        asked = place.mix(facts["burstiness"]).generate(rate, count, facts["seed"])
        found.cell(asked, result, **facts)
        _show(found.cells[-1])
    assert found is not None, f"{folder} has no cells"
    return {"environment": environment} | found.found()


def _latencies(summary: dict[str, Any]) -> dict[str, Any]:
    return {name: summary[name] for name in ("ttft", "itl", "e2e")}


def crossing(points: Sequence[tuple[float, dict[str, Any]]], target: LatencyTarget) -> float | None:
    """Return the rate at which the target begins to be missed, by interpolation between logarithms; None if that is not
    between two of the rates."""
    worst = [(rate, math.log(max(target.ratios(summary).values()))) for rate, summary in points]
    for (low, before), (high, after) in pairwise(worst):
        if before <= 0 < after:
            return low + (high - low) * before / (before - after)
    return None


def _each(result: Result, run: Any) -> float:
    """Compute the mean relative error of the requests' TTFTs in another run."""
    pairs = [(a, b) for a, b in zip(result.records, run.records, strict=True) if not (a.error or b.error)]
    return statistics.mean(abs(b.ttft - a.ttft) / a.ttft for a, b in pairs)


def _show(row: dict[str, Any]) -> None:
    scaled = row.get("predicted_at_speed", {})
    shown = [
        f"{name} {1e3 * row['predicted'][name]:.0f}{f'|{1e3 * scaled[name]:.0f}' if scaled else ''} of "
        f"{1e3 * value:.0f} ms"
        for name, value in row["measured"].items()
    ]
    slower = f", slower {row['slower']:.2f}" if scaled else ""
    print(f"{row['share']:.0%} burstiness {row['burstiness']:g} seed {row['seed']}{slower}:", *shown, flush=True)


def table(result: dict[str, Any]) -> str:
    """Format the median errors of each load beside the spread of repeated runs."""
    names = list(result["cells"][0]["measured"])
    shown = " | ".join(name.replace("ttft", "TTFT").replace("itl", "ITL") for name in names)
    lines = [f"| load | burstiness | {shown} | each TTFT |", "|---" * (3 + len(names)) + "|"]
    for share in SHARES:
        for burst in BURSTINESS:
            rows = [each for each in result["cells"] if (each["share"], each["burstiness"]) == (share, burst)]
            cells = []
            for name in names:
                off = statistics.median(abs(each["predicted"][name] / each["measured"][name] - 1) for each in rows)
                twice = [each["measured"][name] for each in rows if each["seed"] == rows[0]["seed"]]
                cells.append(f"{off:.1%}" + (f" ({max(twice) / min(twice) - 1:.1%})" if len(twice) > 1 else ""))
            each_ttft = statistics.median(each["ttft_error_each"] for each in rows)
            twice = [each["ttft_spread_each"] for each in rows if "ttft_spread_each" in each]
            shown_each = f"{each_ttft:.1%}" + (f" ({statistics.median(twice):.1%})" if twice else "")
            lines.append(f"| {share:.0%} | {burst:g} | {' | '.join(cells)} | {shown_each} |")
    machine, inside, knee = (
        result["environment"],
        result["within"],
        f"{result['knee_requests_per_second']:.1f} requests/s",
    )
    both = result.get("knee", {})
    if both.get("measured") and both.get("predicted"):
        off = both["predicted"] / both["measured"] - 1
        knee += f"; for one stream of requests {both['predicted']:.1f}, measured {both['measured']:.1f} ({off:+.1%})"
    lines.append(
        f"\nMedian error over the runs (in parentheses, if measured: the spread of the first seed run twice). Knee "
        f"{knee}; "
        f"{inside['met']} of {inside['of']} figures of single runs are within 5% (ITL p99: 3%) or the spread. "
        f"`{result['command']}`, {machine['processor']}, {record.made_at([machine])}.\n"
    )
    return "\n".join(lines)


def within(cells: list[dict[str, Any]]) -> dict[str, int]:
    """Count the figures that are within their tolerance, or within the spread of repeated runs."""
    met = total = 0
    for cell in cells:
        like = [each for each in cells if (each["share"], each["burstiness"]) == (cell["share"], cell["burstiness"])]
        for name in ("ttft p50", "ttft p90", "ttft p99", "itl p99"):
            twice = [each["measured"][name] for each in like if each["seed"] == like[0]["seed"]]
            allowed = max(0.03 if name == "itl p99" else 0.05, max(twice) / min(twice) - 1)
            met += abs(cell["predicted"][name] / cell["measured"][name] - 1) <= allowed
            total += 1
    return {"met": met, "of": total}
