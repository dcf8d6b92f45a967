"""One client's heavy work, and what others feel of it, on ``transect serve`` with the built-in model.

* A newcomer: while one client has a request of many long answers, another asks for a short one. How long until its
  first token?
* Streams beside heavy work: the time between two tokens of a stream alone, and beside a long prompt, embeddings, scores
  and log-probabilities of prompts, in interleaved rounds. docs/understand/policies.md promises steps of at most 2.5
  times the median alone.
* Grammars: while some clients send schemas that are refused late, another asks for structured output.

    python benchmarks/server/fair_sharing.py [--rounds 3] [--out benchmarks/results/cpu/fair_sharing.json]

The server has the first half of this process's cores if there are four or more, and clients have the others. To
compare, set PYTHONPATH to the sources of another version.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.server.clients import BUILTIN, server

PATIENCE_S = 300
SETTLE_S = 3.0
"""From the beginning of heavy work to the newcomer."""
LOOK_S = 6.0
"""Seconds for which the stream alone is measured."""
WORDS = "the sea is wide and the harbour lies behind the old town where boats come home at night with fish and nets "
CROWDS = {
    "128 prompts x 100 tokens": {"prompt": [f"Number {n} of many" for n in range(128)], "max_tokens": 100},
    "16 prompts x n = 8": {"prompt": [f"Number {n} of many" for n in range(16)], "n": 8, "max_tokens": 100},
}
BESIDE: dict[str, tuple[str, dict[str, Any]]] = {
    "a prompt of 8,000 tokens": ("/v1/completions", {"prompt": WORDS * 340, "max_tokens": 1}),
    "64 embeddings": ("/v1/embeddings", {"input": [f"{n} " + WORDS * 8 for n in range(64)]}),
    "32 scores": ("/v1/score", {"text_1": "where do boats go", "text_2": [f"{n} " + WORDS * 8 for n in range(32)]}),
    "log-probabilities of a prompt": ("/v1/completions", {"prompt": WORDS * 80, "max_tokens": 1, "prompt_logprobs": 5}),
}  # fmt: skip
HOSTILE = {
    "type": "object",
    "properties": {f"p{n}": {"type": "string", "pattern": f"^[a-z]{{{n % 40 + 2}}}$"} for n in range(5000)},
}


class Stream(threading.Thread):
    """A stream that continues until ``over`` is set, and keeps the times of its tokens. It is greedy, and repeats plain
    words: a token that ends amid a character has no event of its own, and gaps would seem twice as long."""

    def __init__(self, url: str, headers: dict[str, str]) -> None:
        super().__init__(daemon=True)
        self._url, self._headers = url, headers
        self.over = threading.Event()
        self.times: list[tuple[int, float]] = []
        """The answer and the time of each token."""

    def run(self) -> None:
        fixed = {"model": BUILTIN, "prompt": "Once", "stream": True}
        body = {**fixed, "max_tokens": 4000, "temperature": 0, "ignore_eos": True}
        for answer_number in itertools.count():
            if self.over.is_set():
                return
            address = f"{self._url}/v1/completions"
            with httpx.stream("POST", address, json=body, headers=self._headers, timeout=PATIENCE_S) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data:"):
                        self.times.append((answer_number, time.perf_counter()))
                    if self.over.is_set():
                        break

    def gaps(self, began: float, ended: float) -> list[float]:
        """List the seconds between tokens of an answer, from ``began`` to ``ended``, in rising order."""
        times = [each for each in list(self.times) if began <= each[1] <= ended]
        return sorted(b[1] - a[1] for a, b in itertools.pairwise(times) if a[0] == b[0]) or [ended - began]


def of(key: str) -> dict[str, str]:
    """Return the headers of a client."""
    return {"Authorization": f"Bearer {key}"}


def first_token(url: str, key: str, **fields: Any) -> float:
    """Measure the seconds to the first token of a short answer."""
    body = {"model": BUILTIN, "prompt": "A newcomer asks", "max_tokens": 8, "stream": True, **fields}
    began = time.perf_counter()
    with httpx.stream("POST", f"{url}/v1/completions", json=body, headers=of(key), timeout=PATIENCE_S) as answer:
        next(line for line in answer.iter_lines() if line.startswith("data:"))
        seconds = time.perf_counter() - began
    return seconds


def newcomer(url: str, crowd: dict[str, Any]) -> float:
    """Measure the seconds to a newcomer's first token beside a crowd of another client, which is then ended."""
    body = {"model": BUILTIN, "ignore_eos": True, **crowd}
    over = threading.Event()

    def send() -> None:
        with (
            httpx.Client(timeout=PATIENCE_S) as client,
            client.stream("POST", f"{url}/v1/completions", json={**body, "stream": True}, headers=of("a")) as answer,
        ):
            for _ in answer.iter_raw():
                if over.is_set():
                    return

    thread = threading.Thread(target=send, daemon=True)
    thread.start()
    time.sleep(SETTLE_S)
    seconds = first_token(url, "b")
    over.set()
    thread.join()
    return seconds


def beside(url: str, path: str, fields: dict[str, Any], stream: Stream) -> dict[str, float]:
    """Measure the gaps between tokens of a stream, alone (before and after, since its own context grows) and beside a
    request, in seconds."""

    def look() -> list[float]:
        began = time.perf_counter()
        time.sleep(LOOK_S)
        return stream.gaps(began, time.perf_counter())

    alone = look()
    began = time.perf_counter()
    answer = httpx.post(f"{url}{path}", json={"model": BUILTIN, **fields}, headers=of("a"), timeout=PATIENCE_S)
    ended = time.perf_counter()
    answer.raise_for_status()
    gaps = stream.gaps(began, ended)
    usual = statistics.median(alone + look())
    return {
        "alone": usual,
        "p99_over_alone": gaps[len(gaps) * 99 // 100] / usual,
        "mean_over_alone": statistics.mean(gaps) / usual,
        "beside": statistics.median(gaps),
        "mean": statistics.mean(gaps),
        "p99": gaps[len(gaps) * 99 // 100],
        "longest": gaps[-1],
        "seconds": ended - began,
    }


def structured(url: str, clients: int) -> float:
    """Measure the seconds to the first token of a structured answer beside clients whose schemas are refused late."""
    over = threading.Event()

    def loop(number: int) -> None:
        schema = {**HOSTILE, "title": str(number)}
        count = 0
        while not over.is_set():
            count += 1
            body = {"model": BUILTIN, "prompt": "x", "max_tokens": 4, "guided_json": {**schema, "$comment": str(count)}}
            httpx.post(f"{url}/v1/completions", json=body, headers=of(f"hostile-{number}"), timeout=PATIENCE_S)

    threads = [threading.Thread(target=loop, args=(number,), daemon=True) for number in range(clients)]
    for thread in threads:
        thread.start()
    time.sleep(SETTLE_S)
    unique = {"type": "object", "properties": {"a": {"type": "integer", "minimum": int(time.time())}}}
    seconds = first_token(url, "b", guided_json=unique)
    over.set()
    for thread in threads:
        thread.join()
    return seconds


def keys_file(folder: str) -> Path:
    """Write a file with the keys of all clients."""
    path = Path(folder) / "keys"
    path.write_text("\n".join(["a", "b", *(f"hostile-{number}" for number in range(16))]) + "\n")
    return path


def measure(rounds: int, only: str, keep: Callable[[dict[str, Any]], None]) -> None:
    """Measure all figures, and give ``keep`` those so far after each part and round."""
    result: dict[str, Any] = {"newcomer": {}, "beside": {}, "structured": {}}

    def wanted(name: str) -> bool:
        return only in name

    all_cores = sorted(os.sched_getaffinity(0))
    cores = len(all_cores) // 2 if len(all_cores) >= 4 else 0
    with tempfile.TemporaryDirectory() as folder:
        options = ("--api-key-file", str(keys_file(folder)), "--max-queue", "2000")
        os.sched_setaffinity(0, all_cores[:cores] or all_cores)  # the server inherits them
        with server(*options) as url:
            os.sched_setaffinity(0, all_cores[cores:])
            first_token(url, "b")
            for name, crowd in CROWDS.items():
                if wanted("newcomer"):
                    result["newcomer"][name] = record.summary([newcomer(url, crowd) for _ in range(rounds)])
                    print(name, result["newcomer"][name], flush=True)
                    keep(result)
            if wanted("structured"):
                result["structured"]["alone"] = record.summary([structured(url, 0) for _ in range(rounds)])
                result["structured"]["16 clients"] = record.summary([structured(url, 16) for _ in range(rounds)])
                print(result["structured"], flush=True)
                keep(result)
            stream = Stream(url, of("b"))
            names = [name for name in BESIDE if wanted(f"beside {name}")]
            runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
            if names:
                stream.start()
                time.sleep(2.0)
            for number in range(rounds):
                for name in names:
                    path, fields = BESIDE[name]
                    runs[name].append(beside(url, path, vary(fields, number), stream))
                    print(number, name, {k: round(v, 3) for k, v in runs[name][-1].items()}, flush=True)
                for name, found in runs.items():
                    result["beside"][name] = {each: record.summary([run[each] for run in found]) for each in found[0]}
                keep(result)
            stream.over.set()


def beside_table(result: dict[str, Any]) -> str:
    """Format the gaps of a stream beside heavy work, or the command that records them while there are none."""
    found = result["after"]
    if not found["beside"]:
        return "Not recorded yet: `python benchmarks/server/fair_sharing.py --only beside` writes this table.\n"
    lines = ["| beside | median alone | median | p99 | p99 / alone | longest |", "|---|---|---|---|---|---|"]
    for name, row in found["beside"].items():
        ms = [f"{1e3 * row[each]['median']:.0f} ms" for each in ("alone", "beside", "p99")]
        ratio, longest = row["p99_over_alone"]["median"], 1e3 * row["longest"]["median"]
        lines.append(f"| {name} | {' | '.join(ms)} | {ratio:.2f} | {longest:.0f} ms |")
    machine, runs = found["environment"], next(iter(found["beside"].values()))["alone"]["runs"]
    return "\n".join(lines) + (
        f"\n\n`{result['command']}`: gaps between the tokens of a stream, medians of {runs} interleaved rounds; "
        f"{BUILTIN}, {machine['processor']}, {machine['cores']} cores, {record.made_at([machine])}.\n"
    )


def vary(fields: dict[str, Any], number: int) -> dict[str, Any]:
    """Return the same work without the help of the prefix cache."""

    def changed(text: str) -> str:
        return f"{number} {text}"

    varied = dict(fields)
    for name in ("prompt", "input", "text_2"):
        if isinstance(varied.get(name), str):
            varied[name] = changed(varied[name])
        elif isinstance(varied.get(name), list):
            varied[name] = [changed(each) for each in varied[name]]
    return varied


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="newcomer, structured, beside or a part of what it is beside of")
    parser.add_argument("--name", default="after", help="under which name the figures are kept: before, after")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "fair_sharing.json")
    options = parser.parse_args()
    kept: dict[str, Any] = json.loads(options.out.read_text()) if options.out.exists() else {}
    old, environment = kept.get(options.name, {}), record.environment(("llguidance",))

    def keep(figures: dict[str, Any]) -> None:
        merged = {part: {**old.get(part, {}), **figures[part]} for part in figures}
        kept["command"] = "python benchmarks/server/fair_sharing.py"
        kept[options.name] = {"environment": environment, **merged}
        record.write(options.out, kept)

    measure(options.rounds, options.only, keep)


if __name__ == "__main__":
    main()
