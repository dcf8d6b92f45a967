"""Cut every request of random workloads after each of its tokens, continue it elsewhere, and compare the whole answer.

    python benchmarks/checks/continuations.py [--workloads 100000] [--runs 1000] [--minutes 30] [--out FILE]

A workload runs the shipping scheduler on a device that knows every token and every slot of the cache
(``tests/helpers/kv_checker.py``): each of its requests comes whole, and again with any number of its tokens known, into
an engine with other work, chunks, blocks and memory. A run does so with the CPU's runner and a small model, and
compares log-probabilities to the bit (``tests/helpers/continued_runs.py``). Writes
benchmarks/results/cpu/continuations.json every few seconds, and continues the counts of a file that is there. An answer
that differs ends the program with an error, and prints the workload.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch

import _paths  # noqa: F401
from benchmarks import record

sys.path.insert(0, str(record.ROOT / "tests" / "helpers"))

from continuations import continuations
from continued_runs import check_cuts
from engine_workloads import Workload, run, workloads
from hypothesis import HealthCheck, Phase, given, seed, settings

KINDS: dict[str, dict[str, Any]] = {
    "tokens at once": {"lag": 0},
    "tokens one step late": {"lag": 1},
    "little memory": {"lag": 1, "storm": True},
    "static batches": {"lag": 0, "batching": "static"},
    "a pipeline": {"lag": 2, "depth": 3},
    "steps that raise": {"lag": 1, "breaking": True},
}
"""Arguments of ``engine_workloads.workloads``."""
AT_ONCE, RUNS_AT_ONCE = 20, 1
"""Workloads and runs between two looks at the clock."""


def workloads_of(kind: str, number: int) -> tuple[int, int]:
    """Run ``AT_ONCE`` workloads of a kind; ``number`` is their seed. Returns their number and that of the continued
    requests."""
    counts = [0, 0]

    @seed(number)
    @settings(
        max_examples=AT_ONCE,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
        print_blob=True,
    )
    @given(continuations(workloads(**KINDS[kind])))
    def check(workload: Workload) -> None:
        counts[0] += 1
        counts[1] += sum(arrival.begun is not None for arrival in workload.arrivals)
        run(workload)

    check()
    return counts[0], counts[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=1e9)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "continuations.json")
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "command": "python benchmarks/checks/continuations.py",
        "sessions": [],
        "batches": 0,
        "workloads": 0,
        "continued": 0,
        "runs": 0,
        "continued_in_runs": 0,
        "differing": 0,
    }
    if arguments.out.exists():
        result = json.loads(arguments.out.read_text())
    result["sessions"].append(record.environment())
    torch.set_num_threads(1)  # two would wait for each other on a machine with other work
    until = time.monotonic() + 60 * arguments.minutes
    while time.monotonic() < until and (result["workloads"] < arguments.workloads or result["runs"] < arguments.runs):
        if result["workloads"] < arguments.workloads:
            kind = list(KINDS)[result["batches"] % len(KINDS)]
            count, continued = workloads_of(kind, result["batches"])
            result["batches"] += 1
            result["workloads"] += count
            result["continued"] += continued
        for _ in range(RUNS_AT_ONCE):
            if result["runs"] < arguments.runs:
                result["continued_in_runs"] += check_cuts(result["runs"])
                result["runs"] += 1
        record.write(arguments.out, result)
        print({name: result[name] for name in ("workloads", "continued", "runs", "continued_in_runs")}, flush=True)


if __name__ == "__main__":
    main()
