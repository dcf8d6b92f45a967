"""Predict a drill before it runs: the latency that it adds and the capacity that it costs, simulated and then measured.

    python benchmarks/cluster/predicted.py [--rounds 3] [--out FILE]

Requests arrive at three replicas at random times (a Poisson process, the same in all runs). At a third of the time one
engine is killed (SIGKILL), or stopped (SIGSTOP), so that it is half alive. ``transect/plan/fleet.py`` simulates both
with the shipping scheduler and router. It is given the time of a step and of an engine's start, both measured without a
disturbance, and the time after which a failure is noticed, by the code and the settings. Then both are measured: the
router, the hosts and the engine processes are real; tokens are made up (``tests/helpers/stub_engine.py``).

Compared are the 99th percentile of the time of whole requests that a disturbance adds, and the replica-seconds that it
costs. Writes benchmarks/results/cpu/fleet_predicted.json. A round takes about 75 s.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import signal
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from fleet_load import HELPERS, fleet_settings, prepare

import _paths  # noqa: F401
from benchmarks import record
from transect import SamplingParams
from transect.bench.lengths import Lengths
from transect.bench.traces.asked import Asked
from transect.bench.traces.mix import Mix
from transect.engine.scheduling.scheduler_config import SchedulerConfig
from transect.plan.disturbances import Kill
from transect.plan.fleet import EngineModel, Fleet

sys.path.append(str(HELPERS))
from small_fleet import Small
from tiny_llm import save_tiny_llm

REPLICAS, RATE, SECONDS, AT, STEP_S = 3, 8.0, 22.0, 7.0, 0.02
MIX = Mix(prompt=Lengths.parse("uniform:20-60"), output=Lengths.parse("uniform:60-140"))
HUNG_S = 1.0
NOTICED_S = {"kill": 0.05 + 0.02, "stop": HUNG_S + 0.1 + 0.05}
"""Seconds until a failure is noticed: the host sees the end of the process and waits 0.02 s for its last words, the
router does the same; a silent engine is killed after ``hung-after``, by checks every 0.1 s."""
SIGNALS = {"kill": signal.SIGKILL, "stop": signal.SIGSTOP}


def p99(values: list[float]) -> float:
    """Return the 99th percentile."""
    return statistics.quantiles(values, n=100, method="inclusive")[98]


def simulate(asked: list[Asked], step_s: float, intake_s: float, kills: list[Kill]) -> list[float]:
    """Simulate a fleet; return the times of requests, from arrival to last token."""
    limits = SchedulerConfig(num_blocks=4096, max_num_seqs=64, max_num_batched_tokens=512, max_model_len=4096, seed=0)
    model = EngineModel(
        scheduler=limits, seconds=lambda batch: step_s, by_load=lambda load: step_s, intake=intake_s
    )  # fmt: skip
    run = Fleet(model, REPLICAS, kills=kills).run(asked)
    return [each.ended - each.due for each in run.records]


async def measure(small: Small, asked: list[Asked], hit: str) -> tuple[list[float], float, list[float], list[float]]:
    """Measure times of requests, replica-seconds lost, times to first tokens and gaps between tokens."""
    firsts: list[float] = []
    gaps: list[float] = []
    began = time.monotonic()

    async def one(number: int, each: Asked) -> float:
        await asyncio.sleep(max(0.0, began + each.at - time.monotonic()))
        rng = random.Random(number)
        prompt = [rng.randint(65, 90) for _ in range(each.prompt_tokens)]
        params = SamplingParams(seed=number, max_tokens=each.output_tokens, ignore_eos=True)
        last = None
        async for _ in small.fleet.stream(prompt, params, f"{hit} {number} {began}"):
            now = time.monotonic()
            (gaps if last is not None else firsts).append(now - (began + each.at if last is None else last))
            last = now
        return time.monotonic() - began - each.at

    async def disturb() -> float:
        if hit == "calm":
            return 0.0
        await asyncio.sleep(AT)
        host = small.hosts["replica-0"]
        old = host.pid
        os.kill(old, SIGNALS[hit])
        struck = time.monotonic()
        await small.until(lambda: host.pid != old and host.linked and len(small.fleet.alive()) == REPLICAS)
        return time.monotonic() - struck

    *times, lost = await asyncio.gather(*(one(number, each) for number, each in enumerate(asked)), disturb())
    return times, lost, firsts, gaps


async def round_of(number: int, folder: Path, model: str) -> dict[str, Any]:
    """Measure a calm run, predict from it, and measure the disturbed runs."""
    asked = MIX.generate(RATE, int(RATE * SECONDS), seed=number)
    small = Small(fleet_settings(folder, model, True, links={"port": 0}))
    began = time.monotonic()
    await small.open(REPLICAS)
    try:
        await small.run("warm")
        os.kill(small.hosts["replica-1"].pid, signal.SIGKILL)
        began = time.monotonic()
        await small.until(lambda: len(small.fleet.alive()) == REPLICAS - 1)
        await small.until(lambda: len(small.fleet.alive()) == REPLICAS)
        start_s = time.monotonic() - began
        calm, _, firsts, gaps = await measure(small, asked, "calm")
        step_s = statistics.median(gaps)
        intake_s = max(0.0, statistics.median(firsts) - 1.5 * step_s)
        found: dict[str, Any] = {"step_s": step_s, "start_s": start_s, "calm_p99_s": p99(calm)}
        predicted_calm = p99(simulate(asked, step_s, intake_s, []))
        found["predicted_calm_p99_s"] = predicted_calm
        for hit in SIGNALS:
            noticed = NOTICED_S[hit]
            back = start_s + (noticed if hit == "stop" else 0.0)
            kills = [Kill(AT, 0, back=back, notice=noticed)]
            predicted = p99(simulate(asked, step_s, intake_s, kills)) - predicted_calm
            times, lost, _, _ = await measure(small, asked, hit)
            found[hit] = {
                "added_p99_s": p99(times) - p99(calm), "predicted_added_p99_s": predicted,
                "p99_s": p99(times), "predicted_p99_s": predicted + predicted_calm,
                "lost_s": lost, "predicted_lost_s": back,
            }  # fmt: skip
        return found
    finally:
        await small.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "fleet_predicted.json")
    arguments = parser.parse_args()
    prepare(STEP_S)
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        model.mkdir()
        save_tiny_llm(model)
        rounds = [asyncio.run(round_of(n, Path(name) / "fleet", str(model))) for n in range(arguments.rounds)]
    result: dict[str, Any] = {"command": record.command("benchmarks/cluster/predicted.py"), "rounds": rounds}
    for hit in SIGNALS:
        result[hit] = {name: record.summary([each[hit][name] for each in rounds]) for name in rounds[0][hit]}
        print(hit, {name: round(value["median"], 3) for name, value in result[hit].items()})
    record.write(arguments.out, result | record.environment())


if __name__ == "__main__":
    main()
