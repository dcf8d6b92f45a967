"""HTTP on one GPU: ``transect bench serve`` against ``transect serve``, beside the same requests without HTTP.

    python benchmarks/server/http_gpu.py [saturation] [streams] [--out DIRECTORY] [--beside FILE]

saturation: Llama-3.1-8B's shape and the 256 requests of the throughput protocol, all at once; output tokens per second.
streams: 64 streaming clients on Qwen3-0.6B's shape, 512 tokens in and 256 out; the gap between a client's tokens beside
the engine's steps. Random weights. First the server with its load generator, then the engine alone, each with the GPU
for itself. ``--beside`` takes the engine alone from a file that ``engine/gpu.py`` has just written with these sources.
"""

from __future__ import annotations

import argparse
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

import _paths  # noqa: F401
from benchmarks import record
from transect.bench.lengths import Lengths
from transect.bench.levels import WorkSource
from transect.bench.summary import distribution
from transect.bench.workload import Work, throughput_protocol
from transect.engine.frontends.llm import LLM
from transect.engine.scheduling.sampling_params import SamplingParams

MODELS = {"saturation": ("llama-3.1-8b", 256), "streams": ("qwen3-0.6b", 64)}
"""Shape, and requests under way."""
WARM_UP = 2
"""Requests before those that count."""


@contextmanager
def server(model: str, at_once: int) -> Iterator[tuple[str, float]]:
    """Run ``transect serve`` for the length of the block; yields its URL, and the seconds until it was ready."""
    start = time.perf_counter()
    command = [sys.executable, "-m", "transect", "serve", model, "--port", "0", "--load-format", "dummy"]
    command += ["--max-model-len", "2048", "--max-num-seqs", str(at_once), "--no-prefix-caching"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if " ready on " not in line:
                raise RuntimeError(f"the server did not start: {line}")
            print(line.strip(), flush=True)
            yield line.split(" ready on ")[1].split()[0], time.perf_counter() - start
        finally:
            process.terminate()


def requests(name: str) -> list[Work]:
    """Generate the requests."""
    if name == "saturation":
        return throughput_protocol()
    source = WorkSource(Lengths.parse("512"), Lengths.parse("256"))
    return source.draw(MODELS[name][1], "clients")


def over_http(url: str, work: list[Work], folder: Path) -> dict[str, Any]:
    """Measure these requests by ``transect bench serve``, all sent at once."""
    trace, report = folder / "trace.jsonl", folder / "report.json"
    lines = [{"arrival_s": 0.0, "prompt_token_ids": each.prompt, "output_tokens": each.output_tokens} for each in work]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = [sys.executable, "-m", "transect", "bench", "serve", "--url", url, "--temperature", "0.6"]
    command += ["--trace", str(trace), "--warm-up", str(WARM_UP), "--json", str(report)]
    subprocess.run(command, check=True, timeout=120)
    return json.loads(report.read_text())["levels"][0]


def alone(name: str) -> dict[str, Any]:
    """Measure the same requests given to ``LLM`` at once: tokens per second, and each sequence's gaps between
    tokens."""
    model, at_once = MODELS[name]
    llm = LLM(model, load_format="dummy", max_model_len=2048, max_num_seqs=at_once, enable_prefix_caching=False, seed=0)
    result: dict[str, Any] = {}
    for drawn in (requests(name)[:WARM_UP], requests(name)):
        last: dict[str, float] = {}
        gaps: list[float] = []
        start = time.perf_counter()
        for each in drawn:
            params = SamplingParams(max_tokens=each.output_tokens, temperature=0.6, ignore_eos=True)
            llm.submit(each.prompt, params)
        while llm.has_work:
            outputs = llm.step()
            now = time.perf_counter()
            for output in outputs:
                if output.request_id in last:
                    gaps.append(now - last[output.request_id])
                last[output.request_id] = now
        tokens = sum(each.output_tokens for each in drawn)
        rate = tokens / (time.perf_counter() - start)
        result = {"output_tokens_per_second": rate, "itl": distribution(gaps)}
    return result


def beside(path: Path) -> dict[str, Any]:
    """Read the throughput protocol as measured by ``engine/gpu.py``.

    Raises:
        ValueError: with other sources than these.
    """
    section = json.loads(path.read_text())["sections"]["throughput"]
    if section["commit"] != record.commit():
        raise ValueError(f"{path} was measured at commit {section['commit']}, this is {record.commit()}: leave it out")
    return {"output_tokens_per_second": section["result"]["tokens_per_s"], "itl": None}


def gaps(level: dict[str, Any]) -> str:
    """Format gaps for a reader."""
    return "" if level["itl"] is None else ", ".join(f"{p} {level['itl'][p] * 1e3:.2f} ms" for p in ("p50", "p99"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"of {', '.join(MODELS)}; default: all")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "h200")
    parser.add_argument("--beside", type=Path, help="for saturation: engine_llama-3.1-8b.json of the same sources")
    options = parser.parse_args()
    path = options.out / "engine_http.json"
    for name in options.names or MODELS:
        model, at_once = MODELS[name]
        work = requests(name)
        try:
            with tempfile.TemporaryDirectory() as folder, server(model, at_once) as (url, ready_s):
                http = over_http(url, work, Path(folder))
            offline = beside(options.beside) if options.beside and name == "saturation" else alone(name)
        except Exception:
            traceback.print_exc()
            continue
        ratio = http["output_tokens_per_second"] / offline["output_tokens_per_second"]
        kept = json.loads(path.read_text()) if path.exists() else {"work": {}}
        kept["command"] = "python benchmarks/server/http_gpu.py"
        kept["environment"] = record.environment(("torch", "triton"))
        kept["gpu"] = torch.cuda.get_device_name()
        result = {"model": model, "at_once": at_once, "ready_s": ready_s, "http": http, "offline": offline}
        version = kept["environment"]["version"]
        kept["work"][name] = {**result, "commit": record.commit(), "version": version, "ratio": ratio}
        record.write(path, kept)
        print(
            f"{name}: HTTP {http['output_tokens_per_second']:.0f} tok/s, alone "
            f"{offline['output_tokens_per_second']:.0f}, {ratio:.1%}; gaps {gaps(http)}; alone {gaps(offline)}",
            flush=True,
        )


if __name__ == "__main__":
    main()
