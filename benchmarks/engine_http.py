"""HTTP on one GPU: ``transect bench serve`` against ``transect serve``, beside the same requests without HTTP.

    python benchmarks/engine_http.py [saturation] [streams] [--out DIRECTORY]

saturation: Llama-3.1-8B's shape, 256 requests at a time, lengths uniform in 100 to 1024; output tokens per second.
streams: 64 streaming clients on Qwen3-0.6B's shape, 512 tokens in and 256 out; the gap between a client's tokens beside
the engine's steps. Random weights. First the server with its load generator, then the engine alone, each with the GPU
for itself.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

import record

WORK: dict[str, dict[str, Any]] = {
    "saturation": {"model": "llama-3.1-8b", "at_once": 256, "prompt": "uniform:100-1024", "output": "uniform:100-1024"},
    "streams": {"model": "qwen3-0.6b", "at_once": 64, "prompt": "512", "output": "256"},
}

WARM_UP = 2
"""Requests before those that count."""


@contextmanager
def server(model: str, at_once: int) -> Iterator[str]:
    """``transect serve`` for the length of the block; its URL."""
    command = [sys.executable, "-m", "transect", "serve", model, "--port", "0", "--load-format", "dummy"]
    command += ["--max-model-len", "2048", "--max-num-seqs", str(at_once), "--no-prefix-caching"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if " ready on " not in line:
                raise RuntimeError(f"the server did not start: {line}")
            print(line.strip(), flush=True)
            yield line.split(" ready on ")[1].split()[0]
        finally:
            process.terminate()


def over_http(url: str, work: dict[str, Any], folder: Path) -> dict[str, Any]:
    """What ``transect bench serve`` reports."""
    path = folder / "level.json"
    command = [sys.executable, "-m", "transect", "bench", "serve", "--url", url, "--temperature", "0.6"]
    command += ["--warm-up", str(WARM_UP), "--concurrency", str(work["at_once"]), "--requests", str(work["at_once"])]
    command += ["--json", str(path), "--prompt-tokens", work["prompt"], "--output-tokens", work["output"]]
    subprocess.run(command, check=True, timeout=120)
    return json.loads(path.read_text())["levels"][0]


def alone(work: dict[str, Any]) -> dict[str, Any]:
    """The same requests given to ``LLM`` at once: tokens per second, and each sequence's gaps between tokens."""
    from transect.bench.lengths import Lengths
    from transect.bench.load_test import WorkSource
    from transect.bench.summary import distribution
    from transect.engine.llm import LLM
    from transect.engine.sampling_params import SamplingParams

    source = WorkSource(Lengths.parse(work["prompt"]), Lengths.parse(work["output"]))
    llm = LLM(
        work["model"],
        load_format="dummy",
        max_model_len=2048,
        max_num_seqs=work["at_once"],
        enable_prefix_caching=False,
        seed=0,
    )
    given = source.draw(work["at_once"], f"concurrency {work['at_once']}")
    result: dict[str, Any] = {}
    for drawn in (source.draw(WARM_UP, "warm-up"), given):
        last: dict[str, float] = {}
        gaps: list[float] = []
        start = time.perf_counter()
        for each in drawn:
            llm.submit(each.prompt, SamplingParams(max_tokens=each.output_tokens, temperature=0.6, ignore_eos=True))
        while llm.has_work:
            outputs = llm.step()
            now = time.perf_counter()
            for output in outputs:
                if output.request_id in last:
                    gaps.append(now - last[output.request_id])
                last[output.request_id] = now
        seconds = time.perf_counter() - start
        tokens = sum(each.output_tokens for each in drawn)
        result = {"output_tokens_per_second": tokens / seconds, "itl": distribution(gaps)}
    del llm
    gc.collect()
    torch.cuda.empty_cache()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(WORK)}; default: all")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "h200")
    options = parser.parse_args()
    path = options.out / "engine_http.json"
    for name in options.names or WORK:
        work = WORK[name]
        try:
            with tempfile.TemporaryDirectory() as folder, server(work["model"], work["at_once"]) as url:
                http = over_http(url, work, Path(folder))
            offline = alone(work)
        except Exception:
            traceback.print_exc()
            continue
        ratio = http["output_tokens_per_second"] / offline["output_tokens_per_second"]
        kept = json.loads(path.read_text()) if path.exists() else {"work": {}}
        kept["command"] = "python benchmarks/engine_http.py"
        kept["environment"] = record.environment(("torch", "triton"))
        kept["gpu"] = torch.cuda.get_device_name()
        kept["work"][name] = {**work, "http": http, "offline": offline, "ratio": ratio}
        record.write(path, kept)
        gaps = ", ".join(
            f"{way} gap p50 {each['itl']['p50'] * 1e3:.2f} ms, p99 {each['itl']['p99'] * 1e3:.2f}"
            for way, each in (("HTTP", http), ("alone", offline))
        )
        print(
            f"{name}: HTTP {http['output_tokens_per_second']:.0f} tok/s, alone "
            f"{offline['output_tokens_per_second']:.0f}, {ratio:.1%}; {gaps}",
            flush=True,
        )


if __name__ == "__main__":
    main()
