"""Continuous batching against FIFO static batches: the same engine, the same random arrivals and lengths.

A static batch takes the requests that wait, runs them all to their ends, and only then takes the next ones. Continuous
batching lets a request in as soon as there is room and lets it go when it is done. Requests arrive as a Poisson process
at a rate that neither policy can keep up with for long, then at one that continuous batching can.

    python benchmarks/engine/batching.py [--requests 64] [--rounds 3] [--model smollm2-135m]
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record

POLICIES = ("continuous", "static")
RATES = (6.0, 1000.0)
"""Requests per second: one that arrives over time, and one where all are there from the start."""
PROMPT_TOKENS, OUTPUT_TOKENS = (16, 256), (8, 192)
PERCENTILES = (50, 95, 99)


def workload(requests: int, rate: float, seed: int) -> list[tuple[float, list[int], int]]:
    """Generate (arrival in seconds, prompt token ids, output tokens), the same for both policies."""
    rng = random.Random(seed)
    at, load = 0.0, []
    for _ in range(requests):
        at += rng.expovariate(rate)
        prompt = [rng.randrange(100, 40_000) for _ in range(rng.randint(*PROMPT_TOKENS))]
        load.append((at, prompt, rng.randint(*OUTPUT_TOKENS)))
    return load


def run(engine: Any, load: Sequence[tuple[float, list[int], int]]) -> dict[str, Any]:
    """Feed the requests as they arrive; time to first token and to last token of each, from its arrival."""
    from transect import SamplingParams

    arrivals: dict[str, float] = {}
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    start = time.perf_counter()
    waiting = list(load)
    while len(last) < len(load):
        now = time.perf_counter() - start
        while waiting and waiting[0][0] <= now:
            at, prompt, new = waiting.pop(0)
            name = engine.submit(prompt, SamplingParams(max_tokens=new, temperature=0.0, ignore_eos=True))
            arrivals[name] = at
        if not engine.has_work:
            time.sleep(max(0.0, waiting[0][0] - now))
            continue
        for output in engine.step():
            now = time.perf_counter() - start
            if output.new_token_ids:
                first.setdefault(output.request_id, now)
            if output.finish_reason is not None:
                last[output.request_id] = now
    seconds = time.perf_counter() - start
    return {
        "output_tokens_per_second": sum(new for _, _, new in load) / seconds,
        "ttft": [first[name] - arrivals[name] for name in arrivals],
        "latency": [last[name] - arrivals[name] for name in arrivals],
    }


def percentile(values: Sequence[float], share: int) -> float:
    """Return the smallest value that ``share`` percent of the values do not exceed."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * share // 100) - 1)]


def table(result: dict[str, Any]) -> str:
    head = "| arrivals | policy | tok/s | TTFT p50 | p95 | p99 | latency p50 | p95 | p99 |"
    lines = [head, "|---|---|---|---|---|---|---|---|---|"]
    for name, policies in result["work"].items():
        for policy, row in policies.items():
            cells = [f"{row['output_tokens_per_second']['median']:.0f}"]
            cells += [f"{row[what][f'p{p}']['median']:.2f} s" for what in ("ttft", "latency") for p in PERCENTILES]
            lines.append(f"| {name} | {policy} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plot(pooled: dict[str, dict[str, list[float]]], path: Path) -> None:
    """Plot the distribution of both times under each policy, at the first rate."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), sharey=True)
    for axis, what, title in zip(axes, ("ttft", "latency"), ("Time to first token", "Time to last token"), strict=True):
        for policy, colour in zip(POLICIES, ("#0b7285", "#e8590c"), strict=True):
            values = sorted(pooled[policy][what])
            share = [(i + 1) / len(values) * 100 for i in range(len(values))]
            axis.step(values, share, where="post", label=policy, color=colour, linewidth=2)
        axis.set_title(title, loc="left", fontsize=11)
        axis.set_xlabel("seconds since arrival")
        axis.grid(alpha=0.25)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_xlim(left=0)
    axes[0].set_ylabel("% of requests served")
    axes[0].legend(frameon=False, loc="lower right")
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "batching.json")
    parser.add_argument("--plot", type=Path, default=record.ROOT / "docs" / "images" / "batching.png")
    options = parser.parse_args()

    from transect import LLM

    engines = {
        policy: LLM(
            options.model, batching=policy, threads=options.threads, max_num_seqs=16, num_kv_blocks=1024,
            max_num_batched_tokens=512, enable_prefix_caching=False,
        )
        for policy in POLICIES
    }  # fmt: skip
    for engine in engines.values():
        run(engine, workload(4, 1000.0, seed=99))
    work: dict[str, Any] = {}
    for rate in RATES:
        runs: dict[str, list[dict[str, Any]]] = {policy: [] for policy in POLICIES}
        for number in range(options.rounds):
            load = workload(options.requests, rate, seed=number)
            for policy in POLICIES:
                runs[policy].append(run(engines[policy], load))
        name = f"{rate:g} requests/s" if rate < 100 else "all at once"
        work[name] = {
            policy: {
                "output_tokens_per_second": record.summary([r["output_tokens_per_second"] for r in results]),
                **{
                    what: {f"p{p}": record.summary([percentile(r[what], p) for r in results]) for p in PERCENTILES}
                    for what in ("ttft", "latency")
                },
            }
            for policy, results in runs.items()
        }
        if rate == RATES[0]:
            pooled = {
                policy: {what: [t for r in results for t in r[what]] for what in ("ttft", "latency")}
                for policy, results in runs.items()
            }
    ratios = {
        name: policies["continuous"]["output_tokens_per_second"]["median"]
        / policies["static"]["output_tokens_per_second"]["median"]
        for name, policies in work.items()
    }
    result = {
        "command": "python benchmarks/engine/batching.py",
        "environment": record.environment(),
        "threads": options.threads,
        "model": options.model,
        "requests": options.requests,
        "prompt_tokens": PROMPT_TOKENS,
        "output_tokens": OUTPUT_TOKENS,
        "work": work,
        "throughput_ratio": ratios,
    }
    record.write(options.out, result)
    plot(pooled, options.plot)
    print(table(result))


if __name__ == "__main__":
    main()
