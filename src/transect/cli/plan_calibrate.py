"""``transect plan calibrate``: measure a server for some minutes, so that plans need not guess."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

START_S = 600.0
"""Seconds that a server may take to start."""
WARM_UP = 4
"""Requests before the sweep."""


def command(
    model: Annotated[str, typer.Argument(help="A built-in name, a .gguf file, a directory or a hub id.")],
    options: Annotated[
        list[str] | None, typer.Argument(help="Options of `transect serve`, after --: -- --max-num-seqs 16.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The profile to write.")] = Path("profile.json"),
    concurrency: Annotated[int, typer.Option(min=1, help="Most requests at a time; 1, 2, 4, ... up to it.")] = 16,
    requests: Annotated[int, typer.Option(min=1, help="Requests for each place of a level.")] = 6,
    context: Annotated[int, typer.Option(min=64, help="Longest prompt and answer together.")] = 2048,
    seed: Annotated[int, typer.Option(help="Seed of prompts and lengths.")] = 0,
) -> int:
    """Measure a server with a synthetic load, and write its profile for `transect plan serving --profile`.

    The profile has step times by work, and times of requests and tokens outside the engine.
    """
    from ..bench.environment import environment
    from ..bench.lengths import Lengths
    from ..bench.levels import WorkSource, run_levels
    from ..bench.target import Target, served_model
    from ..explain.engine.log import load
    from ..explain.engine.rates import rates_for
    from ..plan.calibrate import profile, sweep

    levels = sweep(concurrency, context, requests, seed)
    warm = WorkSource(Lengths.parse("32"), Lengths.parse("16"), seed=seed).draw(WARM_UP, "warm-up")
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "decisions.log"
        with server(model, ["--decision-log", str(log), *(options or [])]) as url:

            async def run() -> list:
                target = Target(url, await served_model(url))
                return await run_levels(target, levels, warm_up=warm)

            counts = ", ".join(f"{len(level.work)} at {level.value:g}" for level in levels)
            print(f"measuring {model}: requests at a time: {counts}", flush=True)
            results = asyncio.run(run())
        found = load(log)
    rates = rates_for(found.header)
    known = None if rates is None else (rates.bytes_per_second, rates.flops_per_second)
    made = profile(found, results, known, model, environment())
    made.write(out)
    print(
        f"{out}: {made.measured['steps']:.0f} steps; step times that were held out are off by "
        f"{made.errors['median']:.1%} at the median and {made.errors['p99']:.1%} at p99; {1e3 * made.intake:.1f} ms "
        f"before the engine, {1e3 * made.outlet:.1f} ms after it"
    )
    return 0


@contextmanager
def server(model: str, options: Sequence[str]) -> Iterator[str]:
    """Run ``transect serve`` for the length of the block, and yield its URL.

    Raises:
        ValueError: it did not start; the message has its last words.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = [sys.executable, "-m", "transect", "serve", model, "--port", str(port), *options]
    url = f"http://127.0.0.1:{port}"
    with tempfile.TemporaryFile("w+") as words:
        process = subprocess.Popen(arguments, stdout=words, stderr=words, env=dict(os.environ))
        try:
            until = time.monotonic() + START_S
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > until:
                    process.kill()
                    words.seek(0)
                    raise ValueError(f"the server did not start: {words.read()[-2000:].strip()}")
                time.sleep(0.2)
            yield url
        finally:
            process.terminate()
            process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False
