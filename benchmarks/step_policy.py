"""How steps should be sized while requests come one by one: the shipping scheduler on a virtual clock.

400 requests of Llama-3.1-8B's shape, 600 tokens in and 150 out (each +-60%), arrive at random times (Poisson). A step
takes what the cost model says for an H200 at the rates measured there, a little more for what it does not count, and as
much noise as was seen. What is compared: the policies that decide how many tokens a step has, and planning late.

This is a simulation. It says which policy is better and why, not what a server will show.

    python benchmarks/step_policy.py [--rates 8 24 40 0] [--seeds 3]
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import record
from transect.bench.arrivals import random_arrivals
from transect.bench.floors import Rates, step_floor
from transect.engine.batch import ScheduledBatch, StepResult
from transect.engine.clock import VirtualClock
from transect.engine.core import EngineCore
from transect.engine.request import Request
from transect.engine.sampling_params import SamplingParams
from transect.engine.scheduler import Scheduler
from transect.engine.scheduler_config import SchedulerConfig
from transect.models.cost import Row
from transect.models.presets import PRESETS

MODEL = PRESETS["llama-3.1-8b"]
H200 = Rates(4.35e12, 700e12, "H200")
OF_FLOOR = 0.92
"""Share of the floor at which steps run."""
NOISE = 0.02
HOST_S = 0.6e-3
"""What the host needs to plan a step and to hand it over."""
REQUESTS, INPUT, OUTPUT, SPREAD = 400, 600, 150, 0.6

POLICIES: dict[str, tuple[dict[str, Any], bool]] = {
    "whole prompts": ({}, False),
    "fill_steps": ({"fill_tokens": 256}, False),
    "384 tokens": ({"max_mixed_tokens": 384}, False),
    "by time": ({"itl_target": 0.0}, False),
    "by time, planned late": ({"itl_target": 0.0}, True),
}
"""Name: limits of the scheduler, and whether the loop waits for messages until the step must be planned."""


class Device:
    """An executor whose steps take the time that the cost model says."""

    def __init__(self, clock: VirtualClock, seed: int) -> None:
        self.clock = clock
        self.free_at = 0.0
        self.known: dict[tuple[int, int], float] = {}
        self.random = random.Random(seed)

    def submit(self, batch: ScheduledBatch) -> Pending:
        self.clock.advance(HOST_S)
        rows = [Row(row.num_tokens, row.end) for row in batch.rows]
        drawn = sum(len(row.draws) for row in batch.rows)
        seconds = step_floor(MODEL, rows, H200, None, drawn).seconds / OF_FLOOR
        seconds *= self.random.gauss(1.0, NOISE)
        self.free_at = max(self.clock.now(), self.free_at) + seconds
        tokens = {draw.seq_id: 1 for row in batch.rows for draw in row.draws}
        return Pending(self.clock, self.free_at, StepResult(tokens))


@dataclass(frozen=True)
class Pending:
    clock: VirtualClock
    at: float
    step: StepResult

    def draw(self) -> None:
        pass

    def result(self) -> StepResult:
        self.clock.advance(max(0.0, self.at - self.clock.now()))
        return self.step


def length(rng: random.Random, mean: int) -> int:
    return rng.randint(round(mean * (1 - SPREAD)), round(mean * (1 + SPREAD)))


def simulate(limits: dict[str, Any], late: bool, rate: float, seed: int) -> dict[str, float]:
    """One run; times in milliseconds. ``rate`` 0: all requests at once."""
    rng = random.Random(seed)
    times = random_arrivals(REQUESTS, rate, seed=seed) if rate else [0.0] * REQUESTS
    clock = VirtualClock()
    config = SchedulerConfig(
        num_blocks=50_000, max_num_seqs=256, max_num_batched_tokens=8192, max_model_len=8192, seed=0,
        enable_prefix_caching=False, **limits,
    )  # fmt: skip
    core = EngineCore(Scheduler(config, clock), Device(clock, seed), lag=1)
    arrivals = [(at, length(rng, INPUT), length(rng, OUTPUT)) for at in times]
    seen: dict[str, list[float]] = {str(index): [] for index in range(REQUESTS)}
    coming = 0
    while coming < REQUESTS or core.has_work:
        while coming < REQUESTS and arrivals[coming][0] <= clock.now():
            at, prompt, output = arrivals[coming]
            params = SamplingParams(max_tokens=output, ignore_eos=True)
            core.add(Request(str(coming), tuple(range(prompt)), params, arrival_time=at))
            coming += 1
        until = arrivals[coming][0] - clock.now() if coming < REQUESTS else float("inf")
        if not core.has_work:
            clock.advance(until)
            continue
        if late and (slack := core.time_to_plan()) > 0:
            clock.advance(min(slack, max(until, 0.0)) if until < slack else slack)
            continue
        for news in core.step():
            seen[news.request_id] += [clock.now()] * len(news.new_token_ids)
    return figures(arrivals, seen, clock.now())


def figures(arrivals: list[tuple[float, int, int]], seen: dict[str, list[float]], end: float) -> dict[str, float]:
    """The figures of the tables of load tests, in milliseconds."""
    ttft, tpot, itl, whole = [], [], [], []
    for (at, *_), tokens in zip(arrivals, seen.values(), strict=True):
        gaps = [after - before for before, after in pairwise(tokens)]
        ttft.append(tokens[0] - at)
        tpot.append(statistics.fmean(gaps))
        itl += gaps
        whole.append(tokens[-1] - at)
    found = {"tokens_per_second": sum(map(len, seen.values())) / end}
    for name, values in (("ttft", ttft), ("tpot", tpot), ("itl", itl), ("e2e", whole)):
        cuts = statistics.quantiles(values, n=100, method="inclusive")
        found |= {f"{name}_p50": 1e3 * cuts[49], f"{name}_p99": 1e3 * cuts[98]}
    return found


def table(result: dict[str, Any]) -> str:
    """For the page on the engine."""
    names = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}
    heads = [f"{name} {share}" for name in names.values() for share in ("p50", "p99")]
    lines = [f"| arrivals | policy | tokens/s | {' | '.join(heads)} |", "|---" * (3 + len(heads)) + "|"]
    for row in result["rows"]:
        cells = [f"{row[f'{name}_{share}']:,.1f}" for name in names for share in ("p50", "p99")]
        rate = f"{row['rate']:g}/s" if row["rate"] else "all at once"
        lines.append(f"| {rate} | {row['policy']} | {row['tokens_per_second']:,.0f} | {' | '.join(cells)} |")
    made = record.made_at([result["environment"]])
    lines.append(
        f"\n`{result['command']}`: simulated, Llama-3.1-8B's shape on an H200, {REQUESTS} requests, milliseconds, "
        f"median of {result['seeds']} seeds, {made}.\n"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[8, 24, 40, 0], help="requests a second; 0: at once")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    rows = []
    for rate in options.rates:
        for name, (limits, late) in POLICIES.items():
            runs = [simulate(limits, late, rate, seed) for seed in range(options.seeds)]
            row = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            rows.append({"rate": rate, "policy": name} | row)
            print(f"{rate:5g}/s {name:24}" + " ".join(f"{key} {value:8.1f}" for key, value in row.items()), flush=True)
    result = {
        "command": " ".join(["python", "benchmarks/step_policy.py", *sys.argv[1:]]),
        "environment": record.environment(),
        "seeds": options.seeds,
        "rows": rows,
    }
    record.write(record.RESULTS / "cpu" / "step_policy.json", result)


if __name__ == "__main__":
    main()
