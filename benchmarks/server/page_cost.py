"""Measure the cost of a reader of ``/live``, as the page is one: tokens per second with it and without it, in turns.

    python benchmarks/server/page_cost.py [--rounds 36] [--window 1] [--readers 1] [--out FILE]

32 streams of a real model decode on the CPU. Their answers end one after another, so the mean context, and with it the
time of a step, stays the same. A round is four windows: without, with, with, without; every second round is the other
way round. A drift of the machine cancels within a round. The tokens of a window come from the server's decision log:
those of a step count where its time lies.

The reader is a process that reads all events with a bill, raw and without drawing, as a browser on another machine; it
waits in a system call otherwise. The processor times of all processes are recorded, and the time in which threads of
the engine wait for a processor: they tell the cost on a busy machine, where rates tell little. The ratio is that of the
two pairs of a round; the result is the geometric mean over the rounds, with its 95% interval (Student's t of the
logarithms). ``--readers 0`` shows the noise. A run takes less than four minutes. Writes
benchmarks/results/cpu/page_cost.json.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import multiprocessing
import select
import socket
import statistics
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

import httpx
import psutil
from http_vs_offline import server

import _paths  # noqa: F401
from benchmarks import record
from transect.bench.intervals import student_quantile
from transect.engine.scheduling.decisions import read_records
from transect.explain.engine.log import LoggedStep, build

STREAMS, TOKENS = 32, 256
WARM_S = 14.0
"""Seconds before the first window: longer than an answer takes."""
SETTLE_S = 0.3
"""Seconds at the beginning of a window that do not count: a reader begins with the whole state."""
KV_BYTES = 2 * 10**9
"""Enough for all streams, so that none is preempted."""
OPTIONS = ["--max-num-seqs", str(STREAMS), "--kv-cache-bytes", str(KV_BYTES), "--served-model-name", "m"]
USED = ("server", "engine", "client", "reader", "engine_waits")
"""Seconds of processor time by process, and seconds in which threads of the engine wait for a processor."""


class Window(NamedTuple):
    """A window of time."""

    watched: bool
    """True if readers were there."""
    began: float
    ended: float
    """Times on the monotonic clock, which is the engine's."""
    used: list[float]
    """Amounts of ``USED`` within the window."""


async def stream(client: httpx.AsyncClient, number: int) -> None:
    """Ask for answers, one after another, until cancelled; the first one is shorter, so that streams end in turn."""
    body = {"model": "m", "prompt": f"Number {number}: once upon a time", "ignore_eos": True, "stream": True}
    length = TOKENS * (number + 1) // STREAMS
    while True:
        async with client.stream("POST", "/v1/completions", json=body | {"max_tokens": length}) as response:
            async for _ in response.aiter_raw():
                pass
        length = TOKENS


def read_live(address: tuple[str, int], pipe: Connection) -> None:
    """Read ``/live`` from each "look" to the next "leave", and follow the first request that it shows.

    Answers "leave" with the bytes and events read so far. Runs in a process.
    """

    def opened(query: str) -> socket.socket:
        found = socket.create_connection(address)
        found.sendall(f"GET /live{query} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        return found

    counts = [0, 0]
    while pipe.recv() == "look":
        with opened("") as first:
            text = b""
            while b'"id":"' not in text:
                text += first.recv(65536)
        name = text.partition(b'"id":"')[2].partition(b'"')[0].decode()
        with opened(f"?follow={name}") as second:
            sources: list[Any] = [second, pipe]
            while pipe not in select.select(sources, [], [])[0]:
                chunk = second.recv(1 << 18)
                counts = [counts[0] + len(chunk), counts[1] + chunk.count(b"data: ")]
        pipe.recv()
        pipe.send(tuple(counts))


class Readers:
    """Processes that read, or wait."""

    def __init__(self, url: str, count: int) -> None:
        self.count, self.watching = count, False
        self.bytes = self.events = 0
        where = urlsplit(url)
        context = multiprocessing.get_context("spawn")
        self._pipes = []
        self.processes: list[psutil.Process] = []
        for _ in range(count):
            here, there = context.Pipe()
            address = (where.hostname, where.port)
            process = context.Process(target=read_live, args=(address, there), daemon=True)
            process.start()
            self._pipes.append(here)
            self.processes.append(psutil.Process(process.pid))

    def change(self, watching: bool) -> None:
        """Begin or end to read."""
        if watching != self.watching:
            for pipe in self._pipes:
                pipe.send("look" if watching else "leave")
            answers = [] if watching else [pipe.recv() for pipe in self._pipes]
            if answers:
                self.bytes, self.events = (sum(column) for column in zip(*answers, strict=True))
        self.watching = watching

    def end(self) -> None:
        """End the processes."""
        for pipe in self._pipes:
            pipe.send("end")


def scheduled(processes: list[psutil.Process]) -> tuple[float, float]:
    """Return the seconds that all threads ran so far, and those that they waited for a processor."""
    files = (path for each in processes for path in Path(f"/proc/{each.pid}/task").glob("*/schedstat"))
    times = [path.read_text().split() for path in files]
    return sum(int(ran) for ran, _, _ in times) / 1e9, sum(int(waited) for _, waited, _ in times) / 1e9


async def measure(url: str, rounds: int, window_s: float, readers: Readers) -> tuple[list[list[Window]], bytes]:
    """Run the windows. Returns them by round, and the decision log."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        main = psutil.Process((await client.get("/health")).json()["server_pid"])
        engines = main.children(recursive=True)

        def spent() -> list[float]:
            """Return the amounts of ``USED`` so far."""
            times = [scheduled(group) for group in ([main], engines, [psutil.Process()], readers.processes)]
            return [*(ran for ran, _ in times), times[1][1]]

        streams = [asyncio.create_task(stream(client, number)) for number in range(STREAMS)]
        await asyncio.sleep(WARM_S)
        found: list[list[Window]] = []
        for number in range(rounds):
            found.append([])
            for inner in (False, True, True, False):
                readers.change(watched := inner != bool(number % 2))
                await asyncio.sleep(SETTLE_S)
                began, before = time.monotonic(), spent()
                await asyncio.sleep(window_s)
                used = [after - each for after, each in zip(spent(), before, strict=True)]
                found[-1].append(Window(watched, began, time.monotonic(), used))
        readers.change(False)
        log = (await client.get("/v1/decisions")).content
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return found, log


def rate(steps: list[LoggedStep], window: Window) -> float:
    """Return the tokens per second of a window; a step that is partly in it counts in part."""
    began, ended = window.began, window.ended
    tokens, before = 0.0, None
    for step in steps:
        assert step.at is not None
        start = step.begins if before is None else before  # with the host's time before it
        inside = max(0.0, min(step.at, ended) - max(start, began))
        tokens += len(step.rows) * inside / (step.at - start)
        before = step.at
    return tokens / (ended - began)


def compare(rounds: list[list[Window]], log: bytes) -> dict[str, Any]:
    """Summarize the rates with and without readers, and the ratio within rounds."""
    steps = [step for step in build(read_records(log), complete=False).steps if step.at is not None]
    means: list[tuple[float, float]] = []
    used: list[list[float]] = []
    """Differences of ``USED`` in a second, by round."""
    rates: dict[bool, list[float]] = {False: [], True: []}
    for each in rounds:
        groups = [[window for window in each if window.watched is watched] for watched in (False, True)]
        seconds = [sum(window.ended - window.began for window in group) for group in groups]
        sums = [[sum(column) for column in zip(*(window.used for window in group), strict=True)] for group in groups]
        used.append([b / seconds[1] - a / seconds[0] for a, b in zip(*sums, strict=True)])
        for window in each:
            rates[window.watched].append(rate(steps, window))
        means.append((statistics.fmean(rates[False][-2:]), statistics.fmean(rates[True][-2:])))
    ratios = [after / before for before, after in means]
    logs = [math.log(each) for each in ratios]
    mean, count = statistics.fmean(logs), len(logs)
    half = student_quantile(0.95, count - 1) * statistics.stdev(logs) / math.sqrt(count) if count > 1 else math.inf
    interval = {"low": math.exp(mean - half), "high": math.exp(mean + half)}
    return {
        "more_ms_per_s": {
            name: record.summary([1e3 * value for value in column])
            for name, column in zip(USED, zip(*used, strict=True), strict=True)
        },
        "tokens_per_s_without": record.summary(rates[False]),
        "tokens_per_s_with": record.summary(rates[True]),
        "ratio": {"mean": math.exp(mean), **interval, "rounds": ratios},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=36)
    parser.add_argument("--window", type=float, default=1.0, help="seconds of a window")
    parser.add_argument("--readers", type=int, default=1)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "page_cost.json")
    given = parser.parse_args()
    with server(given.model, OPTIONS) as url:
        readers = Readers(url, given.readers)
        rounds, log = asyncio.run(measure(url, given.rounds, given.window, readers))
        readers.end()
    watched_s = given.readers * sum(
        each.ended - each.began + SETTLE_S for four in rounds for each in four if each.watched
    )
    result = {
        "command": record.command("benchmarks/server/page_cost.py"),
        "streams": STREAMS,
        "window_s": given.window,
        "readers": given.readers,
        "events_per_s": readers.events / watched_s if watched_s else 0.0,
        "bytes_per_s": readers.bytes / watched_s if watched_s else 0.0,
        **compare(rounds, log),
    }
    record.write(given.out, result | record.environment())
    print({name: value for name, value in result.items() if name != "command"})


if __name__ == "__main__":
    main()
