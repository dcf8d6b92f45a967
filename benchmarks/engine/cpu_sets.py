"""The C++ kernels on AVX-512 and AVX2 with several numbers of threads, as shares of the floor of each.

    python benchmarks/engine/cpu_sets.py [--threads 2,4,16] [--model qwen3-0.6b] [--quantization int4] [--out FILE]

A preset with random weights, so that no file is needed: decode of one stream, prefill of 512 tokens, and 16 streams.
Each combination runs in a process of its own, pinned to as many processors as it has threads. AVX2 is the same source
compiled with ``-mno-avx512f``, and AVX512-BF16 the same with inputs of products in bfloat16. Floors are of that
instruction set and number of threads, measured in the run: memory bandwidth, and the rate of multiply-adds, of which
AVX512-BF16 does two in an instruction. The rate of torch's bfloat16 product beside it is what AMX reaches, which the
kernels do not use. The kernels are compiled first (half a minute for each set; ``--native`` names a
compiler's cache that has them). Without a C++ compiler only the rates of torch are recorded, with the reason.

On 16 cores all of it takes about 3 minutes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.engine.cpu_work import WORK

SETS = {"native": "", "AVX512-BF16": "", "AVX2": "-mno-avx512f"}
"""Flags for the compiler, after ours."""
PAIRS = "AVX512-BF16"
"""Set that rounds inputs to bfloat16."""
FEATURES = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16")


def one(given: argparse.Namespace, threads: int) -> dict[str, Any]:
    """Measure floors and works in this process."""
    import torch

    from benchmarks.engine.cpu_work import rates_of
    from benchmarks.peers.transect import Transect
    from transect.costs.floors import Rates
    from transect.costs.model import Row, step_cost
    from transect.costs.storage import storage_for
    from transect.hardware.device import detect
    from transect.ops.cpu.ceilings import device_measurement
    from transect.ops.cpu.library import load
    from transect.ops.registry import Unavailable
    from transect.spec.shapes import PRESETS

    torch.set_num_threads(threads)
    ceilings = device_measurement(detect("cpu"), again=True).ceilings
    found: dict[str, Any] = {
        "read_bytes_per_second": ceilings.read_bytes_per_second,
        "flops_per_second": ceilings.flops_per_second,
    }
    try:
        library = load(threads, bfloat16=given.bfloat16)
        found["isa"] = PAIRS if library.bfloat16 else library.isa
    except Unavailable as reason:
        return found | {"lacks": str(reason)}
    storage, rates = storage_for(2, given.quantization, native=True), Rates.of(ceilings, "float32")
    if library.bfloat16:
        rates = replace(rates, flops_per_second=2 * rates.flops_per_second)
    floors = {}
    for work, (count, length, new) in WORK.items():
        prefill = work == "prefill"
        rows = [Row(length, length) if prefill else Row(1, length + new // 2)] * count
        costs = step_cost(PRESETS[given.model], rows, storage=storage)
        seconds = sum(rates.floor(cost).seconds for cost in costs.values())
        floors[work] = count * (length if prefill else 1) / seconds
    settings = {"load_format": "dummy", "quantization": given.quantization, "device": "cpu", "max_model_len": 1024}
    settings |= {"dtype": "bfloat16"} if given.bfloat16 else {}
    engine = Transect(given.model, threads, settings)
    return found | {"floor": floors, "rates": rates_of(engine, repeats=given.repeats), "kernels": str(engine.kernels)}


def pinned(name: str, threads: int, given: argparse.Namespace) -> dict[str, Any]:
    """Measure in a process of its own on the first ``threads`` processors; ``failed`` if it ends otherwise."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    command = [sys.executable, __file__, "--one", str(threads), "--model", given.model]
    command += ["--quantization", given.quantization, "--repeats", str(given.repeats)]
    command += ["--bfloat16"] if name == PAIRS else []
    flags = {"TRANSECT_CXXFLAGS": SETS[name]} if SETS[name] else {}
    environment = {**os.environ, **flags, "OMP_NUM_THREADS": str(threads)}
    if given.native:
        environment["TRANSECT_CACHE"] = str(given.native)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, env=environment, timeout=given.timeout,
            preexec_fn=lambda: os.sched_setaffinity(0, cores),
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"failed": f"not done after {given.timeout:.0f} s"}
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or [f"ended with {done.returncode}"]
        return {"failed": said[-1].strip()[:200]}
    result = json.loads(done.stdout.splitlines()[-1])
    result["medians"] = {work: statistics.median(values) for work, values in result.get("rates", {}).items()}
    return result


def build(name: str) -> None:
    """Compile the kernels of a set on all processors."""
    flags = {"TRANSECT_CXXFLAGS": SETS[name]} if SETS[name] else {}
    subprocess.run([sys.executable, "-m", "transect.ops.cpu.build"], env={**os.environ, **flags})


def table(result: dict[str, Any]) -> str:
    """Format tokens per second and shares of the floor."""
    names = {"decode": "one stream", "prefill": "prompt of 512", "batch": "16 streams"}
    head = " | ".join(f"{name}, tok/s | of floor" for name in names.values())
    lines = [f"| threads | instruction set | {head} | multiply-adds, GFLOP/s | torch bfloat16, GFLOP/s | GB/s |"]
    lines.append("|---|---|" + "---|---|" * len(names) + "---|---|---|")
    notes: dict[str, None] = {}
    for row in result["rows"]:
        if reason := row.get("failed") or row.get("lacks"):
            notes[f"{row['set']}, {row['threads']} threads: {reason}"] = None
        if "failed" in row:
            continue
        rates, floor, flops = row["medians"], row.get("floor", {}), row["flops_per_second"]
        cells = [f"{rates[work]:,.0f} | {rates[work] / floor[work]:.0%}" if rates else " | " for work in names]
        lines.append(
            f"| {row['threads']} | {row.get('isa', 'torch alone')} | {' | '.join(cells)} | "
            f"{flops['float32'] / 1e9:,.0f} | {flops['bfloat16'] / 1e9:,.0f} | "
            f"{row['read_bytes_per_second'] / 1e9:,.0f} |"
        )
    machine = result["environment"]
    lines += ["", *(f"* {note}" for note in notes), *([""] if notes else [])]
    lines.append(
        f"`{result['command']}` on {machine['cores']} cores of an {machine['processor']} with "
        f"{', '.join(result['features'])}, torch {machine['packages']['torch']}, {record.made_at([machine])}: "
        f"{result['model']} in {result['quantization']} with random weights."
    )
    return "\n".join(lines) + "\n"


def features() -> list[str]:
    """List the processor's instructions that matter here."""
    flags = next((line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("flags")), "")
    return [name for name in FEATURES if name in flags.split()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", default="2,4,16")
    parser.add_argument("--sets", default=",".join(SETS))
    parser.add_argument("--model", default="qwen3-0.6b", help="a preset's name")
    parser.add_argument("--quantization", default="int4")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=120, help="seconds of one process")
    parser.add_argument("--limit", type=float, default=300, help="seconds after which no process is started")
    parser.add_argument("--native", type=Path, metavar="FOLDER", help="a TRANSECT_CACHE with compiled kernels")
    parser.add_argument("--one", type=int, metavar="THREADS", help="measure in this process")
    parser.add_argument("--bfloat16", action="store_true", help="with --one: round inputs of products")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "cpu_sets.json")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(given, given.one)), flush=True)
        return
    begun = time.perf_counter()
    print("compilers:", {name: shutil.which(name) for name in ("c++", "g++", "clang++", "nvcc")}, flush=True)
    print("processor:", record.environment(())["processor"], features(), flush=True)
    result: dict[str, Any] = {
        "command": record.command("benchmarks/engine/cpu_sets.py"),
        "environment": record.environment(("torch",)),
        "features": features(),
        "model": given.model,
        "quantization": given.quantization,
        "rows": [],
    }
    for name in given.sets.split(","):
        if not given.native:
            build(name)
    for threads in map(int, given.threads.split(",")):
        for name in given.sets.split(","):
            if time.perf_counter() - begun > given.limit or threads > len(os.sched_getaffinity(0)):
                continue
            row = {"set": name, "threads": threads, **pinned(name, threads, given)}
            result["rows"].append(row)
            shown = row.get("medians") or row.get("failed") or row.get("lacks")
            print(f"{time.perf_counter() - begun:5.0f} s  {name}, {threads} threads: {shown}", flush=True)
            record.write(given.out, result)
    print(table(result))


if __name__ == "__main__":
    main()
