"""Streams of four clients beside many sequences and long prompts of a fifth, on one GPU with random weights.

The time between tokens is compared, in interleaved rounds: the streams alone, beside 200 sequences of one client that
decode, beside its long prompts, and beside both. docs/understand/policies.md says how clients share a step.

    python benchmarks/server/turns_gpu.py [--model llama-3.1-8b] [--rounds 2] [--look 5] [--out FILE]

About a minute and a half with an 8B model. The file is written after each measurement.
"""

from __future__ import annotations

import argparse
import itertools
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

import _paths  # noqa: F401
from benchmarks import record

PATIENCE_S = 120
SETTLE_S = 1.5
"""From the beginning of heavy work to the first gap that counts."""
STREAMS = 4
VOCAB = 30_000
CONTEXT = 8192


class Client(threading.Thread):
    """Requests with a key, one after another, each in a stream, until told to stop.

    Args:
        prompts: number of prompts of a request, and tokens of each.
        max_tokens: of each answer.
    """

    def __init__(self, url: str, key: str, prompts: tuple[int, int], max_tokens: int) -> None:
        super().__init__(daemon=True)
        self._url, self._key, self._prompts, self._max_tokens = url, key, prompts, max_tokens
        self.tokens = prompts[1]
        self.over = threading.Event()
        self.times: list[float] = []

    def run(self) -> None:
        chance, (count, tokens) = random.Random(f"{self._key} {id(self)}"), self._prompts
        with httpx.Client(timeout=PATIENCE_S, headers={"Authorization": f"Bearer {self._key}"}) as client:
            while not self.over.is_set():
                prompt = [[chance.randrange(1, VOCAB) for _ in range(tokens)] for _ in range(count)]
                body = {"model": "m", "prompt": prompt, "max_tokens": self._max_tokens, "ignore_eos": True}
                with client.stream("POST", f"{self._url}/v1/completions", json={**body, "stream": True}) as answer:
                    if answer.status_code != 200:
                        raise RuntimeError(answer.read().decode())
                    for piece in answer.iter_raw():  # not by lines: this process must not be what streams wait for
                        self.times += [time.perf_counter()] * piece.count(b"data: {")
                        if self.over.is_set():
                            break

    def gaps(self, began: float, ended: float) -> list[float]:
        """List the seconds between tokens from ``began`` to ``ended``."""
        times = [each for each in list(self.times) if began <= each <= ended]
        return [after - before for before, after in itertools.pairwise(times)]


MANY, LONG = ((200, 16), CONTEXT // 3), ((1, CONTEXT * 7 // 8), 1)
HEAVY: dict[str, list[tuple[tuple[int, int], int]]] = {
    "alone": [],
    "200 sequences": [MANY],
    "long prompts": [LONG, LONG],
    "both": [MANY, LONG],
}
"""Clients of the heavy key beside the streams: (prompts, tokens of each) and tokens of an answer."""


@contextmanager
def server(model: str, keys: Path, options: list[str]) -> Iterator[str]:
    """Run ``transect serve`` for the length of the block, and yield its URL."""
    command = [sys.executable, "-m", "transect", "serve", model, "--port", "0", "--load-format", "dummy"]
    command += ["--served-model-name", "m", "--api-key-file", str(keys), "--max-model-len", str(CONTEXT)]
    with subprocess.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if " ready on " not in line:
                raise RuntimeError(f"the server did not start: {line}")
            print(line.strip(), flush=True)
            yield line.split(" ready on ")[1].split()[0]
        finally:
            process.terminate()


def look(url: str, streams: list[Client], heavy: str, seconds: float) -> dict[str, float]:
    """Measure the gaps of the streams beside heavy work, and the tokens per second of both."""
    others = [Client(url, "heavy", *each) for each in HEAVY[heavy]]
    for each in others:
        each.start()
    time.sleep(SETTLE_S)
    began = time.perf_counter()
    time.sleep(seconds)
    ended = time.perf_counter()
    for each in others:
        each.over.set()
    gaps = sorted(gap for each in streams for gap in each.gaps(began, ended))
    count = sum(began <= at <= ended for each in others for at in each.times)
    prompts = sum(began <= at <= ended for each in others if each.tokens == LONG[0][1] for at in each.times)
    for each in others:
        each.join(PATIENCE_S)
    return {
        "p50": statistics.median(gaps),
        "mean": statistics.mean(gaps),
        "p99": gaps[len(gaps) * 99 // 100],
        "longest": gaps[-1],
        "streams_tokens_per_s": len(gaps) / (ended - began),
        "heavy_tokens_per_s": count / (ended - began),
        "heavy_prompts_per_s": prompts / (ended - began),
    }


def table(result: dict[str, Any]) -> str:
    """Format the gaps of the streams beside heavy work of another client."""
    lines = [
        "| beside | p50 | p99 | mean / alone | p99 / alone | streams | heavy client |",
        "|---|---|---|---|---|---|---|",
    ]
    alone = result["beside"]["alone"]
    for name, row in result["beside"].items():
        cells = [f"{1e3 * row[each]['median']:.1f} ms" for each in ("p50", "p99")]
        cells += [f"{row[each]['median'] / alone[each]['median']:.2f}" for each in ("mean", "p99")]
        cells.append(f"{row['streams_tokens_per_s']['median']:,.0f} tokens/s")
        work = f"{row['heavy_tokens_per_s']['median']:,.0f} tokens/s", f"{row['heavy_prompts_per_s']['median']:.1f}"
        cells.append("" if name == "alone" else f"{work[0]}, {work[1]} long prompts/s")
        lines.append(f"| {name} | {' | '.join(cells)} |")
    machine = result["environment"]
    return "\n".join(lines) + (
        f"\n\n`{result['command']}`: {result['streams']} streams of a client each, beside 200 answers and prompts of "
        f"{LONG[0][1]:,} tokens of a fifth; medians of {alone['p50']['runs']} interleaved rounds of "
        f"{result['look_s']:g} s, {result['model']} with random weights. {machine['gpu']}, "
        f"{record.made_at([machine])}.\n"
    )


def main() -> None:
    """Measure, and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--look", type=float, default=5.0, help="seconds of each measurement")
    parser.add_argument("--serve", nargs="*", default=[], help="further options of the server, without their dashes")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    import torch

    environment = {**record.environment(("torch", "triton")), "gpu": torch.cuda.get_device_name()}
    rounds: dict[str, list[dict[str, float]]] = {name: [] for name in HEAVY}
    with tempfile.TemporaryDirectory() as folder:
        keys = Path(folder) / "keys"
        keys.write_text("\n".join(["heavy", *(f"user-{number}" for number in range(STREAMS))]) + "\n")
        extra = [part if number % 2 else f"--{part}" for number, part in enumerate(options.serve)]
        with server(options.model, keys, extra) as url:
            streams = [Client(url, f"user-{number}", (1, 20), CONTEXT * 3 // 4) for number in range(STREAMS)]
            for each in streams:
                each.start()
            time.sleep(SETTLE_S)
            for number in range(options.rounds):
                for name in HEAVY:
                    rounds[name].append(look(url, streams, name, options.look))
                    print(number, name, {k: round(v, 5) for k, v in rounds[name][-1].items()}, flush=True)
                    result = {
                        "command": "python benchmarks/server/turns_gpu.py",
                        "environment": environment,
                        "model": options.model,
                        "streams": STREAMS,
                        "look_s": options.look,
                        "beside": {
                            name: {k: record.summary([run[k] for run in runs]) for k in runs[0]}
                            for name, runs in rounds.items()
                            if runs
                        },
                    }
                    record.write(options.out, result)
            for each in streams:
                each.over.set()
    print(table(result))


if __name__ == "__main__":
    main()
