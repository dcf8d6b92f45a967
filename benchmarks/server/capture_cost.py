"""Measure the cost of captures: one server that captures every request, and the same server without, in turns.

    python benchmarks/server/capture_cost.py [--seconds 180] [--out FILE]

The engine is ``tests/helpers/stub_engine.py``: the shipping process, scheduler and messages, without a model. 32
clients stream chats after a prompt of about 2,000 characters with an e-mail address and a card number, over real
sockets. Two loads alternate in short rounds, each on both servers:

* tokens that cost nothing, so that the servers are limited by their own work: tokens per second, and the server's
  processor time per token;
* steps of 10 ms, as of a model: the gap between two pieces of a stream that 99% are below. The gaps of all rounds count
  together; the interval of the ratio is a bootstrap over rounds, so one disturbed round does not decide.

Writes benchmarks/results/cpu/capture_cost.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import _paths  # noqa: F401
from benchmarks import record

HELPERS = record.ROOT / "tests" / "helpers"
STREAMS, TOKENS, STEP_S, PACED_TOKENS = 32, 200, 0.01, 60
RESAMPLES = 400
PROMPT = "Please send the invoice to ann@example.com and charge 4111 1111 1111 1111. " + "It was a fine day. " * 100


def serve(port: int, folder: str) -> None:
    """Serve the stub engine in this process until it is killed."""
    from transect.engine.config import EngineConfig
    from transect.engine.frontends.async_engine import AsyncEngine
    from transect.server.options import ServerOptions
    from transect.server.process import bind
    from transect.server.process import serve as serving

    AsyncEngine.process_module = "stub_engine"
    config = EngineConfig(model="smollm2-135m", hung_after_s=30)
    options = ServerOptions(model_names=("stub",), port=port, capture_dir=folder or None)
    sock = bind("127.0.0.1", port)
    asyncio.run(serving(lambda: AsyncEngine.start(config), options, sock, ready=lambda engine: None))


@contextlib.contextmanager
def server(folder: str, step_s: float) -> Iterator[tuple[int, int]]:
    """Start a server; its port and process id."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.pathsep.join([str(record.ROOT / "src"), str(HELPERS), str(Path(__file__).parent)])
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(port), "--folder", folder],
        env={**os.environ, "PYTHONPATH": path, "STUB_STEP_S": str(step_s), "STUB_VOCAB": "49152"},
    )
    try:
        while True:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.05)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait()


async def stream(port: int, gaps: list[float], tokens: int) -> None:
    """Stream one chat, and note the seconds between its pieces."""
    messages = [{"role": "user", "content": PROMPT}]
    body = json.dumps({"messages": messages, "max_tokens": tokens, "ignore_eos": True, "stream": True}).encode()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    lines = "POST /v1/chat/completions HTTP/1.1", "Host: a", "Content-Type: application/json", "Connection: close"
    writer.write("\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body)
    last, found = 0.0, b""
    while piece := await reader.read(65536):
        now = time.perf_counter()
        if last:
            gaps.append(now - last)
        last, found = now, found[-64:] + piece
    assert b"[DONE]" in found, found
    writer.close()


def processor_s(pid: int) -> float:
    """Return the processor time that a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def load(port: int, tokens: int) -> tuple[float, list[float]]:
    """Stream ``STREAMS`` chats. Returns the seconds, and the gaps between pieces."""
    gaps: list[float] = []
    began = time.perf_counter()
    await asyncio.gather(*(stream(port, gaps, tokens) for _ in range(STREAMS)))
    return time.perf_counter() - began, gaps


def measure(seconds: float) -> tuple[dict[str, dict[str, list[float]]], dict[str, list[list[float]]], int]:
    """Measure both servers in turns for some seconds. Returns the values of rounds, their gaps, and the number of
    requests that were not captured."""
    kinds = ("without", "capturing")
    found: dict[str, dict[str, list[float]]] = {
        kind: {"tokens_per_s": [], "processor_us_per_token": []} for kind in kinds
    }
    gaps: dict[str, list[list[float]]] = {kind: [] for kind in kinds}
    with tempfile.TemporaryDirectory() as scratch, contextlib.ExitStack() as servers:
        folders = {"without": "", "capturing": f"{scratch}/captures"}
        fast = {kind: servers.enter_context(server(folder, 0.0)) for kind, folder in folders.items()}
        paced = {kind: servers.enter_context(server(folder, STEP_S)) for kind, folder in folders.items()}
        number, until = -1, time.monotonic() + seconds
        while number < 2 or time.monotonic() < until:
            for kind in kinds if number % 2 else kinds[::-1]:
                port, pid = fast[kind]
                used = processor_s(pid)
                took, _ = asyncio.run(load(port, TOKENS))
                used = processor_s(pid) - used
                _, between = asyncio.run(load(paced[kind][0], PACED_TOKENS))
                if number >= 0:  # else a warm-up
                    found[kind]["tokens_per_s"].append(STREAMS * TOKENS / took)
                    found[kind]["processor_us_per_token"].append(1e6 * used / (STREAMS * TOKENS))
                    gaps[kind].append(between)
            number += 1
        servers.close()
        lines = sum(len(path.read_bytes().splitlines()) for path in Path(folders["capturing"]).glob("captures-*.jsonl"))
    return found, gaps, 2 * STREAMS * (number + 1) - lines


def compare(found: dict[str, dict[str, list[float]]], gaps: dict[str, list[list[float]]]) -> dict[str, Any]:
    """Summarize both, their ratios within a round, and the 99th percentiles of gaps with an interval of their ratio."""
    result: dict[str, Any] = {
        kind: {name: record.summary(values) for name, values in each.items()} for kind, each in found.items()
    }
    for name, values in found["without"].items():
        ratios = [mine / plain for mine, plain in zip(found["capturing"][name], values, strict=True)]
        result[f"{name}_ratio"] = record.summary(ratios)
    rounds = {kind: [np.array(each) for each in of_kind] for kind, of_kind in gaps.items()}
    count = len(rounds["without"])

    def p99(kind: str, chosen: Iterable[int]) -> float:
        return float(np.quantile(np.concatenate([rounds[kind][each] for each in chosen]), 0.99))

    draw, ratios = np.random.default_rng(0), []
    for _ in range(RESAMPLES):
        chosen = draw.integers(0, count, count)
        ratios.append(p99("capturing", chosen) / p99("without", chosen))
    without, capturing = p99("without", range(count)), p99("capturing", range(count))
    low, high = np.quantile(ratios, [0.025, 0.975])
    result["gap_p99"] = {
        "step_ms": 1e3 * STEP_S, "without_ms": 1e3 * without, "capturing_ms": 1e3 * capturing,
        "ratio": capturing / without, "interval": [float(low), float(high)], "rounds": count,
    }  # fmt: skip
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "capture_cost.json")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(arguments.serve, arguments.folder)
        return
    measured, gaps, missing = measure(arguments.seconds)
    assert not missing, f"{missing} requests were not captured"
    found = compare(measured, gaps)
    result = {"command": "python benchmarks/server/capture_cost.py", "streams": STREAMS}
    record.write(arguments.out, result | {"environment": record.environment()} | found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
