"""Measure what a fleet on Ray adds to a server: the same engine behind ``transect serve`` and behind a fleet.

    python benchmarks/cluster/ray_layer.py [--rounds 9] [--proxy] [--out FILE]

The engine is ``tests/helpers/stub_engine.py``: the shipping process, scheduler and messages, and tokens that cost
nothing but ``STUB_STEP_S`` a step. Measured are, over HTTP, the time to the first token at one stream (median of a
round) and tokens per second of 32 streams. A round measures both servers in turns; the cost of the layer is the median
over the rounds of the difference or ratio within a round. ``--proxy``: the fleet is reached through Ray Serve's proxy
too (``serve run``'s way), for comparison. Writes benchmarks/results/cpu/ray_layer.json. A round takes about 12 s.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
from fleet_load import fleet_settings, prepare, running

import _paths  # noqa: F401
from benchmarks import record

STREAMS, TOKENS, SINGLE, STEP_S = 32, 150, 60, 0.01
PROMPT = list(range(65, 129))
LONE = """
import sys
from transect.cli import main
from transect.engine.frontends.async_engine import AsyncEngine
AsyncEngine.process_module = "stub_engine"
main(sys.argv[1:])
"""


@contextlib.contextmanager
def alone(model: str) -> Iterator[str]:
    """Start ``transect serve`` with the stub engine; yields its URL."""
    command = [sys.executable, "-c", LONE, "serve", model, "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    try:
        line = server.stdout.readline()
        assert " ready on " in line, "the server did not start"
        yield line.split(" ready on ")[1].split()[0]
    finally:
        server.terminate()
        server.wait(30)


async def first_token_ms(client: httpx.AsyncClient) -> float:
    """Time from a request to its first event."""
    body = {"prompt": PROMPT, "max_tokens": 1, "seed": 1, "stream": True}
    took = 0.0
    began = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if not took and line.startswith("data: "):
                took = 1e3 * (time.perf_counter() - began)
    assert took, "no token"
    return took


async def tokens_per_s(client: httpx.AsyncClient) -> float:
    """Measure tokens per second of 32 streams at once."""

    async def one(seed: int) -> None:
        body = {"prompt": PROMPT, "max_tokens": TOKENS, "seed": seed, "ignore_eos": True, "stream": True}
        async with client.stream("POST", "/v1/completions", json=body) as response:
            assert response.status_code == 200
            async for _ in response.aiter_raw():
                pass

    began = time.perf_counter()
    await asyncio.gather(*(one(seed) for seed in range(STREAMS)))
    return STREAMS * TOKENS / (time.perf_counter() - began)


async def measure(urls: dict[str, str], rounds: int) -> dict[str, dict[str, list[float]]]:
    found: dict[str, dict[str, list[float]]] = {name: {"first_token_ms": [], "tokens_per_s": []} for name in urls}
    limits = httpx.Limits(max_connections=None)
    async with contextlib.AsyncExitStack() as stack:
        clients = {
            name: await stack.enter_async_context(
                httpx.AsyncClient(base_url=url, timeout=60, trust_env=False, limits=limits)
            )
            for name, url in urls.items()
        }
        for number in range(-1, rounds):
            order = list(clients) if number % 2 else list(reversed(clients))
            firsts: dict[str, list[float]] = {name: [] for name in order}
            for _ in range(SINGLE):
                for name in order:
                    firsts[name].append(await first_token_ms(clients[name]))
            for name in order:
                rate = await tokens_per_s(clients[name])
                if number >= 0:  # the first round is for warm-up
                    found[name]["first_token_ms"].append(statistics.median(firsts[name]))
                    found[name]["tokens_per_s"].append(rate)
    return found


def compare(found: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Summarize each way, and its difference from the server alone in the same round."""
    result: dict[str, Any] = {
        name: {what: record.summary(values) for what, values in each.items()} for name, each in found.items()
    }
    for name in found:
        if name != "alone":
            firsts = zip(found[name]["first_token_ms"], found["alone"]["first_token_ms"], strict=True)
            rates = zip(found[name]["tokens_per_s"], found["alone"]["tokens_per_s"], strict=True)
            result[f"{name}_first_token_ms_more"] = record.summary([there - here for there, here in firsts])
            result[f"{name}_tokens_per_s_ratio"] = record.summary([there / here for there, here in rates])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--proxy", action="store_true", help="measure Ray Serve's proxy too")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "ray_layer.json")
    arguments = parser.parse_args()
    prepare(STEP_S)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as folder:
        replicas = {"min": 1, "max": 1}
        own = fleet_settings(Path(folder), arguments.model, stub=True, replicas=replicas)
        with alone(arguments.model) as url, running(own, proxy=arguments.proxy) as fleet:
            urls = {"alone": url, "fleet": fleet}
            if arguments.proxy:
                urls["proxy"] = "http://127.0.0.1:8000"
            found = compare(asyncio.run(measure(urls, arguments.rounds)))
    result = {"command": record.command("benchmarks/cluster/ray_layer.py"), "step_s": STEP_S, "streams": STREAMS}
    result["load_average"] = load
    record.write(arguments.out, result | record.environment() | found)
    print(found)


if __name__ == "__main__":
    main()
