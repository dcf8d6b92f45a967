"""Predict the drills of a fleet, cause them on Ray, and compare the effects.

    python benchmarks/cluster/predicted.py [--only kill,stopped,host,cancelled] [--out FILE]

Requests arrive at three replicas on Ray, in all runs the same ones at the same random times. Two replicas cannot serve
them all, so a queue grows while one is missing. An engine takes some seconds to start, like one with a model.
``transect/plan/drills.py`` simulates each drill with the shipping scheduler and router, as ``transect plan drills``
does. It is given the time of a step and the times of parts (starts, links, orders), all measured in a calm fleet, and
the limits of the settings. Then the drill happens: router, hosts, engine processes and Ray are real; tokens are made up
(``tests/helpers/stub_engine.py``).

Compared are the 99th percentile of the time of whole requests, what the drill adds to it, the replica-seconds that it
costs, and the requests that it drops. A drill that adds nothing is compared by its percentile. Writes
benchmarks/results/cpu/fleet_predicted.json. Each run is a round with measurements and predictions of its own; it is
added to the rounds that the file has, and tables show medians: delete the file to start over. The measurements take two
minutes, a drill about 28 s: run the drills in parts, several times.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
from drills import CONTROLLER, REPLICA, ROUTER
from fleet_load import HELPERS, RETRY_S, Load, fleet_settings, prepare, processes

import _paths  # noqa: F401
from benchmarks import record
from transect.bench.lengths import Lengths
from transect.bench.same_answers import COMPLETIONS, Answer, ask
from transect.bench.traces.asked import Asked
from transect.bench.traces.mix import Mix
from transect.cluster import ray_cluster
from transect.cluster.settings import FleetSettings
from transect.engine.frontends.looks import WATCH_S
from transect.engine.scheduling.scheduler_config import SchedulerConfig
from transect.plan.drills import DRILLS, Effect, FleetTimes, percentile, predict
from transect.plan.fleet import EngineModel

sys.path.append(str(HELPERS))
from tiny_llm import save_tiny_llm

REPLICAS, PLACES, STEP_S, START_S = 3, 8, 0.04, 5.0
RATE, SECONDS, AT = 10.0, 18.0, 3.0
MIX = Mix(prompt=Lengths.parse("uniform:20-60"), output=Lengths.parse("uniform:30-70"), burstiness=0.25)
HUNG_S, LOST_S, NOTICED_S = 1.0, 2.0, 0.03
"""Limits of the settings, and the seconds from the end of an engine's process until the router knows: the host waits
0.02 s for its last words."""
LEAVING, LEAVES_AFTER_S = 6, 2.0
"""Clients in the drill ``cancelled`` that leave, and the seconds after which each does."""
BLIND_S = 6.0
PARTS = ("kill", "actor", "router", "ordered", "linked", "router")
"""Parts to measure in a calm fleet. Ray finds a dead router in one of its checks, every 2 s, so that time is measured
twice."""


class Measured:
    """A fleet on Ray under a load of requests at given times."""

    def __init__(self, own: FleetSettings, url: str, second: int | None) -> None:
        self.own, self.load, self.second = own, Load(url), second

    async def calibrate(self) -> tuple[FleetTimes, float, float, float]:
        """Measure parts, then a calm run. Returns the times, the seconds of a step, those before an engine has a
        request, and the calm run's 99th percentile."""
        await self.load.until_ready(REPLICAS)
        samples: dict[str, list[float]] = {}
        for name in PARTS:
            await asyncio.sleep(AT)  # the cluster's controller has settled, as it has when a drill begins
            samples.setdefault(name, []).append(await getattr(self, name)())
            await self.whole()
        back = {name: statistics.mean(values) for name, values in samples.items()}
        found = {name: round(value, 2) for name, value in back.items()}
        print(f"{time.strftime('%H:%M:%S')} calm parts {found}", flush=True)
        firsts: list[float] = []
        steps: list[tuple[int, float]] = []
        times, _, _ = await self.run("calm", firsts, steps)
        step_s = sum(seconds for _, seconds in steps) / sum(count for count, _ in steps)
        before_s = max(0.0, statistics.median(firsts) - 1.5 * step_s)
        known = FleetTimes(
            noticed=NOTICED_S, engine=max(0.0, back["kill"] - NOTICED_S - WATCH_S / 2),
            replica=back["actor"] - NOTICED_S, router=back["router"] / REPLICAS, linked=back["linked"],
            ordered=back["ordered"], hung_after=HUNG_S, lost_after=LOST_S, drain=self.own.replicas.drain_timeout_s,
        )  # fmt: skip
        return known, step_s, before_s, percentile(times)

    async def run(
        self, drill: str, firsts: list[float] | None = None, steps: list[tuple[int, float]] | None = None
    ) -> tuple[list[float], int, float]:
        """Run the load with a drill in it. Returns the times of answered requests, the number of dropped ones, and the
        replica-seconds lost.

        Args:
            firsts: gets the time to the first token of each request.
            steps: gets the number of further tokens of each request, and the seconds that they took.
        """
        asked, leaving = requests(drill)
        times: list[float] = []
        dropped = 0
        began = time.monotonic() + 0.5

        async def one(client: Any, number: int, each: Asked) -> None:
            nonlocal dropped
            await asyncio.sleep(max(0.0, began + each.at - time.monotonic()))
            first = last = 0.0

            def seen(answer: Answer) -> None:
                nonlocal first, last
                if not answer.clean:
                    last = time.monotonic()
                    first = first or last

            body = {"prompt": [65 + (number * 7 + n * n) % 26 for n in range(each.prompt_tokens)], "stream": True}
            body |= {"seed": number, "max_tokens": each.output_tokens, "ignore_eos": True}
            limit = leaving[number] - each.at if number in leaving else None
            try:
                async with asyncio.timeout(limit):
                    answer = await ask(client, COMPLETIONS, body, seen)
            except Exception:  # of many kinds: the router is gone, or the client has left
                dropped += 1
                return
            if answer.clean and answer.status == 200:
                times.append(time.monotonic() - began - each.at)
                if firsts is not None and steps is not None:
                    firsts.append(first - began - each.at)
                    steps.append((each.output_tokens - 1, last - first))
            else:
                dropped += 1

        async def disturb() -> float:
            if drill == "calm":
                return 0.0
            await asyncio.sleep(max(0.0, began + AT - time.monotonic()))
            return float(await getattr(self, drill)())

        async with self.load.client() as client:
            *_, lost = await asyncio.gather(*(one(client, n, each) for n, each in enumerate(asked)), disturb())
        return times, dropped, min(float(lost), REPLICAS * (asked[-1].at - AT))

    # Each drill returns the replica-seconds that it costs.

    async def _pids(self) -> list[int]:
        return [each["pid"] for each in (await self.load.fleet())["replicas"] if each["state"] == "ready"]

    async def kill(self) -> float:
        pid = (await self._pids())[0]
        os.kill(pid, signal.SIGKILL)
        return await self.load.until_ready(REPLICAS, frozenset({pid}))

    async def stopped(self) -> float:
        pid = (await self._pids())[0]
        os.kill(pid, signal.SIGSTOP)
        return await self.load.until_ready(REPLICAS, frozenset({pid}))

    async def host(self) -> float:
        pid = (await self._pids())[0]
        actor = psutil.Process(pid).ppid()
        os.kill(actor, signal.SIGSTOP)
        try:
            silent = await self.load.until_ready(REPLICAS - 1, frozenset({pid}))
        finally:
            os.kill(actor, signal.SIGCONT)
        return silent + await self.load.until_ready(REPLICAS)

    async def actor(self) -> float:
        pid = (await self._pids())[0]
        os.kill(psutil.Process(pid).ppid(), signal.SIGKILL)
        return await self.load.until_ready(REPLICAS, frozenset({pid}))

    async def node(self) -> float:
        assert self.second is not None
        there = psutil.Process(self.second).children(recursive=True)
        replicas = sum(REPLICA in " ".join(each.cmdline()) for each in there)
        assert replicas == 1, f"Ray placed {replicas} replicas on the second node, which has room for one"
        for each in there:
            with contextlib.suppress(psutil.Error):
                each.kill()
        return requests("node")[0][-1].at - AT  # there is no room elsewhere

    async def roll(self) -> float:
        missing, watching = 0.0, True

        async def watch() -> None:
            nonlocal missing
            before = time.monotonic()
            while watching:
                ready, now = len(await self._pids()), time.monotonic()
                missing, before = missing + (now - before) * max(0, REPLICAS - ready), now
                await asyncio.sleep(0.1)

        watcher = asyncio.create_task(watch())
        await asyncio.to_thread(ray_cluster.roll, self.own, print)
        watching = False
        await watcher
        return missing

    async def cancelled(self) -> float:
        await asyncio.to_thread(ray_cluster.scale, self.own, REPLICAS - 1, print)
        return 0.0

    async def controller(self) -> float:
        (process,) = processes(self.own, CONTROLLER)
        process.kill()
        return 0.0

    async def blind(self) -> float:
        (process,) = processes(self.own, CONTROLLER)
        process.suspend()
        await asyncio.sleep(BLIND_S)
        process.resume()
        return 0.0

    async def router(self) -> float:
        (process,) = processes(self.own, ROUTER)
        process.kill()
        began = time.monotonic()
        await asyncio.sleep(0.2)
        await self.load.until_ready(REPLICAS)
        return REPLICAS * (time.monotonic() - began)

    # Parts of drills, in a calm fleet.

    async def ordered(self) -> float:
        """Return the seconds from an order to scale down until a replica gets no more requests."""
        began = time.monotonic()
        order = asyncio.create_task(asyncio.to_thread(ray_cluster.scale, self.own, REPLICAS - 1, print))
        while len(await self._pids()) == REPLICAS:
            await asyncio.sleep(0.02)
        took = time.monotonic() - began
        await order
        return took

    async def linked(self) -> float:
        """Return the seconds from the end of a host's silence, which has cost it its link, until it is back."""
        pid = (await self._pids())[0]
        actor = psutil.Process(pid).ppid()
        os.kill(actor, signal.SIGSTOP)
        try:
            await self.load.until_ready(REPLICAS - 1, frozenset({pid}))
        finally:
            os.kill(actor, signal.SIGCONT)
        return await self.load.until_ready(REPLICAS)

    async def whole(self) -> None:
        """Wait until the fleet is as it was."""
        until = time.monotonic() + RETRY_S
        while True:
            try:
                await asyncio.to_thread(ray_cluster.scale, self.own, REPLICAS, print)
                break
            except Exception:  # of many kinds: the controller is being started
                if time.monotonic() > until:
                    raise
                await asyncio.sleep(0.5)
        await self.load.until_ready(REPLICAS)


def requests(drill: str) -> tuple[list[Asked], dict[int, float]]:
    """Draw the load, and for the drill ``cancelled`` the seconds at which some clients of long answers leave."""
    asked = MIX.generate(RATE, int(RATE * SECONDS), seed=2)
    if drill != "cancelled":
        return asked, {}
    long = [Asked(AT - 1.0 + 0.01 * n, 40, 2000) for n in range(LEAVING)]
    asked = sorted([*asked, *long], key=lambda each: each.at)
    return asked, {n: each.at + LEAVES_AFTER_S for n, each in enumerate(asked) if each.output_tokens == 2000}


def predicted(drill: str, times: FleetTimes, step_s: float, before_s: float) -> Effect:
    """Simulate one drill."""
    limits = SchedulerConfig(
        num_blocks=4096, max_num_seqs=PLACES, max_num_batched_tokens=512, max_model_len=4096, seed=0
    )
    model = EngineModel(
        scheduler=limits, seconds=lambda batch: step_s, by_load=lambda load: step_s, intake=before_s
    )  # fmt: skip
    asked, leaving = requests(drill)
    if drill == "node":
        times = dataclasses.replace(times, replica=math.inf)
    return predict(model, REPLICAS, asked, times, AT, [drill], leaving)[drill]


@contextlib.contextmanager
def fleet(own: FleetSettings, more: bool) -> Iterator[tuple[str, int | None]]:
    """Start Ray, a second node if ``more``, and the fleet. Yields its URL and the process id of the second node."""
    second = None
    try:
        ray = ray_cluster.connect(own, print, start=True)
        if more:
            second = subprocess.Popen(
                [
                    *(sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block"),
                    *("--address", f"127.0.0.1:{own.ray.port}", "--num-cpus", "1"),
                    *("--dashboard-agent-listen-port", "52399", "--object-store-memory", "100000000"),
                    "--disable-usage-stats",
                ],
                stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
            )  # fmt: skip
            began = time.monotonic()
            while sum(each["Alive"] for each in ray.nodes()) < 2:
                assert time.monotonic() - began < RETRY_S, "the second node does not start"
                time.sleep(0.2)
        yield ray_cluster.up(own, print)["url"], None if second is None else second.pid
    finally:
        if second is not None:
            for each in psutil.Process(second.pid).children(recursive=True):
                with contextlib.suppress(psutil.Error):
                    each.kill()
            second.kill()
            second.wait()
        ray_cluster.down(own, print)


async def compare(own: FleetSettings, url: str, second: int | None, drills: Sequence[str], out: Path) -> None:
    """Predict and cause each drill, and record it."""
    fleet = Measured(own, url, second)
    load = os.getloadavg()[0]
    times, step_s, before_s, calm_p99 = await fleet.calibrate()
    for drill in drills:
        before = predicted(drill, times, step_s, before_s)
        print(f"{time.strftime('%H:%M:%S')} {drill}: predicted {before}", flush=True)
        answered, dropped, lost = await fleet.run(drill)
        p99 = percentile(answered)
        after = Effect(p99, p99 - calm_p99, lost, dropped)
        found = {
            "predicted": dataclasses.asdict(before), "measured": dataclasses.asdict(after), "calm_p99_s": calm_p99,
            "step_s": step_s, "times": dataclasses.asdict(times), "load_average": load,
        }  # fmt: skip
        print(f"  measured {after}; {ratios(found)}", flush=True)
        keep(out, drill, found)
        if drill != "node":
            await fleet.whole()


def keep(out: Path, drill: str, found: dict[str, Any]) -> None:
    """Add one round of a drill to those that the file has."""
    before = json.loads(out.read_text()) if out.exists() else {}
    environment = record.environment()
    drills = before.get("drills", {})
    made = {name: environment[name] for name in ("commit", "version")}
    drills.setdefault(drill, []).append(found | made)
    result = {"command": "python benchmarks/cluster/predicted.py", "replicas": REPLICAS, "rate": RATE}
    record.write(out, result | {"drills": drills} | environment)


def ratios(result: dict[str, Any]) -> dict[str, float]:
    """Return measured values over predicted ones: of the percentile, and of what is added, lost and dropped, where that
    is predicted to be large enough to be told from noise."""
    before, after = result["predicted"], result["measured"]
    least = {"p99": 0.0, "added_p99": 0.15 * result["calm_p99_s"], "lost": 0.1, "dropped": 5}
    return {name: round(after[name] / before[name], 3) for name, low in least.items() if before[name] > low}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=[name for name in DRILLS if name != "node"]
    )
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "fleet_predicted.json")
    arguments = parser.parse_args()
    prepare(STEP_S)
    os.environ |= {"STUB_SEQS": str(PLACES), "STUB_START_S": str(START_S)}
    drills = [name for name in DRILLS if name in arguments.only]  # the node comes last
    drills.sort(key=lambda name: name == "node")
    with tempfile.TemporaryDirectory() as name:
        model = Path(name) / "model"
        model.mkdir()
        save_tiny_llm(model)
        more = "node" in drills
        changes: dict[str, Any] = {"max": REPLICAS + 1, "per_node": REPLICAS + 1}
        if more:  # two replicas fit on the first node, and one on the second
            changes |= {"per_node": 2, "cpus": 0.6}
        own = fleet_settings(
            Path(name) / "fleet", str(model), True, server={"port": 8460}, replicas=changes,
            scaling={"policy": "fixed"},
        )  # fmt: skip
        with fleet(own, more) as (url, second):
            asyncio.run(compare(own, url, second, drills, arguments.out))


if __name__ == "__main__":
    main()
