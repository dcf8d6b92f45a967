"""Bounds of a kernel: Nsight Compute's counters of one launch at each named case of an operator, as a small JSON.

    python benchmarks/ops/profile_kernel.py OUT.json --op flash_attention --implementation hopper --kernel
    forward_kernel \
        [--case "16 heads of 128, 4 x 4096, causal" ...]

Needs ``ncu`` on the PATH and the right to read counters. Clocks are left as they are. The profiler runs a kernel
several times, apart from what surrounds it: read shares from here, and times from ``transect bench ops``.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

import _paths  # noqa: F401
from benchmarks.record import environment, write
from transect.ops.registry import all_ops, get

SECTIONS = ("SpeedOfLight", "WarpStateStats", "LaunchStats", "Occupancy", "ComputeWorkloadAnalysis")
SHARES = {
    "tensor_pipe_active": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed",
    "exponential_unit": "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_elapsed",
    "issue_slots": "sm__issue_active.avg.pct_of_peak_sustained_elapsed",
    "memory": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "l2": "lts__throughput.avg.pct_of_peak_sustained_elapsed",
}
COUNTS = {
    "time_ns": "gpu__time_duration.sum",
    "registers_at_launch": "launch__registers_per_thread",
    "threads": "launch__block_size",
    "programs": "launch__grid_size",
    "shared_bytes": "launch__shared_mem_per_block",
    "programs_per_multiprocessor": "launch__occupancy_limit_shared_mem",
}
STALL, SUFFIX = "smsp__average_warps_issue_stalled_", "_per_issue_active.ratio"


def run_once(op: str, implementation: str, case_name: str) -> None:
    """Run the child that ncu watches: one call to warm up (and compile), one to look at."""
    all_ops()
    found = get(op)
    case = next(case for case in found.cases() if case.name == case_name)
    call = found.implementations[implementation].load()
    inputs = case.make(torch.device("cuda"), 0)
    for _ in range(2):
        call(**inputs)
        torch.cuda.synchronize()


def number(text: str) -> float | None:
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    return int(value) if value.is_integer() else value


def profile(options: argparse.Namespace, case_name: str) -> dict[str, Any]:
    """Read the counters of the second launch of the kernel at a case."""
    child = [sys.executable, __file__, str(options.out), "--op", options.op, "--implementation", options.implementation]
    child += ["--kernel", options.kernel, "--child", case_name]
    command = ["ncu", "--clock-control", "none", "-k", f"regex:{options.kernel}", "-s", "1", "-c", "1", "--csv"]
    command += ["--page", "raw", *(part for name in SECTIONS for part in ("--section", name))]
    done = subprocess.run([*command, *child], capture_output=True, text=True)
    rows = list(csv.reader(line for line in done.stdout.splitlines() if line.startswith('"')))
    if len(rows) < 3:
        raise RuntimeError(f"ncu saw no kernel {options.kernel!r}:\n{done.stdout[-1000:]}{done.stderr[-1000:]}")
    seen = dict(zip(rows[0], rows[2], strict=True))
    stalls = {n[len(STALL) : -len(SUFFIX)]: number(v) for n, v in seen.items() if n.startswith(STALL)}
    worst = sorted(((v, n) for n, v in stalls.items() if v), reverse=True)[:8]
    return {
        "case": case_name,
        "kernel": seen["Kernel Name"],
        **{name: number(seen[key]) for name, key in COUNTS.items() if key in seen},
        "percent_of_peak": {name: number(seen[key]) for name, key in SHARES.items() if key in seen},
        "warps_waiting_per_issue": {name: value for value, name in worst},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--op", required=True)
    parser.add_argument("--implementation", required=True)
    parser.add_argument("--kernel", required=True, help="a regular expression for the kernel's name")
    parser.add_argument("--case", action="append", help="name of a case; all where none is given")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        run_once(options.op, options.implementation, options.child)
        return
    all_ops()
    names = options.case or [case.name for case in get(options.op).cases()]
    found = [profile(options, name) for name in names]
    method = "ncu --clock-control none, one launch after a warm-up; percentages of the peak over the elapsed cycles"
    write(
        options.out,
        {
            "environment": environment(("torch", "triton")),
            "gpu": torch.cuda.get_device_name(),
            "op": options.op,
            "method": method,
            "profiles": found,
        },
    )


if __name__ == "__main__":
    main()
