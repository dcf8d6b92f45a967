"""Measure the cost of replicas while nothing fails: one engine behind them, and the same engine alone.

    python benchmarks/server/replica_cost.py [--rounds 15] [--out FILE]

Neither has a model. The engine is ``tests/helpers/stub_engine.py``: the shipping process, scheduler and messages, and
tokens that cost nothing but ``STUB_STEP_S`` a step. Measured are the time to the first token at one stream, tokens a
second at 32 streams, and the processor time that the caller's process spends on a token. A round measures both, in
turns; the cost of replicas is the median over the rounds of the difference or ratio within a round. Writes
benchmarks/results/cpu/replica_cost.json.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record
from transect import SamplingParams
from transect.engine.config import EngineConfig
from transect.engine.frontends.async_engine import AsyncEngine
from transect.engine.frontends.replicas import Replicas

HELPERS = record.ROOT / "tests" / "helpers"
PROMPT = list(range(65, 129))
STREAMS, TOKENS, SINGLE = 32, 200, 100
STEP_S = 0.005


async def first_token_s(engine: Any, name: str) -> float:
    """Time from a request to its first token."""
    began = time.perf_counter()
    async for _ in engine.stream(PROMPT, SamplingParams(max_tokens=1, seed=1), name):
        return time.perf_counter() - began
    raise AssertionError("no token")


async def many(engine: Any, name: str) -> tuple[float, float]:
    """Measure tokens per second of 32 streams, and microseconds of this process's processor time per token."""

    async def one(index: int) -> None:
        async for _ in engine.stream(PROMPT, SamplingParams(max_tokens=TOKENS, seed=index), f"{name} {index}"):
            pass

    began, used = time.perf_counter(), time.process_time()
    await asyncio.gather(*(one(index) for index in range(STREAMS)))
    tokens = STREAMS * TOKENS
    return tokens / (time.perf_counter() - began), 1e6 * (time.process_time() - used) / tokens


async def measure(rounds: int, model: str) -> dict[str, dict[str, list[float]]]:
    config = EngineConfig(model=model, hung_after_s=30)
    engines: dict[str, Any] = {"alone": await AsyncEngine.start(config), "replicas": await Replicas.start(config)}
    found: dict[str, dict[str, list[float]]] = {
        name: {"first_token_ms": [], "tokens_per_s": [], "processor_us_per_token": []} for name in engines
    }
    for number in range(-1, rounds):
        order = list(engines.items()) if number % 2 else list(reversed(engines.items()))
        firsts: dict[str, list[float]] = {name: [] for name in engines}
        for index in range(SINGLE):
            for name, engine in order:
                firsts[name].append(1e3 * await first_token_s(engine, f"{number} {index}"))
        for name, engine in order:
            rate, processor = await many(engine, f"many {number}")
            if number < 0:
                continue  # warm-up
            values = (statistics.median(firsts[name]), rate, processor)
            for each, value in zip(found[name].values(), values, strict=True):
                each.append(value)
    for engine in engines.values():
        await engine.shutdown()
    return found


def compare(found: dict[str, dict[str, list[float]]]) -> dict[str, Any]:
    """Summarize both, and the differences between them in the same round."""
    result: dict[str, Any] = {
        name: {what: record.summary(values) for what, values in each.items()} for name, each in found.items()
    }
    pairs = {what: list(zip(found["replicas"][what], alone, strict=True)) for what, alone in found["alone"].items()}
    result["first_token_ms_more"] = record.summary([behind - alone for behind, alone in pairs["first_token_ms"]])
    result["tokens_per_s_ratio"] = record.summary([behind / alone for behind, alone in pairs["tokens_per_s"]])
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "replica_cost.json")
    arguments = parser.parse_args()
    os.environ["PYTHONPATH"] = os.pathsep.join([str(record.ROOT / "src"), str(HELPERS)])
    os.environ["STUB_STEP_S"] = str(STEP_S)
    AsyncEngine.process_module = "stub_engine"
    found = compare(asyncio.run(measure(arguments.rounds, arguments.model)))
    result = {"command": "python benchmarks/server/replica_cost.py", "step_s": STEP_S, "streams": STREAMS}
    record.write(arguments.out, result | record.environment() | found)
    print(found)


if __name__ == "__main__":
    main()
