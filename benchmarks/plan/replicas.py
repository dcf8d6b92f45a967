"""Three replicas on a CPU, one of which is killed in the middle of a load: the predicted effects beside the real ones.

    python benchmarks/plan/replicas.py [--threads 2] [--rounds 3] [--load 0.65] [--out FILE]

A profile is fitted on one synthetic sweep of a server with one engine. In a server with three, an engine is killed
twice under load, to learn the seconds until another one takes its place. Then each round draws a load of its own, and
runs it without a kill; that shows how much slower steps are beside each other. The effect of a kill in the same load
is predicted (``transect/plan/drills.py``), and the load runs with the kill. Two replicas cannot serve the load, so a
queue grows while one is missing. Each replica is bound to ``--threads`` cores of its own, and the load to the next two,
among the cores that this process may use (``taskset``), if they are enough. About 100 s, and 80 s a round; the record
is written after each round.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import json
import os
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.plan.cells import CPU, SETTLE_S, fit, replay
from benchmarks.plan.kept_runs import KeptRuns
from transect.bench.levels import Result
from transect.bench.target import Target, served_model
from transect.bench.traces.asked import Asked
from transect.cli.plan_calibrate import server
from transect.engine.frontends.looks import WATCH_S
from transect.explain.engine.calibration import known_steps
from transect.explain.engine.log import DecisionRunLog, load
from transect.plan.capacity import MixLoad, highest_rate
from transect.plan.drills import Effect, FleetTimes, percentile, predict
from transect.plan.fleet import EngineModel
from transect.plan.profile import Loads, Profile
from transect.plan.target import LatencyTarget

REPLICAS, SECONDS, AT = 3, 30.0, 6.0
LEARN_S, LEARNED = 14.0, 2
"""Seconds of a load in which the start of another engine is timed, and the number of these loads."""
LOAD_CORES = 2
NOTICED_S = 0.03
"""From the end of an engine's process until the server knows."""
LOOK_S = 0.02
PLACE = dataclasses.replace(CPU, output="uniform:60-140")
OUT = record.RESULTS / "cpu" / "plan_replicas.json"


class Cores:
    """Cores of the replicas, ``threads`` for each, and of the load; none are bound if there are too few."""

    def __init__(self, threads: int) -> None:
        self._all = sorted(os.sched_getaffinity(0))
        self.bound = len(self._all) >= REPLICAS * threads + LOAD_CORES
        self._own = [set(self._all[place * threads : (place + 1) * threads]) for place in range(REPLICAS)]
        self._load = self._all[REPLICAS * threads : REPLICAS * threads + LOAD_CORES]
        self._pids: list[int | None] = [None] * REPLICAS

    @contextmanager
    def loading(self) -> Iterator[None]:
        """Bind the main thread, which sends the load, until the end of the block."""
        if self.bound:
            os.sched_setaffinity(0, self._load)
        try:
            yield
        finally:
            os.sched_setaffinity(0, self._all)

    def bind(self, pids: Sequence[int]) -> None:
        """Bind the engines with these processes; a new one gets the cores of one that has ended."""
        if not self.bound or set(pids) <= set(self._pids):
            return
        self._pids = [each if each in pids else None for each in self._pids]
        free = [place for place, each in enumerate(self._pids) if each is None]
        for place, pid in zip(free, [each for each in pids if each not in self._pids], strict=False):
            self._pids[place] = pid
            for thread in Path(f"/proc/{pid}/task").iterdir():
                with suppress(ProcessLookupError):
                    os.sched_setaffinity(int(thread.name), self._own[place])


@dataclass(frozen=True, slots=True)
class Replicas:
    """A server with three engines."""

    url: str
    cores: Cores

    async def pids(self, client: httpx.AsyncClient) -> list[int]:
        """List the processes of the engines that live, bound to their cores."""
        found = list((await client.get(f"{self.url}/health")).json()["engine_pids"])
        self.cores.bind(found)
        return found

    async def kill(self) -> float:
        """Kill an engine, and return the seconds until there are as many as before."""
        async with httpx.AsyncClient(timeout=30) as client:
            dead = (await self.pids(client))[0]
            began = time.perf_counter()
            os.kill(dead, signal.SIGKILL)
            while len(living := set(await self.pids(client)) - {dead}) < REPLICAS:
                assert living, "all engines have ended"
                await asyncio.sleep(LOOK_S)
            return time.perf_counter() - began

    async def run(self, target: Target, asked: list[Asked], kill: bool) -> tuple[Result, float, float]:
        """Run a load. Returns its result, the replica-seconds lost, and the moment of the kill, in seconds from the
        start of the load."""
        at = 0.0

        async def disturb() -> float:
            nonlocal at
            if not kill:
                return 0.0
            await asyncio.sleep(AT)
            at = time.perf_counter()
            return await self.kill()

        result, lost = await asyncio.gather(replay(PLACE, target, asked), disturb())
        return result, lost, at - result.began


def p99(result: Result) -> float:
    """Return the 99th percentile of the times of answered requests."""
    return percentile([each.latency for each in result.records if each.error is None])


def failed(result: Result) -> int:
    """Count the requests without an answer."""
    return sum(each.error is not None for each in result.records)


async def fit_one(options: argparse.Namespace, flags: list[str], folder: Path, cores: Cores) -> Profile:
    """Fit the profile of one engine."""
    file = folder / "one.log"
    kept = KeptRuns(options.keep, file)
    with server(options.model, [*flags, "--decision-log", str(file)]) as url, cores.loading():
        async with httpx.AsyncClient(timeout=30) as client:
            await Replicas(url, cores).pids(client)
        return await fit(PLACE, Target(url, await served_model(url)), options.model, file, options, kept)


def slowdown(made: Profile, logs: Sequence[DecisionRunLog], calm: Result) -> float:
    """Return the seconds of the steps of several engines during a run over those that the profile predicts."""
    end = calm.began + calm.summary["seconds"]
    taken = guessed = 0.0
    for log in logs:
        loads = Loads(log.header, made.bytes_per_second, made.flops_per_second)
        for step in (each for each in known_steps(log) if calm.began <= each.begins <= end):
            taken += step.seconds
            guessed += made.times.fitted.seconds(loads.of([(start, count) for _, start, count in step.rows]))
    return taken / guessed


def slower(engine: EngineModel, factor: float) -> EngineModel:
    """Return an engine whose steps take ``factor`` times as long."""
    return dataclasses.replace(
        engine,
        seconds=lambda batch: factor * engine.seconds(batch),
        by_load=lambda load: factor * engine.by_load(load),
    )


async def measure(options: argparse.Namespace, folder: Path, keep: Callable[[dict[str, Any]], None]) -> None:
    """Predict and measure all rounds. ``keep`` gets what is there after each."""
    cores = Cores(options.threads)
    flags = [*PLACE.flags, "--threads", str(options.threads)]
    made = await fit_one(options, flags, folder, cores)
    log = folder / "three.log"
    flags += ["--data-parallel-size", str(REPLICAS), "--decision-log", str(log)]
    knee, _ = highest_rate(made.engine, MixLoad(PLACE.mix(1.0), 200), LatencyTarget.parse(PLACE.knee), PLACE.start)
    assert knee is not None, "the target is missed at any rate"
    rate = options.load * REPLICAS * knee.rate
    rows: list[dict[str, Any]] = []
    with server(options.model, flags) as url, cores.loading():
        fleet, target = Replicas(url, cores), Target(url, await served_model(url))
        async with httpx.AsyncClient(timeout=30) as client:
            await fleet.pids(client)
        learned = [PLACE.mix(1.0).generate(rate, int(rate * LEARN_S), f"learn {each}") for each in range(LEARNED)]
        back = statistics.mean([(await fleet.run(target, asked, kill=True))[1] for asked in learned])
        times = FleetTimes(noticed=NOTICED_S, engine=max(0.0, back - NOTICED_S - WATCH_S / 2))
        print(f"knee of one engine {knee.rate:.1f}, load {rate:.1f} requests/s, {back:.2f} s to start", flush=True)
        for seed in range(options.rounds):
            asked = PLACE.mix(1.0).generate(rate, int(rate * SECONDS), seed)
            calm, _, _ = await fleet.run(target, asked, kill=False)
            await asyncio.sleep(SETTLE_S)
            logs = [load(log.with_name(f"{log.name}.{number}")) for number in range(REPLICAS)]
            factor = slowdown(made, logs, calm)
            engine = slower(made.engine, factor)
            guess = predict(engine, REPLICAS, asked, times, AT, ["kill"])["kill"]
            killed, lost, at = await fleet.run(target, asked, kill=True)
            real = Effect(p99(killed), p99(killed) - p99(calm), lost, failed(killed))
            rows.append({
                "seed": seed, "predicted": dataclasses.asdict(guess), "measured": dataclasses.asdict(real),
                "calm_p99_s": p99(calm), "calm_dropped": failed(calm), "at_s": at, "slowdown": factor,
                "machine_load": os.getloadavg()[0],
            })  # fmt: skip
            print(f"slowdown {factor:.2f}, calm p99 {p99(calm):.2f} of {guess.p99 - guess.added_p99:.2f} s")
            print(f"seed {seed}: {guess}, measured {real}", flush=True)
            keep({
                "model": options.model, "threads": options.threads, "bound": cores.bound, "replicas": REPLICAS,
                "seconds": SECONDS, "work": {"prompt": PLACE.prompt, "output": PLACE.output},
                "knee_requests_per_second": knee.rate, "requests_per_second": rate, "back_s": back,
                "rounds": rows,
            })  # fmt: skip


def table(result: dict[str, Any]) -> str:
    """Format the medians of predicted and measured effects."""
    lines = ["| | predicted | measured | measured / predicted |", "|---|---|---|---|"]
    for name, title in (("added_p99", "added to p99 of whole requests, s"), ("lost", "replica-seconds lost")):
        guess, real = (statistics.median(row[kind][name] for row in result["rounds"])
                       for kind in ("predicted", "measured"))  # fmt: skip
        ratios = [row["measured"][name] / row["predicted"][name] for row in result["rounds"]]
        lines.append(
            f"| {title} | {guess:.2f} | {real:.2f} | {statistics.median(ratios):.2f} ({min(ratios):.2f} to "
            f"{max(ratios):.2f}) |"
        )
    dropped, machine = sum(row["measured"]["dropped"] for row in result["rounds"]), result["environment"]
    lines.append(
        f"\n{result['model']}, {result['replicas']} replicas of {result['threads']} threads"
        f"{' on cores of their own' if result['bound'] else ''}, "
        f"{result['requests_per_second']:.1f} requests/s; {dropped} requests dropped; medians of "
        f"{len(result['rounds'])} rounds. `{result['command']}`, {machine['processor']}, {record.made_at([machine])}.\n"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--threads", type=int, default=2, help="of each replica")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--load", type=float, default=0.65, help="share of what the replicas can serve")
    parser.add_argument("--sweep", type=int, default=6, help="requests for each place of a level of the sweep")
    parser.add_argument("--keep", type=Path, help="folder for the profile and the decision log")
    parser.add_argument("--out", type=Path, default=OUT)
    options = parser.parse_args()
    about = {"command": record.command("benchmarks/plan/replicas.py"), "environment": record.environment()}

    def keep(found: dict[str, Any]) -> None:
        record.write(options.out, about | found)

    with tempfile.TemporaryDirectory() as name:
        asyncio.run(measure(options, Path(name), keep))
    print(table(json.loads(options.out.read_text())))


if __name__ == "__main__":
    main()
