"""Measure the time from the start of ``transect serve`` to its first token over HTTP, on a CPU.

The model is on the disk and the CPU kernels are compiled, as after ``make setup`` and ``transect pull``. Each run
starts a new server, waits for its ready line, sends one chat, and stops the clock at the first token with text.

    python benchmarks/server/first_answer.py [--runs 5] [--model smollm2-135m]
"""

from __future__ import annotations

import argparse
import json
import time

import httpx

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.server.http_vs_offline import server

QUESTION = "What is the capital of France?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--model", default="smollm2-135m")
    arguments = parser.parse_args()
    ready, first = [], []
    for _ in range(arguments.runs):
        began = time.perf_counter()
        with server(arguments.model, []) as url:
            ready.append(time.perf_counter() - began)
            wait_for_text(url, arguments.model)
            first.append(time.perf_counter() - began)
    result = {
        "command": "python benchmarks/server/first_answer.py",
        "environment": record.environment(),
        "model": arguments.model,
        "ready_s": record.summary(ready),
        "first_token_s": record.summary(first),
    }
    record.write(record.RESULTS / "cpu" / "first_answer.json", result)
    print(json.dumps({name: result[name] for name in ("ready_s", "first_token_s")}, indent=2))


def wait_for_text(url: str, model: str) -> None:
    """Send one chat and return at its first token with text.

    Raises:
        RuntimeError: the stream ended without text.
    """
    body = {"model": model, "stream": True, "max_tokens": 8, "messages": [{"role": "user", "content": QUESTION}]}
    with httpx.stream("POST", f"{url}/v1/chat/completions", json=body, timeout=120) as answer:
        answer.raise_for_status()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                choices = json.loads(line.removeprefix("data: "))["choices"]
                if choices and choices[0]["delta"].get("content"):
                    return
    raise RuntimeError(f"{url} sent no text")


if __name__ == "__main__":
    main()
