"""Drills of a fleet on Ray: kill, stop, lose and replace its parts under load, and compare every byte.

    python benchmarks/cluster/drills.py [--kills 100] [--only kills,roll] [--real] [--out FILE]

The fleet has three replicas of ``tests/helpers/stub_engine.py`` (the shipping engine process, scheduler and messages,
with made-up tokens), or with ``--real`` of a model. All drills run in one Ray cluster of this machine, which is started
and ended here. Each answer is compared with an undisturbed one. ``predicted.py`` compares the drills with predictions.
Writes benchmarks/results/cpu/fleet_drills.json; drills that are not run keep their results there. All of them take
about seven minutes.

  kills       kill -9 of engines and of replicas' actors at random moments, one at a time
  stopped     SIGSTOP of an engine: half alive, it holds its connection and answers nothing
  host        SIGSTOP of a replica's actor: a machine that neither answers nor closes connections
  roll        all replicas are replaced by the next generation
  scale       to 4 replicas, to 2, to 3
  cancelled   scale-down while clients of long answers leave
  controller  kill -9 of Ray Serve's controller
  blind       SIGSTOP of Ray Serve's controller: no decision of the autoscaler comes any more
  metrics     SIGSTOP of the router until the autoscaler decides without metrics: the number of replicas stays
  node        a second node is killed with all its processes
  router      kill -9 of the router
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from fleet_load import RETRY_S, Load, fleet_settings, prepare, processes, running

import _paths  # noqa: F401
from benchmarks import record
from transect.cluster import ray_cluster
from transect.cluster.scaling import newest
from transect.cluster.settings import FleetSettings

REPLICAS, PER_NODE, STEP_S = 3, 4, 0.01
ACTORS = 10
"""Every tenth kill hits the whole actor of a replica; the others hit its engine."""
CONTROLLER, ROUTER, REPLICA = "ServeController", "ServeReplica:drill:Router", "ServeReplica:drill-replicas:Replica"


class Drills:
    """The drills, each a method that returns what happened."""

    def __init__(self, own: FleetSettings, load: Load, kills: int) -> None:
        self.own, self.load, self.most = own, load, kills

    async def kills(self) -> dict[str, Any]:
        rng, done, back = random.Random(7), 0, []
        while done < self.most:
            await asyncio.sleep(rng.uniform(0.1, 0.8))
            state = await self.load.fleet()
            pids = [each["pid"] for each in state["replicas"] if each["state"] == "ready"]
            pid = rng.choice(pids)
            target = psutil.Process(pid).ppid() if done % ACTORS == ACTORS - 1 else pid
            os.kill(target, signal.SIGKILL)
            done += 1
            back.append(await self.load.until_ready(REPLICAS, frozenset({pid})))
            if done % 10 == 0:
                print(f"  {done} kills", flush=True)
        return {"kills": done, "back_s": record.summary(back)}

    async def stopped(self) -> dict[str, Any]:
        pid = (await self.load.fleet())["replicas"][0]["pid"]
        os.kill(pid, signal.SIGSTOP)
        return {"back_s": await self.load.until_ready(REPLICAS, frozenset({pid}))}

    async def host(self) -> dict[str, Any]:
        ready = [each["pid"] for each in (await self.load.fleet())["replicas"] if each["state"] == "ready"]
        actor = psutil.Process(ready[0]).ppid()
        os.kill(actor, signal.SIGSTOP)
        try:
            lost = await self.load.until_ready(REPLICAS - 1, frozenset({ready[0]}))
        finally:
            os.kill(actor, signal.SIGCONT)
        return {"lost_after_s": lost, "back_s": await self.load.until_ready(REPLICAS)}

    async def roll(self) -> dict[str, Any]:
        before = frozenset(each["pid"] for each in (await self.load.fleet())["replicas"])
        least, began, watching = REPLICAS, time.monotonic(), True

        async def watch() -> None:
            nonlocal least
            while watching:
                replicas = (await self.load.fleet()).get("replicas", ())
                least = min(least, sum(each["state"] == "ready" for each in replicas))
                await asyncio.sleep(0.1)

        watcher = asyncio.create_task(watch())
        await asyncio.to_thread(ray_cluster.roll, self.own, print)
        await self.load.until_ready(REPLICAS, before)
        watching = False
        await watcher
        return {"seconds": time.monotonic() - began, "fewest_ready": least}

    async def scale(self) -> dict[str, Any]:
        took = {}
        for count in (REPLICAS + 1, REPLICAS - 1, REPLICAS):
            began = time.monotonic()
            await asyncio.to_thread(ray_cluster.scale, self.own, count, print)
            await self.load.until_ready(count)
            took[f"to {count}"] = time.monotonic() - began
        return {"seconds": took}

    async def cancelled(self) -> dict[str, Any]:
        """Let clients of long answers leave just after the scale-down has begun."""
        body = {"prompt": [70] * 40, "max_tokens": 3500, "ignore_eos": True, "stream": True}

        async def leave_after(seconds: float, client: httpx.AsyncClient) -> None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(seconds), client.stream("POST", "/v1/completions", json=body) as response:
                    async for _ in response.aiter_lines():
                        pass

        async with self.load.client() as client:
            leaving = [asyncio.create_task(leave_after(3.0, client)) for _ in range(12)]
            await asyncio.sleep(1.5)
            began = time.monotonic()
            await asyncio.to_thread(ray_cluster.scale, self.own, REPLICAS - 1, print)
            await self.load.until_ready(REPLICAS - 1)
            while len([each for each in (await self.load.fleet())["replicas"] if each["state"] == "leaving"]):
                await asyncio.sleep(0.05)
            took = time.monotonic() - began
            await asyncio.gather(*leaving)
        await asyncio.to_thread(ray_cluster.scale, self.own, REPLICAS, print)
        await self.load.until_ready(REPLICAS)
        return {"gone_s": took, "drain_timeout_s": self.own.replicas.drain_timeout_s}

    async def controller(self) -> dict[str, Any]:
        (process,) = processes(self.own, CONTROLLER)
        began = time.monotonic()
        process.kill()
        while not [each for each in processes(self.own, CONTROLLER) if each.pid != process.pid]:
            await asyncio.sleep(0.1)
        took = time.monotonic() - began
        pid = (await self.load.fleet())["replicas"][0]["pid"]
        os.kill(psutil.Process(pid).ppid(), signal.SIGKILL)  # the new one does its work: an actor comes back
        return {"back_s": took, "actor_back_s": await self.load.until_ready(REPLICAS, frozenset({pid}))}

    async def blind(self) -> dict[str, Any]:
        await asyncio.to_thread(ray_cluster.scale, self.own, None, print)
        await self.load.until_ready(self.own.replicas.min)
        await self._until_alarm(False)
        (process,) = processes(self.own, CONTROLLER)
        process.suspend()
        try:
            raised = await self._until_alarm(True)
        finally:
            process.resume()
        cleared = await self._until_alarm(False)
        await asyncio.to_thread(ray_cluster.scale, self.own, REPLICAS, print)
        await self.load.until_ready(REPLICAS)
        return {"raised_s": raised, "cleared_s": cleared, "interval_s": self.own.scaling.interval_s}

    async def metrics(self) -> dict[str, Any]:
        """Cut the autoscaler off from metrics: the reports of a stopped router become too old. Streams pause."""
        await asyncio.to_thread(ray_cluster.scale, self.own, None, print)
        await self.load.until_ready(self.own.replicas.min)
        (process,) = processes(self.own, ROUTER)
        began, wall = time.monotonic(), time.time()
        process.suspend()
        try:
            while True:
                last = newest(self.own.place)[-1]
                if last["blind"] and last["at"] > wall:
                    break
                assert time.monotonic() - began < RETRY_S, f"the autoscaler still sees: {last}"
                await asyncio.sleep(0.05)
        finally:
            process.resume()
        blind_s = time.monotonic() - began
        await self.load.until_ready(self.own.replicas.min)
        await self._until_alarm(False)
        await asyncio.to_thread(ray_cluster.scale, self.own, REPLICAS, print)
        await self.load.until_ready(REPLICAS)
        return {"blind_s": blind_s, "stayed": last["replicas"] == last["before"], "reason": last["reason"]}

    async def _until_alarm(self, raised: bool) -> float:
        began = time.monotonic()
        while bool((await self.load.fleet())["alarms"]) != raised:
            assert time.monotonic() - began < RETRY_S, f"the alarm is still {'off' if raised else 'on'}"
            await asyncio.sleep(0.05)
        return time.monotonic() - began

    async def node(self) -> dict[str, Any]:
        address = f"127.0.0.1:{self.own.ray.port}"
        command = [
            *(sys.executable, "-c", "from ray.scripts.scripts import main; main()", "start", "--block"),
            *("--address", address, "--num-cpus", "2", "--dashboard-agent-listen-port", "52399"),
            *("--object-store-memory", "100000000", "--disable-usage-stats"),
        ]
        with tempfile.TemporaryFile() as out:
            second = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
        try:
            ray = await asyncio.to_thread(ray_cluster.connect, self.own)
            began = time.monotonic()
            while sum(each["Alive"] for each in ray.nodes()) < 2:
                assert time.monotonic() - began < RETRY_S, "the second node does not start"
                await asyncio.sleep(0.2)
            await asyncio.to_thread(ray_cluster.scale, self.own, PER_NODE + 1, print)
            await self.load.until_ready(PER_NODE + 1)
            there = psutil.Process(second.pid).children(recursive=True)
            actors = [each for each in there if REPLICA in " ".join(each.cmdline())]
            assert actors, "Ray placed no replica on the second node"
            engines = frozenset(each.pid for actor in actors for each in actor.children())
            for each in there:
                with contextlib.suppress(psutil.Error):
                    each.kill()
        finally:
            second.kill()
            second.wait()
        left = await self.load.until_ready(PER_NODE, engines)
        await asyncio.to_thread(ray_cluster.scale, self.own, REPLICAS, print)
        await self.load.until_ready(REPLICAS)
        return {"replicas_lost": len(actors), "lost_s": left}

    async def router(self) -> dict[str, Any]:
        """Kill the router: all streams break with an error of the connection, and engines keep their models."""
        before = {each["pid"] for each in (await self.load.fleet())["replicas"] if each["state"] == "ready"}
        (process,) = processes(self.own, ROUTER)
        process.kill()
        began = time.monotonic()
        port = httpx.URL(self.load.url).port
        while time.monotonic() - began < 60:
            state = await asyncio.to_thread(ray_cluster.state, self.own)
            if state["url"]:
                break
        self.load.url = state["url"]
        took = time.monotonic() - began
        await self.load.until_ready(REPLICAS)
        after = {each["pid"] for each in (await self.load.fleet())["replicas"] if each["state"] == "ready"}
        return {"back_s": took, "same_engines": before == after, "same_port": httpx.URL(self.load.url).port == port}


async def run(own: FleetSettings, url: str, arguments: argparse.Namespace) -> dict[str, Any]:
    load = Load(url)
    await load.until_ready(REPLICAS)
    await load.learn()
    drills = Drills(own, load, arguments.kills)
    results = {}
    for name in arguments.only:
        print(f"{time.strftime('%H:%M:%S')} {name}", flush=True)
        busy = {"load_average": os.getloadavg()[0]}
        load.start()
        await asyncio.sleep(0.5)
        try:
            found = await getattr(drills, name)()
        finally:
            await asyncio.sleep(0.5)
            counts = await load.stop()
        results[name] = found | counts | busy
        print(f"  {results[name]}", flush=True)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    every = [name for name in vars(Drills) if not name.startswith("_")]
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--only", type=lambda text: text.split(","), default=every)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--real", action="store_true", help="engines with a model")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "fleet_drills.json")
    arguments = parser.parse_args()
    prepare(STEP_S)
    with tempfile.TemporaryDirectory() as folder:
        server = {"port": 8460}
        replicas = {"max": REPLICAS + 1, "per_node": PER_NODE}
        own = fleet_settings(Path(folder), arguments.model, not arguments.real, server=server, replicas=replicas)
        with running(own) as url:
            ray_cluster.scale(own, REPLICAS, print)
            results = asyncio.run(run(own, url, arguments))
    before = json.loads(arguments.out.read_text())["drills"] if arguments.out.exists() else {}
    result = {"command": "python benchmarks/cluster/drills.py", "real": arguments.real, "drills": before | results}
    record.write(arguments.out, result | record.environment())
    lost = {name: each for name, each in results.items() if name != "router" and (each["dropped"] or each["differing"])}
    if lost:
        sys.exit(f"answers were lost: {lost}")


if __name__ == "__main__":
    main()
