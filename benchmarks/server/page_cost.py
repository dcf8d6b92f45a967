"""Measure the cost of a reader of ``/live``, as the page is one: tokens per second with it and without it, in turns.

    python benchmarks/server/page_cost.py [--rounds 12] [--window 4] [--readers 1] [--out FILE]

32 streams of a real model decode on the CPU. A round is four windows: without, with, with, without; a slow drift of the
machine or of the contexts cancels within it. The tokens of a window come from the server's decision log: those of a
step count where its time lies. The reader follows a request's bill too, reads all events and draws nothing, as a
browser on another machine. The processor time of the server's own process is recorded too: it tells the cost on a busy
machine, where rates tell little. The ratio is that of the two pairs of a round; the result is the geometric mean over
the rounds, with its 95% interval (Student's t of the logarithms). A run takes about four minutes. Writes
benchmarks/results/cpu/page_cost.json.
"""

from __future__ import annotations

import argparse
import asyncio
import math
import statistics
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
from http_vs_offline import server

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.checks.speed_of_trees import T_95
from transect.engine.scheduling.decisions import read_records
from transect.explain.engine.log import LoggedStep, build

STREAMS, TOKENS = 32, 1500
SETTLE_S = 0.5
"""Seconds at the beginning of a window that do not count."""
KV_BYTES = 3 * 10**9
"""Enough for all streams, so that none is preempted."""
OPTIONS = ["--max-num-seqs", str(STREAMS), "--kv-cache-bytes", str(KV_BYTES), "--served-model-name", "m"]

Window = tuple[bool, float, float, float]
"""A flag that readers were there, begin and end on the monotonic clock, which is the engine's, and the processor
seconds of the server's process."""


async def stream(client: httpx.AsyncClient, number: int) -> None:
    """Ask for long answers, one after another, until cancelled."""
    body = {"model": "m", "prompt": f"Number {number}: once upon a time", "max_tokens": TOKENS, "stream": True}
    while True:
        async with client.stream("POST", "/v1/completions", json=body | {"ignore_eos": True}) as response:
            async for _ in response.aiter_raw():
                pass


async def look(client: httpx.AsyncClient, counts: dict[str, int]) -> None:
    """Read ``/live`` until cancelled, and follow the first request that it shows."""
    async with client.stream("GET", "/live") as response:
        async for line in response.aiter_lines():
            if '"id":"' in line:
                name = line.partition('"id":"')[2].partition('"')[0]
                break
    async with client.stream("GET", "/live", params={"follow": name}) as response:
        async for chunk in response.aiter_raw():
            counts["bytes"] += len(chunk)
            counts["events"] += chunk.count(b"data: ")


async def measure(
    url: str, rounds: int, window_s: float, readers: int
) -> tuple[list[list[Window]], dict[str, int], bytes]:
    """Run the windows. Returns them by round, what readers got, and the decision log."""
    limits = httpx.Limits(max_connections=None)
    counts = {"bytes": 0, "events": 0}
    async with httpx.AsyncClient(base_url=url, timeout=None, limits=limits) as client:
        process = psutil.Process((await client.get("/health")).json()["server_pid"])

        def spent() -> float:
            return sum(process.cpu_times()[:2])

        streams = [asyncio.create_task(stream(client, number)) for number in range(STREAMS)]
        await asyncio.sleep(10)
        found: list[list[Window]] = []
        for _ in range(rounds):
            found.append([])
            for watched in (False, True, True, False):
                before = found[-1][-1] if found[-1] else None
                if watched and not (before and before[0]):
                    tasks = [asyncio.create_task(look(client, counts)) for _ in range(readers)]
                if not watched and before and before[0]:
                    for task in tasks:
                        task.cancel()
                    await asyncio.gather(*tasks, return_exceptions=True)
                await asyncio.sleep(SETTLE_S)
                began, before_s = time.monotonic(), spent()
                await asyncio.sleep(window_s)
                found[-1].append((watched, began, time.monotonic(), spent() - before_s))
        log = (await client.get("/v1/decisions")).content
        for task in streams:
            task.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return found, counts, log


def rate(steps: list[LoggedStep], window: Window) -> float:
    """Return the tokens per second of a window; a step that is partly in it counts in part."""
    _, began, ended, _ = window
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
    rates = [[rate(steps, window) for window in each] for each in rounds]
    ratios = [(b + c) / (a + d) for a, b, c, d in rates]
    logs = [math.log(each) for each in ratios]
    mean, count = statistics.fmean(logs), len(logs)
    half = T_95.get(count, 2.1) * statistics.stdev(logs) / math.sqrt(count) if count > 1 else math.inf
    spent = [[used / (end - begin) for _, begin, end, used in each] for each in rounds]
    interval = {"low": math.exp(mean - half), "high": math.exp(mean + half)}
    return {
        "processor_ms_per_s": record.summary([500 * (b + c - a - d) for a, b, c, d in spent]),
        "tokens_per_s_without": record.summary([each for a, _, _, d in rates for each in (a, d)]),
        "tokens_per_s_with": record.summary([each for _, b, c, _ in rates for each in (b, c)]),
        "ratio": {"mean": math.exp(mean), **interval, "rounds": ratios},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--window", type=float, default=4.0, help="seconds of a window")
    parser.add_argument("--readers", type=int, default=1)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "page_cost.json")
    given = parser.parse_args()
    with server(given.model, OPTIONS) as url:
        rounds, counts, log = asyncio.run(measure(url, given.rounds, given.window, given.readers))
    watched_s = sum(end - begin + SETTLE_S for each in rounds for watched, begin, end, _ in each if watched)
    result = {
        "command": record.command("benchmarks/server/page_cost.py"),
        "streams": STREAMS,
        "window_s": given.window,
        "readers": given.readers,
        "events_per_s": counts["events"] / watched_s / given.readers,
        "bytes_per_s": counts["bytes"] / watched_s / given.readers,
        **compare(rounds, log),
    }
    record.write(given.out, result | record.environment())
    print({name: value for name, value in result.items() if name != "command"})


if __name__ == "__main__":
    main()
