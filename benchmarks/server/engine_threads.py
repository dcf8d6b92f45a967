"""Tokens a second of streams over HTTP, by threads of an engine on the CPU.

The server has the first half of this process's cores, and the clients have the others. The engine has a thread for each
core of the server, or one less, which leaves a core to HTTP: the default behind a server from four cores on. Rounds are
interleaved, and the file is written after each.

    python benchmarks/server/engine_threads.py [--rounds 3] [--out benchmarks/results/cpu/server_threads.json]
"""

from __future__ import annotations

import argparse
import os
import threading
import time
from pathlib import Path
from typing import Any

import httpx

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.server.clients import BUILTIN, server

STREAMS = (1, 8)
SETTLE_S, MEASURE_S = 2.0, 6.0
PATIENCE_S = 300


def rate(url: str, streams: int) -> float:
    """Measure the tokens a second of this many streams together."""
    counts, over = [0] * streams, threading.Event()

    def read(number: int) -> None:
        body = {"model": BUILTIN, "prompt": f"{number} once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        with httpx.stream("POST", f"{url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
            for line in answer.iter_lines():
                counts[number] += line.startswith("data:")
                if over.is_set():
                    return

    threads = [threading.Thread(target=read, args=(number,), daemon=True) for number in range(streams)]
    for thread in threads:
        thread.start()
    time.sleep(SETTLE_S)
    before, began = sum(counts), time.perf_counter()
    time.sleep(MEASURE_S)
    found = (sum(counts) - before) / (time.perf_counter() - began)
    over.set()
    for thread in threads:
        thread.join()
    return found


def table(result: dict[str, Any]) -> str:
    """Format tokens a second by threads, with changes from a thread for each core."""
    cores, found = result["server_cores"], result["tokens_per_s"]
    lines = ["| threads | 1 stream | 8 streams |", "|---|---|---|"]
    for name, row in found.items():
        rates = {n: (row[n]["median"], found[str(cores)][n]["median"]) for n in map(str, STREAMS)}
        cells = [
            f"{mine:.0f} ({mine / most - 1:+.0%})" if mine != most else f"{most:.0f}" for mine, most in rates.values()
        ]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    machine, runs = result["environment"], found[str(cores)]["1"]["runs"]
    return "\n".join(lines) + (
        f"\n\n`{result['command']}`: tokens a second over HTTP, {cores} cores for the server and as many for clients, "
        f"medians of {runs} interleaved rounds; {BUILTIN}, {machine['processor']}, {record.made_at([machine])}.\n"
    )


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "server_threads.json")
    options = parser.parse_args()
    all_cores = sorted(os.sched_getaffinity(0))
    cores = len(all_cores) // 2
    if cores < 2:
        parser.error("four cores are needed, half of them for clients")
    head = {
        "command": record.command("benchmarks/server/engine_threads.py"),
        "environment": record.environment(),
        "server_cores": cores,
    }
    runs: dict[int, dict[int, list[float]]] = {threads: {n: [] for n in STREAMS} for threads in (cores, cores - 1)}
    for _ in range(options.rounds):
        for threads, found in runs.items():
            os.sched_setaffinity(0, all_cores[:cores])  # the server inherits them
            with server("--threads", str(threads)) as url:
                os.sched_setaffinity(0, all_cores[cores:])
                for streams, rates in found.items():
                    rates.append(rate(url, streams))
            print(threads, found, flush=True)
        summed = {str(t): {str(n): record.summary(each) for n, each in found.items()} for t, found in runs.items()}
        record.write(options.out, {**head, "tokens_per_s": summed})


if __name__ == "__main__":
    main()
