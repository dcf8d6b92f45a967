"""The work that engines are asked for on a CPU, and one engine in a process of its own.

``cpu_vs_llamacpp.py`` and ``cpu_peers.py`` start this file with the interpreter that has the engine's packages. It
needs nothing else: neither torch nor Transect.
"""

from __future__ import annotations

import argparse
import importlib
import json
import random
import resource
from importlib import metadata
from typing import Any

import _paths  # noqa: F401
from benchmarks.peers.peer import Engine

WORK = {"decode": (1, 512, 65), "prefill": (1, 512, 1), "batch": (16, 128, 33)}
"""Name: number of prompts, tokens of each, new tokens of each (the first one comes out of the prefill)."""
SHORT = {"decode-short": (1, 64, 33), "batch-short": (16, 16, 17)}
"""The same for large models on few cores."""
REPEATS = 2


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    """Generate the same random token ids for all engines, new ones for every repeat."""
    rng = random.Random(seed)
    return [[rng.randrange(100, 40_000) for _ in range(length)] for _ in range(count)]


def rate(work: str, prefill_seconds: float, decode_seconds: float) -> float:
    """Return tokens per second of one piece of work."""
    count, length, new = (WORK | SHORT)[work]
    return count * length / prefill_seconds if work == "prefill" else count * (new - 1) / decode_seconds


def rates_of(engine: Engine, works: tuple[str, ...] = tuple(WORK), repeats: int = REPEATS) -> dict[str, list[float]]:
    """Return the tokens per second of each work and repeat, by an ``Engine`` of ``benchmarks/peers``."""
    results: dict[str, list[float]] = {}
    for work in works:
        count, length, new = (WORK | SHORT)[work]
        for repeat in range(repeats + 1):
            seconds = engine.run(prompts(count, length, repeat), new)
            if repeat:  # the first one warms up
                results.setdefault(work, []).append(rate(work, *seconds))
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("peer", help="a file of benchmarks/peers that has ENGINE")
    parser.add_argument("path", help="the model as that engine reads it")
    parser.add_argument("--threads", type=int, required=True)
    parser.add_argument("--settings", type=json.loads, default={})
    parser.add_argument("--works", default=",".join(WORK))
    parser.add_argument("--repeats", type=int, default=REPEATS)
    options = parser.parse_args()
    peer: Any = importlib.import_module(f"benchmarks.peers.{options.peer}")
    engine = peer.ENGINE(options.path, options.threads, options.settings)
    result = {
        "rates": rates_of(engine, tuple(options.works.split(",")), options.repeats),
        "peak_memory_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "versions": {name: metadata.version(name) for name in peer.PACKAGES},
    }
    print(json.dumps(result | ({"kernels": engine.kernels} if hasattr(engine, "kernels") else {})))


if __name__ == "__main__":
    main()
