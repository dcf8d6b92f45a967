"""A fleet on a Ray cluster of this machine, requests with known answers, and the processes behind both: for the drills
and measurements of this folder."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import psutil

import _paths  # noqa: F401
from benchmarks import record
from transect.bench.same_answers import COMPLETIONS, Answer, ask
from transect.cluster import ray_cluster, settings
from transect.cluster.settings import FleetSettings

HELPERS = record.ROOT / "tests" / "helpers"
STUB = "stub_engine"
"""An engine without a model: the shipping process, scheduler and messages (``tests/helpers``)."""
KINDS = 24
"""Number of different requests."""
RETRY_S = 120.0


def fleet_settings(folder: Path, model: str, stub: bool, **tables: Any) -> FleetSettings:
    """Build the settings of a small fleet. ``tables``: changes to its tables."""
    values: dict[str, Any] = {
        "name": "drill",
        "folder": str(folder),
        "engine": {"model": model, "hung-after": 1.0, "kv-cache-tokens": 8192, "prefix-caching": False},
        "server": {"port": 0, "request-log": "off"},
        "replicas": {"min": 3, "max": 3, "cpus": 0.2, "drain_timeout_s": 20},
        "links": {"port": 8461, "lost_after_s": 2.0},
        "scaling": {"interval_s": 1.0},
        "ray": {"address": "local", "num_cpus": 2, "port": 6461},
    }
    if stub:
        values["replicas"]["engine_module"] = STUB
    for name, table in tables.items():
        values[name] = values[name] | table
    return settings.build(values)


def prepare(step_s: float) -> None:
    """Let all processes find the package and the stub engine, whose steps take ``step_s`` seconds."""
    paths = [str(record.ROOT / "src"), str(HELPERS), *filter(None, [os.environ.get("PYTHONPATH")])]
    os.environ["PYTHONPATH"] = os.pathsep.join(paths)
    os.environ["STUB_STEP_S"] = str(step_s)


@contextlib.contextmanager
def running(own: FleetSettings, proxy: bool = False) -> Iterator[str]:
    """Start a fleet; yields the URL of its server. ``proxy``: start Ray Serve's proxy too, on its own port."""
    if proxy:
        from ray import serve

        ray_cluster.connect(own, print, start=True)
        serve.start(proxy_location="HeadOnly")
    url = ray_cluster.up(own, print)["url"]
    try:
        yield url
    finally:
        ray_cluster.down(own, print)


def processes(own: FleetSettings, *names: str) -> list[psutil.Process]:
    """List processes of the fleet's Ray cluster whose title has one of these texts, oldest first."""
    found = []
    for each in psutil.Process(ray_cluster.state_of(own)["ray_pid"]).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if any(name in " ".join(each.cmdline()) for name in names):
                found.append(each)
    return sorted(found, key=lambda each: each.create_time())


def body(kind: int, most: int = 120) -> dict[str, Any]:
    """Build one of the requests; its answer has ``most`` tokens or a little fewer."""
    rng = random.Random(kind)
    prompt = [rng.randint(65, 90) for _ in range(48)]
    return {"prompt": prompt, "seed": kind, "max_tokens": most - kind, "ignore_eos": True, "stream": True}


@dataclass
class Load:
    """Clients that send known requests all the time, and compare the answers.

    Attributes:
        answers: number of whole answers. broken: of answers that were cut or refused. differing: of whole answers with
            other bytes. seconds: from request to last byte, with the time of the request.
    """

    url: str
    clients: int = 6
    answers: int = 0
    broken: list[str] = field(default_factory=list)
    differing: int = 0
    seconds: list[tuple[float, float]] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    calm: dict[int, Answer] = field(default_factory=dict)
    _tasks: list[asyncio.Task[None]] = field(default_factory=list)
    _stopping: bool = False

    def client(self) -> httpx.AsyncClient:
        """Make an HTTP client that keeps no idle connection for long."""
        limits = httpx.Limits(max_connections=None, keepalive_expiry=1.0)
        return httpx.AsyncClient(base_url=self.url, timeout=120, trust_env=False, limits=limits)

    async def learn(self) -> None:
        """Collect the undisturbed answers."""
        async with self.client() as client:
            for start in range(0, KINDS, 6):
                kinds = range(start, start + 6)
                found = await asyncio.gather(*(ask(client, COMPLETIONS, body(kind)) for kind in kinds))
                self.calm |= dict(zip(kinds, found, strict=True))
        assert all(each.clean and each.status == 200 for each in self.calm.values()), "a calm answer was broken"

    async def one(self, client: httpx.AsyncClient, kind: int) -> None:
        """Send one request, and count its answer."""
        began = time.monotonic()
        try:
            answer = await ask(client, COMPLETIONS, body(kind))
        except httpx.HTTPError as error:
            self.broken.append(f"{type(error).__name__}: {error}")
            return
        if not answer.clean or answer.status != 200:
            self.broken.append(f"status {answer.status}, clean {answer.clean}")
        elif not answer.same_as(self.calm[kind]):
            self.differing += 1
        else:
            self.answers += 1
            self.seconds.append((began, time.monotonic() - began))
            self.gaps.append(answer.longest_gap_s)

    def start(self) -> None:
        """Begin to send."""
        self._stopping = False

        async def loop(number: int) -> None:
            rng = random.Random(number)
            async with self.client() as client:
                while not self._stopping:
                    before = len(self.broken)
                    await self.one(client, rng.randrange(KINDS))
                    if len(self.broken) > before:
                        await asyncio.sleep(0.2)

        self._tasks = [asyncio.create_task(loop(number)) for number in range(self.clients)]

    async def stop(self) -> dict[str, Any]:
        """Finish the running requests; the counts since ``start``."""
        self._stopping = True
        await asyncio.gather(*self._tasks)
        counts = {
            "answers": self.answers,
            "dropped": len(self.broken),
            "differing": self.differing,
            "longest_gap_s": round(max(self.gaps, default=0.0), 3),
        }
        if self.broken:
            counts["errors"] = sorted(set(self.broken))[:3]
        self.answers, self.broken, self.differing, self.seconds, self.gaps = 0, [], 0, [], []
        return counts

    async def health(self) -> dict[str, Any]:
        """Return the state of the server; empty while it does not answer."""
        async with self.client() as client:
            try:
                return dict((await client.get("/health")).json())
            except httpx.HTTPError:
                return {}

    async def fleet(self) -> dict[str, Any]:
        """Return the state of the fleet; empty while it does not answer."""
        async with self.client() as client:
            try:
                return dict((await client.get("/v1/fleet")).json())
            except httpx.HTTPError:
                return {}

    async def until_ready(self, count: int, without: frozenset[int] = frozenset()) -> float:
        """Wait until ``count`` replicas take requests, none of them with one of these engines; return the seconds."""
        began = time.monotonic()
        while time.monotonic() - began < RETRY_S:
            ready = [each for each in (await self.fleet()).get("replicas", ()) if each["state"] == "ready"]
            if len(ready) == count and without.isdisjoint(each["pid"] for each in ready):
                return time.monotonic() - began
            await asyncio.sleep(0.05)
        raise AssertionError(f"no {count} replicas after {RETRY_S:g} s: {await self.fleet()}")
