"""Predictions of ``transect plan serving`` held against servers, under loads that were not fitted.

    python benchmarks/plan/validation.py cpu [--model smollm2-135m] [--requests 40] [--seeds 0,1,2] [--out ...]
    python benchmarks/plan/validation.py h200 [--out ...]

``cpu`` starts a server on this machine, fits a profile on one synthetic sweep (``transect plan calibrate``), finds the
knee by simulation, and then measures traces of three burstinesses at 30, 60 and 90% of the knee, each with several
seeds, and the first seed of each twice: the spread of what was measured. The same requests at the same times are
simulated from the profile. A shared machine is slower at one moment than at another, so each cell has a second
prediction: at each moment steps get on as quickly as those of the measured run did. That leaves out what
no model can know beforehand, the speed of the machine, and keeps all else: arrivals, queue, scheduler, steps by their
work.

``h200`` needs no GPU. It simulates the recorded loads of ``serve_load.json`` from the data sheet of an H200 and the
coefficients of ``costs/serving.py``, which were fitted on offline steps. The seconds outside of the engine are fitted
on the lowest rate; the other rates are held out.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import statistics
import tempfile
import time
from bisect import bisect_right
from math import inf
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.server.generators import own_level
from transect.bench.lengths import Lengths
from transect.bench.levels import Level, Result, run_levels
from transect.bench.target import Target, served_model
from transect.bench.traces.asked import Asked, work_of
from transect.bench.traces.mix import Mix
from transect.bench.traces.reading import read_trace
from transect.cli.plan_calibrate import server
from transect.costs.presets import preset
from transect.engine.scheduling.batch import ScheduledBatch
from transect.engine.scheduling.simulation import SimulatedEngine
from transect.explain.engine.calibration import known_steps
from transect.explain.engine.log import DecisionRunLog, load
from transect.explain.engine.rates import rates_for
from transect.plan.calibrate import profile, sweep
from transect.plan.capacity import MixLoad, highest_rate, summary_of
from transect.plan.choices import CardChoice
from transect.plan.fleet import EngineModel, Fleet
from transect.plan.profile import Loads, Profile
from transect.plan.target import LatencyTarget
from transect.spec.layouts.ranks import RankLayout
from transect.spec.shapes import PRESETS

PROMPT, OUTPUT = "uniform:16-96", "uniform:8-24"
BURSTINESS = (0.25, 1.0, 4.0)
SHARES = (0.3, 0.6, 0.9)
"""Loads, as shares of the load at the knee."""
KNEE = "ttft.p99=3s,itl.p99=1s"
FIGURES = (
    ("ttft", "p50"),
    ("ttft", "p90"),
    ("ttft", "p99"),
    ("itl", "p50"),
    ("itl", "p99"),
    ("e2e", "p50"),
    ("e2e", "p99"),
)
CONTEXT = 1024
ENGINES = 8
"""Engines of the fleet whose simulation is timed."""


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


def figures(summary: dict[str, Any]) -> dict[str, float]:
    """Pick the figures that are compared, in seconds."""
    return {f"{name} {share}": summary[name][share] for name, share in FIGURES if share in summary[name]}


def cpu(options: argparse.Namespace) -> dict[str, Any]:
    """Calibrate, measure and predict on this machine."""
    seeds = [int(each) for each in options.seeds.split(",")]
    mixes = {
        each: Mix(prompt=Lengths.parse(PROMPT), output=Lengths.parse(OUTPUT), burstiness=each) for each in BURSTINESS
    }
    flags = ["--device", "cpu", "--max-num-seqs", "16", "--max-model-len", str(CONTEXT), "--no-prefix-caching"]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "decisions.log"
        with server(options.model, ["--decision-log", str(file), *flags]) as url:
            return asyncio.run(_cpu(options, url, file, mixes, seeds))


async def _cpu(
    options: argparse.Namespace, url: str, file: Path, mixes: dict[float, Mix], seeds: list[int]
) -> dict[str, Any]:
    target = Target(url, await served_model(url))
    warm = work_of(mixes[1.0].generate(1.0, 4, "warm"))
    levels = sweep(8, 512, options.sweep)
    began, results = time.monotonic(), []
    results = await run_levels(target, levels, warm_up=warm)
    await asyncio.sleep(2.0)  # the log is flushed
    log = load(file)
    rates = rates_for(log.header)
    known = None if rates is None else (rates.bytes_per_second, rates.flops_per_second)
    made = profile(log, results, known, options.model, record.environment())
    print(f"sweep of {time.monotonic() - began:.0f} s: {made.measured}, {made.errors}", flush=True)
    engine = made.engine
    knee, _ = highest_rate(engine, MixLoad(mixes[1.0], 200), LatencyTarget.parse(KNEE), 2.0)
    assert knee is not None, "the target is missed at any rate"
    print(f"knee {knee.rate:.2f} requests/s", flush=True)
    cells = [(share, burst, seed) for seed in [seeds[0], *seeds] for burst in BURSTINESS for share in SHARES]
    rows: list[dict[str, Any]] = []
    for number, (share, burst, seed) in enumerate(cells):
        if time.monotonic() - began > options.limit:
            print(f"stopped after {number} of {len(cells)} cells", flush=True)
            break
        asked = mixes[burst].generate(share * knee.rate, options.requests, seed)
        rows.append(await _cell(target, engine, made, file, asked, len(BURSTINESS) * len(SHARES) > number))
        rows[-1] |= {"share": share, "burstiness": burst, "seed": seed}
        _show(rows[-1])
    return {
        "model": options.model,
        "requests": options.requests,
        "work": {"prompt": PROMPT, "output": OUTPUT},
        "sweep": made.measured | {"step_errors": made.errors, "intake_s": made.intake, "outlet_s": made.outlet},
        "knee_requests_per_second": knee.rate,
        "knee_target": KNEE,
        "cells": rows,
    }


async def _cell(
    target: Target, engine: EngineModel, made: Profile, file: Path, asked: list[Asked], repeated: bool
) -> dict[str, Any]:
    """Measure requests at their times, and predict them."""
    load_before = os.getloadavg()[0]
    (result,) = await run_levels(target, [Level("x trace", 1.0, work_of(asked, seed=f"{time.time()}"))])
    await asyncio.sleep(1.5)  # the log is flushed
    slow, slower = at_speed(engine, made, load(file), result)
    plain, scaled = (Fleet(each).run(asked) for each in (engine, slow))
    return {
        "repeated": repeated,
        "machine_load": [load_before, os.getloadavg()[0]],
        "slower": slower,
        "measured": figures(result.summary),
        "predicted": figures(summary_of(plain)),
        "predicted_at_speed": figures(summary_of(scaled)),
        "ttft_error_each": _each(result, plain),
        "ttft_error_each_at_speed": _each(result, scaled),
    }


def _each(result: Result, run: Any) -> float:
    """Compute the mean relative error of the requests' TTFTs."""
    pairs = [(a, b) for a, b in zip(result.records, run.records, strict=True) if a.error is None]
    return statistics.mean(abs(b.ttft - a.ttft) / a.ttft for a, b in pairs)


def _show(row: dict[str, Any]) -> None:
    shown = [
        f"{name} {1e3 * row['predicted'][name]:.0f}|{1e3 * row['predicted_at_speed'][name]:.0f} of {1e3 * value:.0f} ms"
        for name, value in row["measured"].items()
    ]
    print(
        f"{row['share']:.0%} burstiness {row['burstiness']:g} seed {row['seed']}, slower {row['slower']:.2f}:",
        *shown,
        flush=True,
    )


def h200(options: argparse.Namespace) -> dict[str, Any]:
    """Predict the recorded loads of an H200."""
    recorded = json.loads((record.RESULTS / "h200" / "serve_load.json").read_text())
    choice = CardChoice(PRESETS[recorded["shape"]], preset("h200"), RankLayout(), "bf16", "auto", 16384)
    rows = []
    for level in sorted(recorded["levels"], key=lambda each: float(each["rate"])):
        work = own_level(float(level["rate"]), recorded["work"]["requests"], level["seed"], 128255).work
        asked = [Asked(each.at, len(str(each.prompt).split()), each.output_tokens) for each in work]
        began = time.process_time()
        run = Fleet(choice.engine).run(asked)
        taken = time.process_time() - began
        rows.append({
            "rate": level["rate"], "measured": figures(level["result"]), "predicted": figures(summary_of(run)),
            "simulated_s": run.seconds, "processor_s": taken,
        })  # fmt: skip
        for name, value in rows[-1]["measured"].items():
            guess = rows[-1]["predicted"][name]
            off = f"{1e3 * guess:.1f} of {1e3 * value:.1f} ms, {guess / value - 1:+.0%}"
            print(f"{level['rate']} requests/s {name}: {off}")
        print(f"{run.seconds:.1f} s in {taken:.2f} s of a processor", flush=True)
    found = {"model": recorded["shape"], "recorded": recorded["environment"], "levels": rows}
    if options.azure is not None:
        asked = read_trace(options.azure)
        began = time.process_time()
        run = Fleet(choice.engine, ENGINES).run(asked)
        found["azure"] = {
            "requests": len(asked), "engines": ENGINES, "simulated_s": run.seconds,
            "processor_s": time.process_time() - began, "steps": run.steps,
        }  # fmt: skip
        print(found["azure"], flush=True)
    return found


def cpu_table(result: dict[str, Any]) -> str:
    """Format the errors by share of the knee and burstiness, medians over the seeds, beside the spread of repeated
    runs."""
    cells = result["cells"]
    shown = ("ttft p50", "ttft p90", "ttft p99", "itl p99", "e2e p50")
    lines = [
        "| load | burstiness | runs | machine slowdown | "
        + " | ".join(f"{n.replace('ttft', 'TTFT')}" for n in shown)
        + " | each TTFT |",
        "|---" * (5 + len(shown)) + "|",
    ]
    for share in SHARES:
        for burst in BURSTINESS:
            rows = [each for each in cells if (each["share"], each["burstiness"]) == (share, burst)]
            if not rows:
                continue
            slow = statistics.median(each["slower"] for each in rows)
            parts = [_errors(rows, name) for name in shown]
            each_ttft = [statistics.median(each[key] for each in rows) for key in
                         ("ttft_error_each", "ttft_error_each_at_speed")]  # fmt: skip
            lines.append(
                f"| {share:.0%} | {burst:g} | {len(rows)} | {slow:.2f} x | {' | '.join(parts)} | "
                f"{each_ttft[0]:.0%}, {each_ttft[1]:.0%} |"
            )
    machine, made = result["environment"], result["sweep"]
    loads = [load for each in cells for load in each["machine_load"]]
    lines.append(
        f"\nEach cell: error of the prediction from the sweep alone, error with the machine's speed of each moment, "
        f"and (in parentheses) the spread of the first seed measured twice; medians over runs. {result['model']}, "
        f"{result['requests']} requests a run, knee {result['knee_requests_per_second']:.2f} requests/s. The machine "
        f"was shared: its load was {min(loads):.0f} to {max(loads):.0f} on {machine['cores']} cores, and held-out "
        f"steps of the sweep itself were off by {made['step_errors']['median']:.0%} at the median. "
        f"`{result['command']}`, {machine['processor']}, {record.made_at([machine])}.\n"
    )
    return "\n".join(lines)


def _errors(rows: list[dict[str, Any]], name: str) -> str:
    found = []
    for kind in ("predicted", "predicted_at_speed"):
        found.append(statistics.median(abs(each[kind][name] / each["measured"][name] - 1) for each in rows))
    first = rows[0]["seed"]
    again = [each["measured"][name] for each in rows if each["seed"] == first]
    spread = f" ({max(again) / min(again) - 1:.0%})" if len(again) > 1 else ""
    return f"{found[0]:.0%}, {found[1]:.0%}{spread}"


def h200_table(result: dict[str, Any]) -> str:
    """Format predicted and measured figures of each recorded rate."""
    names = [name for name in result["levels"][0]["measured"] if name != "itl p50"]
    lines = [
        "| requests/s | "
        + " | ".join(name.replace("ttft", "TTFT").replace("itl", "ITL") for name in names)
        + " | times real time |",
        "|---" * (len(names) + 2) + "|",
    ]
    for row in result["levels"]:
        cells = []
        for name in names:
            guess, value = row["predicted"][name], row["measured"][name]
            cells.append(f"{1e3 * guess:,.0f} of {1e3 * value:,.0f} ms, {guess / value - 1:+.0%}")
        rate = "all at once" if row["rate"] == "inf" else row["rate"]
        lines.append(f"| {rate} | {' | '.join(cells)} | {row['simulated_s'] / row['processor_s']:.0f} |")
    recorded, machine = result["recorded"], result["environment"]
    hour = ""
    if (azure := result.get("azure")) is not None:
        hour = (
            f" {azure['requests']:,} requests of Azure's conversations ({azure['simulated_s'] / 60:.0f} minutes) on "
            f"{azure['engines']} engines take {azure['processor_s']:.0f} s of one core."
        )
    lines.append(
        f"\n{result['model']}, error of predictions, {record.made_at([recorded])}; the simulation by "
        f"`{result['command']}` on {machine['processor']}, {record.made_at([machine])}.{hour}\n"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("where", choices=("cpu", "h200"))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--requests", type=int, default=40, help="of each cell")
    parser.add_argument("--sweep", type=int, default=6, help="requests for each place of a level of the sweep")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--limit", type=float, default=3600.0, help="seconds after which no further cell begins")
    parser.add_argument("--azure", type=Path, help="AzureLLMInferenceTrace_conv.csv: time its simulation")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found = (cpu if options.where == "cpu" else h200)(options)
    command = f"python benchmarks/plan/validation.py {options.where}"
    out = options.out or record.RESULTS / options.where / "plan_validation.json"
    record.write(out, {"command": command, "environment": record.environment(), **found})


if __name__ == "__main__":
    main()
