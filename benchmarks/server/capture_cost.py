"""Measure the cost of captures: one server that captures every request, and the same server without, in turns.

    python benchmarks/server/capture_cost.py [--rounds 15] [--out FILE]

The engine is ``tests/helpers/stub_engine.py``: the shipping process, scheduler and messages, without a model, and
tokens that cost nothing. So the servers are limited by their own work. 32 clients stream chats of 200 tokens after a
prompt of about 2,000 characters with an e-mail address and a card number, over real sockets. Measured are tokens per
second, the gap between two pieces of a stream that 99% are below, and the server's processor time per token. Writes
benchmarks/results/cpu/capture_cost.json.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record

HELPERS = record.ROOT / "tests" / "helpers"
STREAMS, TOKENS, REPEATS = 32, 200, 2
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
def server(folder: str) -> Iterator[tuple[int, int]]:
    """Start a server; its port and process id."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    path = os.pathsep.join([str(record.ROOT / "src"), str(HELPERS), str(Path(__file__).parent)])
    process = subprocess.Popen(
        [sys.executable, __file__, "--serve", str(port), "--folder", folder],
        env={**os.environ, "PYTHONPATH": path, "STUB_STEP_S": "0", "STUB_VOCAB": "49152"},
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


async def stream(port: int, gaps: list[float]) -> None:
    """Stream one chat, and note the seconds between its pieces."""
    messages = [{"role": "user", "content": PROMPT}]
    body = json.dumps({"messages": messages, "max_tokens": TOKENS, "ignore_eos": True, "stream": True}).encode()
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


async def load(port: int, pid: int) -> tuple[float, float, float]:
    """Return tokens per second, the 99th percentile of gaps in ms, and the server's microseconds per token."""
    gaps: list[float] = []
    began, used = time.perf_counter(), processor_s(pid)
    for _ in range(REPEATS):
        await asyncio.gather(*(stream(port, gaps) for _ in range(STREAMS)))
    seconds, tokens = time.perf_counter() - began, REPEATS * STREAMS * TOKENS
    return tokens / seconds, 1e3 * statistics.quantiles(gaps, n=100)[98], 1e6 * (processor_s(pid) - used) / tokens


def measure(rounds: int) -> tuple[dict[str, dict[str, list[float]]], int]:
    """Measure both servers in turns; also the number of captured records."""
    names = ("tokens_per_s", "gap_p99_ms", "processor_us_per_token")
    found: dict[str, dict[str, list[float]]] = {kind: {name: [] for name in names} for kind in ("without", "capturing")}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "captures"
        with server("") as plain, server(str(folder)) as capturing:
            for number in range(-1, rounds):
                both = [("without", plain), ("capturing", capturing)]
                for kind, (port, pid) in both if number % 2 else both[::-1]:
                    values = asyncio.run(load(port, pid))
                    if number >= 0:  # else a warm-up
                        for name, value in zip(names, values, strict=True):
                            found[kind][name].append(value)
        lines = sum(len(path.read_bytes().splitlines()) for path in folder.glob("captures-*.jsonl"))
    return found, lines


def compare(found: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Summarize both, and their ratios within a round."""
    result: dict[str, Any] = {
        kind: {name: record.summary(values) for name, values in each.items()} for kind, each in found.items()
    }
    for name, values in found["without"].items():
        ratios = [mine / plain for mine, plain in zip(found["capturing"][name], values, strict=True)]
        result[f"{name}_ratio"] = record.summary(ratios)
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "capture_cost.json")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve is not None:
        serve(arguments.serve, arguments.folder)
        return
    measured, records = measure(arguments.rounds)
    expected = (arguments.rounds + 1) * REPEATS * STREAMS
    assert records == expected, f"{records} of {expected} requests were captured"
    found = compare(measured)
    result = {"command": "python benchmarks/server/capture_cost.py", "streams": STREAMS, "records": records}
    record.write(arguments.out, result | {"environment": record.environment()} | found)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
