"""Transect's server beside llama.cpp's own under the same requests, on this machine's processor.

    python benchmarks/server/load_cpu.py [--rates 0.5,1] [--requests 60] [--seeds 0] [--threads 2]
        [--llama-python PYTHON]

Both serve the same GGUF file with the same threads, one after the other. Requests of 200 tokens in and 50 out, each of
them 60% more or less, arrive at random (Poisson); both get the same texts at the same moments, and answers of full
length. llama.cpp is served by ``llama_cpp.server`` of llama-cpp-python, which answers one request after another; a new
one does not interrupt the one that runs. It needs ``pip install 'llama-cpp-python[server]'``, here or in the
environment of ``--llama-python``.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import socket
import statistics
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.peers.llamacpp_server import llamacpp_server
from benchmarks.peers.transect import SERVER
from transect.bench.lengths import Lengths
from transect.bench.levels import Level, WorkSource, rate_levels, run_levels
from transect.bench.target import Target, served_model
from transect.checkpoints.resolve import resolve
from transect.text.tokenizer import Tokenizer

PROMPT, OUTPUT = "uniform:80-320", "uniform:20-80"
START_S = 120.0
"""Seconds that a server may take to answer."""
FIGURES = ("ttft p50", "ttft p99", "tpot p50", "tpot p99", "itl p99", "e2e p50", "e2e p99")


def words_of(tokenizer: Tokenizer) -> list[str]:
    """List the tokens that are a word with a space before it, as text: adjacent ones are tokenized unchanged."""
    found = (tokenizer.decode([token]) for token in range(tokenizer.vocab_size))
    return [text for text in found if len(text) > 3 and text[0] == " " and text[1:].isascii() and text[1:].islower()]


def level(rate: float, requests: int, seed: int, words: Sequence[str]) -> Level:
    """Generate the work of one rate and seed, as text."""
    source = WorkSource(Lengths.parse(PROMPT), Lengths.parse(OUTPUT), seed=seed)
    (found,) = rate_levels(source, requests, [rate])
    rng = random.Random(f"words {seed} {rate}")
    work = [replace(each, prompt="".join(rng.choices(words, k=len(each.prompt)))) for each in found.work]
    return replace(found, work=work)


def commands(model: str, threads: int, python: str, port: int) -> dict[str, list[str]]:
    """Return how each server is started; ``python`` is that of llama.cpp."""
    theirs = llamacpp_server(python, str(resolve(model).path))
    return {each.name: each.command(model, threads, port) for each in (SERVER, theirs)}


@contextmanager
def running(command: Sequence[str], url: str) -> Iterator[None]:
    """Run a server for the length of the block.

    Raises:
        RuntimeError: it ended, or did not answer in time; the message has its last words.
    """
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH" or "transect" in command}
    with subprocess.Popen(command, env=plain, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            until = time.monotonic() + START_S
            while not _answers(url):
                if process.poll() is not None or time.monotonic() > until:
                    process.kill()
                    assert process.stderr is not None
                    raise RuntimeError(f"{' '.join(command[:3])} did not start: {process.stderr.read()[-2000:]}")
                time.sleep(0.2)
            yield
        finally:
            process.terminate()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/v1/models", timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


async def measure(url: str, name: str, levels: Sequence[Level], ends: Sequence[int]) -> list[dict[str, Any]]:
    """Run the levels in sequence and return their summaries. ``ends``: tokens that would end an answer."""
    bias = {} if name == "Transect" else {"logit_bias": {str(token): -100 for token in ends}}
    target = Target(url, await served_model(url), ignore_eos=name == "Transect", extra=bias)
    warm = [replace(each, output_tokens=8) for each in levels[0].work[:2]]
    return [result.summary for result in await run_levels(target, levels, warm_up=warm)]


def row(rate: str, name: str, runs: Sequence[dict[str, Any]]) -> str:
    """Format a line of the table: medians over the seeds, milliseconds."""
    cells = [f"{statistics.median(run['output_tokens_per_second'] for run in runs):.1f}"]
    for what, share in (each.split() for each in FIGURES):
        found = statistics.median(run[what][share] for run in runs) * 1e3
        cells.append(f"{found:.1f}" if what == "tpot" else f"{found:,.0f}")
    return f"| {rate} | {name} | " + " | ".join(cells) + " |"


def page(result: dict[str, Any]) -> str:
    """Format a page: both servers at each rate."""
    lines = ["| rate | server | out tok/s | TTFT p50 | p99 | TPOT p50 | p99 | ITL p99 | E2E p50 | p99 |"]
    lines.append("|---" * 10 + "|")
    for rate in sorted({each["rate"] for each in result["levels"]}, key=float):
        for name in ("Transect", "llama.cpp"):
            runs = [each["result"] for each in result["levels"] if (each["rate"], each["server"]) == (rate, name)]
            if runs:
                lines.append(row(rate, name, runs))
    machine, seeds = result["environment"], len(result["seeds"])
    runs = f"median of {seeds} seeds" if seeds > 1 else "one seed"
    lines.append(
        f"\n`{result['command']}`: {result['model']}, {machine['processor']}, {result['threads']} threads, "
        f"{result['requests']} requests at each rate, {runs}, llama-cpp-python {result['peer']}, "
        f"{record.made_at([machine])}.\n"
    )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rates", default="0.5,1", help="requests per second")
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--seeds", default="0")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--llama-python", default=sys.executable, help="a Python with llama-cpp-python[server]")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "serve_load.json")
    options = parser.parse_args(arguments)
    asked = "import llama_cpp, llama_cpp.server.app; print(llama_cpp.__version__)"
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    found = subprocess.run([options.llama_python, "-c", asked], capture_output=True, text=True, env=plain)
    if found.returncode:
        parser.error(f"{options.llama_python} lacks llama.cpp's server: pip install 'llama-cpp-python[server]'")
    tokenizer = Tokenizer.from_source(resolve(options.model))
    words = words_of(tokenizer)
    rates, seeds = options.rates.split(","), [int(seed) for seed in options.seeds.split(",")]
    result: dict[str, Any] = {
        "command": "python benchmarks/server/load_cpu.py",
        "environment": record.environment(("torch",)),
        "model": options.model,
        "threads": options.threads,
        "requests": options.requests,
        "seeds": seeds,
        "peer": found.stdout.strip(),
        "levels": [],
    }
    for seed in seeds:
        levels = [level(float(rate), options.requests, seed, words) for rate in rates]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        url = f"http://127.0.0.1:{port}"
        for name, command in commands(options.model, options.threads, options.llama_python, port).items():
            with running(command, url):
                summaries = asyncio.run(measure(url, name, levels, sorted(tokenizer.eos_token_ids)))
            for rate, summary in zip(rates, summaries, strict=True):
                result["levels"].append({"rate": rate, "seed": seed, "server": name, "result": summary})
                print(row(rate, f"{name}, seed {seed}", [summary]), summary["errors"], flush=True)
            record.write(options.out, result)
    print(page(result))


if __name__ == "__main__":
    main()
