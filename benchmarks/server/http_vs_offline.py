"""Cost of HTTP: the same requests through ``transect serve`` and directly through the engine, alternately.

All requests are there from the start, streamed over HTTP to a load generator on the same machine. The server, the load
generator and the engine share its cores, as they would on a small machine.

    python benchmarks/server/http_vs_offline.py [--streams 64] [--rounds 5] [--model smollm2-135m]
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record


def table(result: dict[str, Any]) -> str:
    """Format one row for each way."""
    http, offline = result["http"], result["offline"]
    lines = ["| program | output tok/s | TTFT p50 | p99 | ITL p50 | p99 |", "|---|---|---|---|---|---|"]
    lines.append(f"| engine alone | {offline['output_tokens_per_second']['median']:.0f} | | | | |")
    latencies = " | ".join(
        f"{http[what][share]['median'] * 1e3:.0f} ms" for what in ("ttft", "itl") for share in ("p50", "p99")
    )
    lines.append(
        f"| HTTP, {result['streams']} streams | {http['output_tokens_per_second']['median']:.0f} | {latencies} |"
    )
    ratio = result["ratio"]
    lines.append(
        f"\nHTTP reaches {ratio['median']:.0%} of the engine alone ({ratio['min']:.0%} to {ratio['max']:.0%})."
    )
    return "\n".join(lines)


@contextmanager
def server(model: str, arguments: list[str]) -> Iterator[str]:
    """Run ``transect serve`` for the length of the block; yields its URL."""
    command = [sys.executable, "-m", "transect", "serve", model, "--port", "0", *arguments]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split(" ready on ")[1].split()[0]
        finally:
            process.terminate()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--streams", type=int, default=64)
    parser.add_argument("--shortest", type=int, default=8, help="tokens of a prompt, and of an output")
    parser.add_argument("--longest", type=int, default=24)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "http.json")
    options = parser.parse_args()

    from transect import LLM
    from transect.bench.load import Run, closed_loop
    from transect.bench.offline import run_all
    from transect.bench.summary import summarize
    from transect.bench.target import Target
    from transect.bench.workload import throughput_protocol

    tokens = options.streams * 2 * options.longest
    settings: dict[str, Any] = {
        "max_num_seqs": options.streams,
        "max_model_len": 2 * options.longest,
        "kv_cache_tokens": tokens,
        "threads": options.threads,
        "load_format": options.load_format,
    }
    engine = LLM(options.model, enable_prefix_caching=False, **settings)
    work = throughput_protocol(options.streams, options.shortest, options.longest, highest=engine.vocab_size - 1)
    tokens_out = sum(each.output_tokens for each in work)
    arguments = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    offline: list[float] = []
    online: list[dict[str, Any]] = []
    with server(options.model, [*arguments, "--no-prefix-caching"]) as url:
        target = Target(url, options.model, temperature=0.6)

        def over_http() -> Run:
            return asyncio.run(closed_loop(target, work, options.streams))

        over_http()
        run_all(engine, work[:8])
        for _ in range(options.rounds):
            online.append(summarize(over_http()))
            offline.append(tokens_out / run_all(engine, work)[0])
    rates = [level["output_tokens_per_second"] for level in online]
    result = {
        "command": "python benchmarks/server/http_vs_offline.py",
        "environment": record.environment(),
        "model": options.model,
        "kernels": engine.kernels,
        "streams": options.streams,
        "tokens": [options.shortest, options.longest],
        "offline": {"output_tokens_per_second": record.summary(offline)},
        "http": {
            "output_tokens_per_second": record.summary(rates),
            **{
                what: {share: record.summary([level[what][share] for level in online]) for share in ("p50", "p99")}
                for what in ("ttft", "itl")
            },
            "errors": [level["errors"] for level in online],
            "generator_cpu": record.summary([level["generator"]["cpu"] for level in online]),
        },
        "ratio": record.summary([http / alone for http, alone in zip(rates, offline, strict=True)]),
    }
    record.write(options.out, result)
    print(table(result))


if __name__ == "__main__":
    main()
