"""Schemas made to hurt, sent to ``transect serve``: how long until each is refused, and what a stream beside feels.

A stream of the built-in model runs the whole time. For each schema: the status, the seconds until the answer is there,
and the longest time between two tokens of the stream meanwhile, beside that of the stream alone.

    python benchmarks/server/hostile_schemas.py [--out benchmarks/results/cpu/hostile_schemas.json]
"""

from __future__ import annotations

import argparse
import itertools
import json
import threading
import time
from pathlib import Path
from typing import Any

import httpx

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.engine.grammars import HOSTILE
from benchmarks.server.clients import BUILTIN, server

KINDS = {"json": "guided_json", "regex": "guided_regex"}
PATIENCE_S = 60
LOOK_S = 0.5
"""Seconds for which the stream beside is watched after a schema is sent, unless the answer comes later."""


class Beside(threading.Thread):
    """A stream that runs until it is stopped, and records the times of its tokens."""

    def __init__(self, url: str) -> None:
        super().__init__(daemon=True)
        self._url, self.over, self.times = url, threading.Event(), [time.perf_counter()]

    def run(self) -> None:
        body = {"model": BUILTIN, "prompt": "Once", "max_tokens": 4000, "ignore_eos": True, "stream": True}
        while not self.over.is_set():
            with httpx.stream("POST", f"{self._url}/v1/completions", json=body, timeout=PATIENCE_S) as answer:
                for line in answer.iter_lines():
                    if line.startswith("data:"):
                        self.times.append(time.perf_counter())
                    if self.over.is_set():
                        break

    def longest_gap(self, began: float, ended: float) -> float:
        """Return the most seconds between two tokens, from ``began`` to ``ended``."""
        times = [began, *(each for each in list(self.times) if began < each < ended), ended]
        return max(b - a for a, b in itertools.pairwise(times))


def ask(url: str, beside: Beside, kind: str, text: str) -> dict[str, Any]:
    """Send one schema; what came of it."""
    began = time.perf_counter()
    body = {"model": BUILTIN, "prompt": "Hi", "max_tokens": 4, KINDS[kind]: text}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S)
    ended = time.perf_counter()
    time.sleep(max(0.0, began + LOOK_S - ended))
    said = answer.json().get("error", {}).get("message", "") if answer.status_code != 200 else ""
    return {
        "status": answer.status_code,
        "seconds": ended - began,
        "longest_gap_s": beside.longest_gap(began, max(ended, began + LOOK_S)),
        "message": said[:200],
    }


def table(result: dict[str, Any]) -> str:
    """Format schemas and their outcomes."""
    lines = ["| schema | answer | after | longest gap of another stream |", "|---|---|---|---|"]
    for name, rounds in result["schemas"].items():
        seconds, gap = (max(each[key] for each in rounds) for key in ("seconds", "longest_gap_s"))
        lines.append(f"| {name} | {rounds[0]['status']} | {seconds:.2f} s | {1e3 * gap:.0f} ms |")
    lines.append(f"| none | | | {1e3 * result['alone_s']:.0f} ms |")
    machine = result["environment"]
    return "\n".join(lines) + (
        f"\n\nThe longest of {result['rounds']} rounds; {BUILTIN}, {machine['processor']}, {machine['cores']} cores, "
        f"{record.made_at([machine])}.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "hostile_schemas.json")
    options = parser.parse_args()
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in HOSTILE}
    with server("--max-model-len", "4096", "--max-num-seqs", "4") as url:
        beside = Beside(url)
        beside.start()
        time.sleep(3)
        began = time.perf_counter()
        time.sleep(5)
        alone = beside.longest_gap(began, time.perf_counter())
        for _ in range(options.rounds):
            for name, make in HOSTILE.items():
                found[name].append(ask(url, beside, *make()))
                print(name, json.dumps(found[name][-1]), flush=True)
        beside.over.set()
        beside.join(PATIENCE_S)
    record.write(
        options.out,
        {
            "command": "python benchmarks/server/hostile_schemas.py",
            "environment": record.environment(("llguidance",)),
            "rounds": options.rounds,
            "alone_s": alone,
            "schemas": found,
        },
    )


if __name__ == "__main__":
    main()
