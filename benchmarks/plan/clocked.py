"""Predictions of ``transect plan`` held against the engine loop in real time, on a device that a busy machine cannot
slow down: its steps sleep for a time that follows from their work, and from chance (3%).

    chrt -f 20 python benchmarks/plan/clocked.py [--requests 40] [--seeds 0,1,2] [--out ...]

The shipping ``EngineCore`` and ``Scheduler`` run on the wall clock, one step ahead of the device as on a GPU, sized by
time as in a server. A profile is fitted on one sweep of closed loops, from its decision log. Then traces of three
burstinesses at 30, 60 and 90% of the knee run with three seeds, the first seed twice. The simulation is not given the
law: the check covers all but the step times of a real device.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from itertools import repeat
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.plan.cells import BURSTINESS, SHARES, figures, table, within
from transect.bench.lengths import Lengths
from transect.bench.levels import Level, Result
from transect.bench.load import Record, Run
from transect.bench.summary import summarize
from transect.bench.traces.asked import Asked
from transect.bench.traces.mix import Mix
from transect.costs.steps import StepLoad
from transect.engine.scheduling.batch import Handle, ScheduledBatch, StepResult
from transect.engine.scheduling.clock import WallClock
from transect.engine.scheduling.core import EngineCore
from transect.engine.scheduling.decisions import FORMAT, DecisionLog, Header
from transect.engine.scheduling.request import Request
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.engine.scheduling.scheduler import Scheduler
from transect.engine.scheduling.scheduler_config import SchedulerConfig
from transect.explain.engine.log import build
from transect.plan.calibrate import profile
from transect.plan.capacity import MixLoad, highest_rate, summary_of
from transect.plan.fleet import Fleet
from transect.plan.target import LatencyTarget

LIMITS = SchedulerConfig(
    num_blocks=2000, max_num_seqs=32, max_num_batched_tokens=512, max_model_len=1024, itl_target=0.0, seed=0
)
MIX = {"prompt": Lengths.parse("uniform:40-400"), "output": Lengths.parse("uniform:8-40")}
KNEE = "ttft.p99=1s,itl.p99=200ms"
NOISE = 0.03


def law(load: StepLoad) -> float:
    """Return the seconds of a step of the device."""
    return 8e-3 + 2.5e-4 * load.tokens + 3e-4 * load.rows + 1e-6 * load.keys + 5e-7 * load.pairs


class Sleeper:
    """The device. Steps run one after the other; asking for a result sleeps until its step is done."""

    def __init__(self) -> None:
        self.free_at, self.chance = 0.0, random.Random(1)

    def submit(self, batch: ScheduledBatch) -> Handle:
        """Begin the step when the one before is done."""
        seconds = law(StepLoad.of(batch.spans())) * self.chance.uniform(1 - NOISE, 1 + NOISE)
        self.free_at = max(self.free_at, time.monotonic()) + seconds
        return Asleep(self.free_at, StepResult({draw.seq_id: 7 for row in batch.rows for draw in row.draws}))


class Asleep:
    """A step on its way."""

    def __init__(self, until: float, known: StepResult) -> None:
        self.until, self.known = until, known

    @property
    def over(self) -> bool:
        """True once the step is done."""
        return time.monotonic() >= self.until

    def draw(self) -> None:
        """Do nothing; nothing waits for it."""

    def result(self) -> StepResult:
        """Wait for the end of the step."""
        time.sleep(max(0.0, self.until - time.monotonic()))
        return self.known


class Engine:
    """The engine loop of a server, without HTTP."""

    def __init__(self) -> None:
        scheduler = Scheduler(LIMITS, WallClock())
        self.core = EngineCore(scheduler, Sleeper(), lag=1)
        header = Header(FORMAT, asdict(LIMITS), 1, scheduler.clock.now())
        self.core.decisions = DecisionLog(scheduler, header)
        self.number = 0

    def run(self, asked: list[Asked], concurrency: int = 0) -> Result:
        """Send requests at their times, or ``concurrency`` at any time; the records of their clients."""
        began, waiting = time.monotonic(), list(reversed(asked))
        records: dict[str, Record] = {}
        while waiting or self.core.has_work:
            now = time.monotonic() - began
            while waiting and (len(self._open(records)) < concurrency if concurrency else waiting[-1].at <= now):
                each = waiting.pop()
                name, self.number = str(self.number), self.number + 1
                due = now if concurrency else each.at
                records[name] = Record(due, due, input_tokens=each.prompt_tokens, output_tokens=each.output_tokens)
                params = SamplingParams(max_tokens=each.output_tokens, ignore_eos=True)
                prompt = tuple(repeat(self.number, each.prompt_tokens))
                self.core.add(Request(name, prompt, params, arrival_time=began + due))
            if not self.core.has_work:
                time.sleep(min(1e-3, max(0.0, waiting[-1].at - now)))
                continue
            if (wait := self.core.time_to_plan()) > 0:
                time.sleep(min(wait, 5e-4))
                continue
            for output in self.core.step():
                moment = time.monotonic() - began
                found = records[output.request_id]
                found.moments += [moment] * len(output.new_token_ids)
                found.ended = moment if output.finish_reason is not None else 0.0
        run = Run(list(records.values()), time.monotonic() - began, 0.0, began)
        return Result(Level("x trace", 1.0, []), summarize(run), run.records, began)

    @staticmethod
    def _open(records: dict[str, Record]) -> list[Record]:
        return [each for each in records.values() if not each.ended]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=40, help="of each run")
    parser.add_argument("--seeds", default="0,1,2")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "plan_clocked.json")
    options = parser.parse_args()
    engine, results = Engine(), []
    mix: Callable[[float], Mix] = lambda burst: Mix(**MIX, burstiness=burst)  # noqa: E731
    engine.run(mix(1.0).generate(5.0, 10, "warm"))
    for size in (1, 2, 4, 8, 16):
        results.append(engine.run(mix(1.0).generate(1.0, 6 * size, f"sweep {size}"), size))
    made = profile(
        build(engine.core.decisions.ring.records()), results, None, "a device that sleeps", record.environment()
    )
    print(
        made.measured, made.errors, f"intake {1e3 * made.intake:.2f} ms, outlet {1e3 * made.outlet:.2f} ms", flush=True
    )
    knee, _ = highest_rate(made.engine, MixLoad(mix(1.0), 300), LatencyTarget.parse(KNEE), 5.0)
    assert knee is not None, "the target is missed at any rate"
    print(f"knee {knee.rate:.2f} requests/s", flush=True)
    seeds = [int(each) for each in options.seeds.split(",")]
    cells: list[dict[str, Any]] = []
    for seed in [seeds[0], *seeds]:
        for burst in BURSTINESS:
            for share in SHARES:
                asked = mix(burst).generate(share * knee.rate, options.requests, seed)
                measured, predicted = engine.run(asked), Fleet(made.engine).run(asked)
                pairs = zip(measured.records, predicted.records, strict=True)
                cells.append({
                    "share": share, "burstiness": burst, "seed": seed, "measured": figures(measured.summary),
                    "predicted": figures(summary_of(predicted)),
                    "ttft_error_each": statistics.mean(abs(b.ttft / a.ttft - 1) for a, b in pairs),
                })  # fmt: skip
                off = {
                    name: f"{cells[-1]['predicted'][name] / value - 1:+.1%}"
                    for name, value in cells[-1]["measured"].items()
                }
                print(f"{share:.0%} burstiness {burst:g} seed {seed}: {off}", flush=True)
    result = {
        "command": "chrt -f 20 python benchmarks/plan/clocked.py", "environment": record.environment(),
        "requests": options.requests, "knee_requests_per_second": knee.rate, "knee_target": KNEE,
        "step_errors": made.errors, "within": within(cells), "cells": cells,
    }  # fmt: skip
    record.write(options.out, result)
    print(table(result))


if __name__ == "__main__":
    main()
