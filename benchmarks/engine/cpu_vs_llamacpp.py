"""Transect against llama.cpp on this machine's processor: the same GGUF file, the same threads, rounds in turn.

Three pieces of work, each with random prompt tokens and greedy decoding to a fixed length:

* decode    one stream after 512 tokens of context, tokens per second
* prefill   one prompt of 512 tokens, tokens per second
* batch     16 streams decoding together after 128 tokens each, tokens per second in all

llama.cpp runs through its C interface with every setting of ``peers/llamacpp.py``; the best median of each figure
counts. Transect runs its whole engine: scheduler, paged cache and sampler. Each round measures both, in processes of
their own, so that the ratios come from the same minutes of the machine; the ratio is the median of the rounds' ratios.

    python benchmarks/engine/cpu_vs_llamacpp.py [--rounds 5] [--threads 2] [--model smollm2-135m]
    python benchmarks/engine/cpu_vs_llamacpp.py --formats q4_0,q8_0,q4_k_m,q6_k --rounds 2 --seconds 660

With ``--formats`` the model is written in each of them by ``transect quantize`` first, and both sides read that file;
the settings of llama.cpp are tried on the first one. A format that would begin after ``--seconds`` is left out.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.engine.cpu_work import WORK


def measure(side: str, options: argparse.Namespace, settings: dict[str, Any] | None = None) -> dict[str, Any]:
    """Measure one side, a file of ``benchmarks/peers``, in a process of its own: its medians and peak memory."""
    path = options.model
    if side == "llamacpp":
        from transect.checkpoints.resolve import resolve

        path = str(resolve(options.model).path)
    command = [sys.executable, str(Path(__file__).with_name("cpu_work.py")), side, path]
    command += ["--threads", str(options.threads), "--settings", json.dumps(settings or {})]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    )
    if done.returncode:
        raise SystemExit(f"{side} failed:\n{done.stderr}")
    result = json.loads(done.stdout.splitlines()[-1])
    result["medians"] = {work: statistics.median(values) for work, values in result["rates"].items()}
    return result


def floors(model: str, threads: int, works: Mapping[str, tuple[int, int, int]] = WORK) -> dict[str, float]:
    """Compute the most tokens per second that the measured memory bandwidth and multiply-add rate allow."""
    import torch

    from transect.checkpoints.resolve import resolve
    from transect.costs.floors import Rates
    from transect.costs.model import Row, step_cost
    from transect.hardware.device import detect
    from transect.ops.cpu.ceilings import device_measurement

    torch.set_num_threads(threads)
    machine = device_measurement(detect("cpu")).ceilings
    source = resolve(model)
    rates = {}
    for work, (count, length, new) in works.items():
        prefill = work == "prefill"
        rows = [Row(length, length) if prefill else Row(1, length + new // 2)] * count
        costs = step_cost(source.config, rows, storage=storage(source))
        seconds = sum(Rates.of(machine, "float32").floor(cost).seconds for cost in costs.values())
        rates[work] = count * (length if prefill else 1) / seconds
    return rates


def storage(source: Any) -> Any:
    """Return the bits per weight of the GGUF file; float32 activations, K and V in bfloat16."""
    from transect.costs.storage import Storage

    tensors = source.gguf.tensors
    table = tensors["token_embd.weight"]
    layers = [t for name, t in tensors.items() if name.startswith("blk.") and len(t.shape) == 2]
    linear = 8 * sum(t.nbytes for t in layers) / sum(t.shape[0] * t.shape[1] for t in layers)
    embed = 8 * table.nbytes / (table.shape[0] * table.shape[1])
    return Storage(linear=linear, embed=embed, head=embed, norm=32, activation=32, kv=16)


def table(result: dict[str, Any]) -> str:
    lines = [
        "| work | Transect tok/s | llama.cpp tok/s | ratio (min to max) | floor tok/s | of floor |",
        "|---|---|---|---|---|---|",
    ]
    for work, row in result["work"].items():
        ratio = row["ratio"]
        lines.append(
            f"| {work} | {row['transect']['median']:.0f} | {row['llamacpp']['median']:.0f} | "
            f"{ratio['median']:.2f}x ({ratio['min']:.2f} to {ratio['max']:.2f}) | {row['floor']:.0f} | "
            f"{row['transect']['median'] / row['floor']:.0%} |"
        )
    memory = result["peak_memory_bytes"]
    lines.append(
        f"\npeak memory: Transect {memory['transect'] / 2**20:.0f} MiB, llama.cpp {memory['llamacpp'] / 2**20:.0f} MiB"
    )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--formats", help="such as q4_0,q8_0,q4_k_m,q6_k: the model written in each of them")
    parser.add_argument("--seconds", type=float, default=660, help="--formats: no format begins after that")
    options = parser.parse_args()
    name = "llamacpp_formats.json" if options.formats else "llamacpp.json"
    options.out = options.out or record.RESULTS / "cpu" / name
    if options.formats:
        write_formats(options)
        return
    best = best_settings(options)
    result = {
        "command": "python benchmarks/engine/cpu_vs_llamacpp.py",
        "environment": record.environment(("torch", "numpy", "llama-cpp-python")),
        "threads": options.threads,
        "model": options.model,
        "llamacpp_settings": best,
        **compare(options, best),
    }
    record.write(options.out, result)
    print(table(result))


def best_settings(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Find the settings of llama.cpp with the best median for each piece of work."""
    from benchmarks.peers.llamacpp import SETTINGS

    tried = [(settings, measure("llamacpp", options, settings)["medians"]) for settings in SETTINGS]
    best = {work: max(tried, key=lambda entry: entry[1][work])[0] for work in WORK}
    print("llama.cpp's best settings:", best, file=sys.stderr)
    return best


def compare(options: argparse.Namespace, best: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Run rounds alternately on one file."""
    chosen = [settings for number, settings in enumerate(best.values()) if settings not in list(best.values())[:number]]
    rounds = []
    for number in range(options.rounds):
        ours = measure("transect", options)
        theirs = [(settings, measure("llamacpp", options, settings)) for settings in chosen]
        peer = {work: max(r["medians"][work] for s, r in theirs if s == best[work]) for work in WORK}
        memory = min(r["peak_memory_bytes"] for _, r in theirs)
        rounds.append((ours, peer, memory))
        print(f"round {number + 1}:", {w: round(ours["medians"][w] / peer[w], 2) for w in WORK}, file=sys.stderr)
    bounds = floors(options.model, options.threads)
    return {
        "kernels": rounds[0][0]["kernels"],
        "work": {
            work: {
                "transect": record.summary([ours["medians"][work] for ours, _, _ in rounds]),
                "llamacpp": record.summary([peer[work] for _, peer, _ in rounds]),
                "ratio": record.summary([ours["medians"][work] / peer[work] for ours, peer, _ in rounds]),
                "floor": bounds[work],
            }
            for work in WORK
        },
        "peak_memory_bytes": {
            "transect": statistics.median(ours["peak_memory_bytes"] for ours, _, _ in rounds),
            "llamacpp": statistics.median(memory for _, _, memory in rounds),
        },
    }


def write_formats(options: argparse.Namespace) -> None:
    """Write one result file of several formats of a model."""
    from transect.train.export.quantize import quantize_model
    from transect.train.export.write import opened

    began, found, left_out = time.perf_counter(), {}, []
    best: dict[str, dict[str, Any]] | None = None
    model = options.model
    with tempfile.TemporaryDirectory() as folder:
        for name in options.formats.split(","):
            if time.perf_counter() - began > options.seconds:
                left_out.append(name)
                continue
            options.model = str(Path(folder) / f"{name}.gguf")
            quantize_model(opened(model), Path(options.model), name)
            best = best or best_settings(options)
            print(name, file=sys.stderr)
            found[name] = compare(options, best)
    result = {
        "command": f"python benchmarks/engine/cpu_vs_llamacpp.py --formats {options.formats} --rounds {options.rounds}",
        "environment": record.environment(("torch", "numpy", "llama-cpp-python")),
        "threads": options.threads,
        "model": model,
        "llamacpp_settings": best,
        "formats": found,
        "left_out": left_out,
    }
    record.write(options.out, result)
    print(format_table(result))


def format_table(result: dict[str, Any]) -> str:
    """Format the ratios to llama.cpp by format, with Transect's rates and their share of the floor."""
    lines = ["| file | " + " | ".join(WORK) + " |", "|---|" + "---|" * len(WORK)]
    for name, each in result["formats"].items():
        cells = []
        for row in each["work"].values():
            ratio, rate = row["ratio"], row["transect"]["median"]
            share = f"{rate / row['floor']:.0%} of the floor"
            cells.append(
                f"{ratio['median']:.2f}x ({ratio['min']:.2f} to {ratio['max']:.2f}), {rate:.0f} tok/s, {share}"
            )
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    machine = result["environment"]
    lines += ["", f"`{result['command']}` on {machine['processor']}, {record.made_at([machine])}."]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
