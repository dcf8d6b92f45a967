"""Scheduler cycles of a product on the tensor cores on Hopper, alone and beside other instructions.

    python benchmarks/ops/issue_rates.py OUT.json

Builds ``issue_rates.cu`` with nvcc and runs it. A multiprocessor has four schedulers, each issues one instruction a
cycle at most. ``mma.sync`` multiplies 16 x 8 x 16 bfloat16 for a warp; with one, two and three warps for each
scheduler, and after each product some other instructions that do not wait for it. ``wgmma`` multiplies 64 x 16 x 16 for
four warps, the work of two such products on every scheduler.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import torch

import _paths  # noqa: F401
from benchmarks import record
from transect.ops.lang.cuda_build import find_nvcc

SOURCE = Path(__file__).with_suffix(".cu")


def measure() -> list[dict[str, Any]]:
    """Measure rows of (beside, more, warps, cycles)."""
    with tempfile.TemporaryDirectory() as folder:
        program = f"{folder}/issue_rates"
        code = "-gencode=arch=compute_90a,code=sm_90a"
        subprocess.run([find_nvcc(), "-O3", "-std=c++17", code, "-o", program, str(SOURCE)], check=True)
        printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    rows = [line.split(",") for line in printed.splitlines()]
    return [{"beside": b, "more": int(n), "warps": int(w), "cycles": float(cycles)} for b, n, w, cycles in rows]


def table(result: dict[str, Any]) -> str:
    """Format a line for each kind and number of other instructions, and their origin."""
    found = {(row["beside"], row["more"], row["warps"]): row["cycles"] for row in result["rows"]}
    lines = [
        "| cycles of a scheduler for | 1 warp on it | 2 warps | 3 warps |",
        "|---|---|---|---|",
    ]
    for name, more in dict.fromkeys((row["beside"], row["more"]) for row in result["rows"]):
        if name.endswith(" alone"):
            what = f"{more} {name.removesuffix(' alone')}, no product"
        elif more:
            what = f"a product of `mma.sync` and {more} {name}"
        else:
            what = f"a product of `{name.split()[0]}`{name.removeprefix(name.split()[0])}"
        cells = (f"{found[name, more, warps]:.1f}" if (name, more, warps) in found else "" for warps in (1, 2, 3))
        lines.append(f"| {what} | " + " | ".join(cells) + " |")
    made_at = record.made_at([result["environment"]])
    return "\n".join(lines) + (
        f"\n\n`python benchmarks/ops/issue_rates.py` on one {result['gpu']}, {made_at}; {result['method']}.\n"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    given = parser.parse_args()
    result: dict[str, Any] = {"environment": record.environment(("torch",)), "gpu": torch.cuda.get_device_name()}
    result["method"] = "the slowest warp of a block, third run of each kernel"
    result["rows"] = measure()
    record.write(given.out, result)
    print(table(result))


if __name__ == "__main__":
    main()
