"""Memory-bound operators on a GPU: accuracy at small shapes, time at real ones, a search of the knobs; JSON out.

python benchmarks/ops_memory_bound.py OUT.json [--tune] [--ops NAME ...]
"""

from __future__ import annotations

import argparse
import json
import subprocess
import time
from dataclasses import asdict
from pathlib import Path

import torch
import triton

from record import commit
from transect.hardware import gpu
from transect.ops import tuning
from transect.ops.registry import all_ops
from transect.ops.tools.accuracy import check
from transect.ops.tools.bench import bench_case
from transect.ops.tools.search import search, worth

OPS = ("vector_add", "sum", "dot", "gelu", "swiglu", "softmax", "rms_norm", "layer_norm")
HALF_AND_FULL = (torch.bfloat16, torch.float16, torch.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--ops", nargs="+", default=OPS)
    parser.add_argument("--commit", default=None, help="recorded when the machine has no git history")
    options = parser.parse_args()
    started = time.time()
    ceilings = gpu.measure()
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    result: dict = {
        "command": "python benchmarks/ops_memory_bound.py OUT.json" + (" --tune" if options.tune else ""),
        "device": ceilings.device,
        "driver": subprocess.run(query, capture_output=True, text=True).stdout.strip(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "commit": options.commit or commit(),
        "ceilings": {**asdict(ceilings), "launch_seconds": gpu.launch_seconds()},
        "accuracy": [],
        "timings": [],
        "tuning": [],
        "failures": [],
    }
    print(ceilings, flush=True)

    def save() -> None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")

    registry = {op.name: op for op in all_ops()}
    for name in options.ops:
        op = registry[name]
        for dtype in HALF_AND_FULL:
            try:
                findings = list(check(op, op.implementations["triton"], dtype, "cuda"))
            except Exception as error:  # a benchmark of many operators: the rest still runs, the failure is recorded
                result["failures"].append(f"accuracy {name} {dtype}: {type(error).__name__} {error}")
                print(result["failures"][-1][:600], flush=True)
                continue
            bad = [finding for finding in findings if not finding.passed]
            worst = max(finding.error / finding.allowed for finding in findings if finding.allowed)
            row = {"op": name, "dtype": str(dtype), "checks": len(findings), "failed": len(bad), "worst": worst}
            result["accuracy"].append(row)
            print(f"{name:12} {dtype!s:15} {len(findings)} checks, worst {worst:.2f} of allowed", bad[:3], flush=True)
        for case in op.cases():
            try:
                for timing in bench_case(op, case, ceilings):
                    result["timings"].append({**asdict(timing), "of_floor": timing.of_floor})
                    print(
                        f"{name} {case.name:43} {timing.direction:8} {timing.contender:6} {timing.seconds * 1e6:8.1f}"
                        f" us {timing.bytes / timing.seconds / 1e12:5.2f} TB/s {timing.of_floor:6.1%} of floor",
                        flush=True,
                    )
            except Exception as error:
                result["failures"].append(f"time {name} {case.name}: {type(error).__name__} {error}")
                print(result["failures"][-1][:600], flush=True)
            torch.cuda.empty_cache()
        if options.tune:
            for knobs in op.knobs:
                for case in op.cases():
                    try:
                        size, trials = search(knobs, case)
                    except Exception as error:
                        result["failures"].append(f"tune {knobs.name} {case.name}: {type(error).__name__} {error}")
                        print(result["failures"][-1][:600], flush=True)
                        continue
                    best = trials[0]
                    row = {"launcher": knobs.name, "case": case.name, "bucket": tuning.bucket(size)}
                    row |= {"best": best.config, "seconds": best.seconds, "worth": worth(trials), "trials": len(trials)}
                    result["tuning"].append(row)
                    print("tune", row, flush=True)
                    torch.cuda.empty_cache()
        save()
    save()
    print(f"{time.time() - started:.0f} s")


if __name__ == "__main__":
    main()
