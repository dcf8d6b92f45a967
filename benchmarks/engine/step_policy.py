"""Sizes of steps while requests arrive one by one: the shipped scheduler on a virtual clock.

400 requests of Llama-3.1-8B's shape, 600 tokens in and 150 out (each +-60%), arrive at random times (Poisson). A step
takes what steps of its size took in a server on an H200 under such load (``step_timeline.sizes``), with as much noise
as was seen; the host needs time to hand it over, and the server to read a request. What is compared: the policies that
decide how many tokens a step has, and planning late. Then the same where a prompt of 12,000 tokens comes every second,
and where three come at once every three seconds: what those with short prompts feel of it.

This is a simulation. It says which policy is better and why, not what a server will show.

    python benchmarks/engine/step_policy.py [--rates 8 24 40 0] [--seeds 3]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import _paths  # noqa: F401
from benchmarks import record
from transect.bench.levels import random_arrivals
from transect.costs.steps import StepLoad
from transect.engine.executors.gpu.step_sizes import row_bucket, token_bucket
from transect.engine.scheduling.batch import ScheduledBatch, StepResult
from transect.engine.scheduling.clock import VirtualClock
from transect.engine.scheduling.core import EngineCore
from transect.engine.scheduling.request import Request
from transect.engine.scheduling.sampling_params import SamplingParams
from transect.engine.scheduling.scheduler import Scheduler
from transect.engine.scheduling.scheduler_config import SchedulerConfig
from transect.spec.shapes import PRESETS

MODEL = PRESETS["llama-3.1-8b"]
KEY_S = 2 * MODEL.n_layers * MODEL.n_kv_heads * MODEL.head_dim * 2 / (0.9 * 4.35e12)
"""Seconds to read a position of the cache in bfloat16, at 90% of an H200's bandwidth."""
PAIR_S = 4 * MODEL.n_layers * MODEL.n_heads * MODEL.head_dim / 400e12
"""Seconds for a token of a prompt to attend to a position."""
NOISE = 0.02
HOST_S, LAUNCH_S = 0.6e-3, 45e-3
"""Host time to plan and launch a step: as a graph, and kernel by kernel."""
GRAPH_TOKENS = 1856
"""Tokens of the largest step that is a graph."""
READ_S, SERVER_S = 1.3e-3, 2e-3
"""Time in which the server reads a request, while others wait, and other time of a request outside of the engine."""
MEASURED = ("serve_load_sglang.json",)
"""The results that say what steps take."""
FEWEST = 3
"""Steps of a size that say what it takes."""
REQUESTS, INPUT, OUTPUT, SPREAD = 400, 600, 150, 0.6
LONG_INPUT, LONG_RATE = 12_000, 8.0
"""Long prompts among others, which come at a rate of their own."""
LONGS = (1, 3)
"""Number of them that arrive at once, and the seconds between such arrivals."""

POLICIES: dict[str, tuple[dict[str, Any], bool]] = {
    "whole prompts": ({}, False),
    "512 tokens": ({"max_mixed_tokens": 512}, False),
    "by time": ({"itl_target": 0.0}, False),
    "by time, planned late": ({"itl_target": 0.0}, True),
}
"""Name: limits of the scheduler, and whether the loop waits for messages until the step must be planned."""


class Sizes:
    """Measured times of steps by their sizes.

    Args:
        results: of ``server/load.py``.
    """

    def __init__(self, results: Sequence[dict[str, Any]]) -> None:
        levels = [level for result in results for level in result["levels"]]
        best: dict[tuple[bool, int], dict[str, Any]] = {}
        for size in (size for level in levels for size in level["timeline"]["sizes"]):
            key = size["mixed"], size["tokens"]
            if size["steps"] >= FEWEST and size["steps"] > best.get(key, {"steps": 0})["steps"]:
                best[key] = size
        self.seconds = {key: size["learned"] - attending(size["keys"], size["pairs"]) for key, size in best.items()}

    def of(self, batch: ScheduledBatch) -> float:
        """Return the seconds of a step."""
        load = StepLoad.of((row.start, row.num_tokens) for row in batch.rows)
        mixed = load.tokens > len(batch.rows)
        graph = load.tokens <= GRAPH_TOKENS
        tokens = load.tokens if not graph else token_bucket(load.tokens) if mixed else row_bucket(load.tokens, True)
        return self._between(mixed, tokens) + attending(load.keys, load.pairs)

    def _between(self, mixed: bool, tokens: int) -> float:
        known = sorted((size, seconds) for (kind, size), seconds in self.seconds.items() if kind == mixed)
        place = min(max(bisect_left(known, (tokens, 0.0)), 1), len(known) - 1)
        (low, first), (high, last) = known[place - 1 : place + 1]
        return first + (last - first) * (tokens - low) / (high - low)


def attending(keys: float, pairs: float) -> float:
    """Return the seconds of attention, see ``StepLoad``."""
    return keys * KEY_S + pairs * PAIR_S


class Device:
    """An executor whose steps take as long as they were measured to take."""

    def __init__(self, clock: VirtualClock, sizes: Sizes, seed: int) -> None:
        self.clock, self.sizes = clock, sizes
        self.free_at = 0.0
        self.random = random.Random(seed)

    def submit(self, batch: ScheduledBatch) -> Pending:
        launch = LAUNCH_S if batch.num_tokens > GRAPH_TOKENS else HOST_S
        begins = max(self.clock.now() + HOST_S, self.free_at)
        self.clock.advance(launch)
        seconds = self.sizes.of(batch) * self.random.gauss(1.0, NOISE)
        self.free_at = max(begins + seconds, self.clock.now())
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


def simulate(
    sizes: Sizes,
    limits: dict[str, Any],
    late: bool,
    rate: float,
    seed: int,
    *,
    requests: int = REQUESTS,
    longs: int = 0,
) -> dict[str, float]:
    """Simulate one run; times in milliseconds. ``rate`` 0: all requests at once. ``longs``: long prompts that arrive at
    once, one for each second; their times are not among those of the others."""
    rng = random.Random(seed)
    times = random_arrivals(requests, rate, seed=seed) if rate else [0.0] * requests
    clock = VirtualClock()
    config = SchedulerConfig(
        num_blocks=50_000, max_num_seqs=512, max_num_batched_tokens=8192, max_model_len=16384, seed=0,
        enable_prefix_caching=False, graph_tokens=GRAPH_TOKENS, **limits,
    )  # fmt: skip
    core = EngineCore(Scheduler(config, clock), Device(clock, sizes, seed), lag=1)
    arrivals = [(at, length(rng, INPUT), length(rng, OUTPUT)) for at in times]
    if longs:
        moments = [(1 + index) * longs for index in range(int(times[-1] / longs))]
        arrivals = sorted(arrivals + [(float(at), LONG_INPUT, OUTPUT) for at in moments for _ in range(longs)])
    comes: list[float] = []
    for at, *_ in arrivals:
        comes.append(max(at + SERVER_S, comes[-1] if comes else 0.0) + READ_S)
    seen: dict[str, list[float]] = {str(index): [] for index in range(len(arrivals))}
    coming = 0
    while coming < len(arrivals) or core.has_work:
        while coming < len(arrivals) and comes[coming] <= clock.now():
            at, prompt, output = arrivals[coming]
            params = SamplingParams(max_tokens=output, ignore_eos=True)
            core.add(Request(str(coming), tuple(range(prompt)), params, arrival_time=at))
            coming += 1
        until = comes[coming] - clock.now() if coming < len(arrivals) else float("inf")
        if not core.has_work:
            clock.advance(until)
            continue
        if late and (slack := core.time_to_plan()) > 0:
            clock.advance(min(slack, max(until, 0.0)) if until < slack else slack)
            continue
        for news in core.step():
            seen[news.request_id] += [clock.now()] * len(news.new_token_ids)
    return figures(arrivals, list(seen.values()), clock.now())


def figures(arrivals: list[tuple[float, int, int]], seen: list[list[float]], end: float) -> dict[str, float]:
    """Compute the figures of the tables of load tests, in milliseconds."""
    ttft, tpot, itl, whole, longs = [], [], [], [], []
    for (at, prompt, _), tokens in zip(arrivals, seen, strict=True):
        if prompt == LONG_INPUT:
            longs.append(tokens[0] - at)
            continue
        gaps = [after - before for before, after in pairwise(tokens)]
        ttft.append(tokens[0] - at)
        tpot.append(statistics.fmean(gaps))
        itl += gaps
        whole.append(tokens[-1] - at)
    found = {"tokens_per_second": sum(map(len, seen)) / end}
    for name, values in (("ttft", ttft), ("tpot", tpot), ("itl", itl), ("e2e", whole)):
        cuts = statistics.quantiles(values, n=100, method="inclusive")
        found |= {f"{name}_p50": 1e3 * cuts[49], f"{name}_p99": 1e3 * cuts[98]}
    return found | ({"long_ttft_p50": 1e3 * statistics.median(longs)} if longs else {})


NAMES = {"ttft": "TTFT", "tpot": "TPOT", "itl": "ITL", "e2e": "E2E"}


def table(result: dict[str, Any]) -> str:
    """Format the table of the page on the engine."""
    heads = [f"{name} {share}" for name in NAMES.values() for share in ("p50", "p99")]
    lines = [f"| arrivals | policy | tokens/s | {' | '.join(heads)} |", "|---" * (3 + len(heads)) + "|"]
    for row in result["rows"]:
        rate = f"{row['rate']:g}/s" if row["rate"] else "all at once"
        lines.append(f"| {rate} | {row['policy']} | {row['tokens_per_second']:,.0f} | {cells(row)} |")
    return "\n".join([*lines, origin(result)])


def long_table(result: dict[str, Any]) -> str:
    """Format the same table with long prompts: the times of short prompts among them, and the first tokens of the long
    ones."""
    heads = [f"{name} {share}" for name in NAMES.values() for share in ("p50", "p99")]
    columns = ["long prompts at once", "policy", *heads, "TTFT p50 of 12,000 tokens"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in result["long_rows"]:
        lines.append(f"| {row['longs']} | {row['policy']} | {cells(row)} | {row['long_ttft_p50']:,.0f} |")
    return "\n".join([*lines, origin(result)])


def cells(row: dict[str, Any]) -> str:
    """Format the times of a row."""
    return " | ".join(f"{row[f'{name}_{share}']:,.1f}" for name in NAMES for share in ("p50", "p99"))


def origin(result: dict[str, Any]) -> str:
    """Format a table's origin."""
    made = record.made_at([result["environment"]])
    return (
        f"\n`{result['command']}`: simulated, Llama-3.1-8B's shape on an H200, {REQUESTS} requests, milliseconds, "
        f"median of {result['seeds']} seeds, {made}.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rates", type=float, nargs="+", default=[8, 24, 40, 0], help="requests a second; 0: at once")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    results = [json.loads((record.RESULTS / "h200" / name).read_text()) for name in MEASURED]
    sizes = Sizes(results)
    rows: list[dict[str, Any]] = []
    long_rows: list[dict[str, Any]] = []
    for rate, longs in [*((rate, 0) for rate in options.rates), *((LONG_RATE, count) for count in LONGS)]:
        for name, (limits, late) in POLICIES.items():
            runs = [simulate(sizes, limits, late, rate, seed, longs=longs) for seed in range(options.seeds)]
            row = {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            (long_rows if longs else rows).append({"rate": rate, "longs": longs, "policy": name} | row)
            print(f"{rate:5g}/s {name:24}" + " ".join(f"{key} {value:8.1f}" for key, value in row.items()), flush=True)
    result = {
        "command": " ".join(["python", "benchmarks/engine/step_policy.py", *sys.argv[1:]]),
        "environment": record.environment(),
        "seeds": options.seeds,
        "rows": rows,
        "long_rows": long_rows,
    }
    record.write(record.RESULTS / "cpu" / "step_policy.json", result)


if __name__ == "__main__":
    main()
