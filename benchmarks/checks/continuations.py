"""Cut every request of random workloads after each of its tokens, continue it elsewhere, and compare the whole answer.

    python benchmarks/checks/continuations.py [--workloads 100000] [--runs 1000] [--minutes 30] [--processes 2]

A workload runs the shipping scheduler on a device that knows every token and every slot of the cache
(``tests/helpers/kv_checker.py``): each of its requests comes whole, and again with any number of its tokens known, into
an engine with other work, chunks, blocks and memory. A run does so with the CPU's runner and a small model, and
compares log-probabilities to the bit (``tests/helpers/continued_runs.py``). An answer that differs ends the check, and
its workload is printed. Writes benchmarks/results/cpu/continuations.json after each piece, and continues one of the
same commit.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

import torch

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.checks._pieces import examples, parser_of, run_pieces

sys.path.insert(0, str(record.ROOT / "tests" / "helpers"))

from continuations import continuations
from continued_runs import check_cuts
from engine_workloads import Workload, run, workloads
from hypothesis import given, seed

KINDS: dict[str, dict[str, Any]] = {
    "tokens at once": {"lag": 0},
    "tokens one step late": {"lag": 1},
    "little memory": {"lag": 1, "storm": True},
    "static batches": {"lag": 0, "batching": "static"},
    "a pipeline": {"lag": 2, "depth": 3},
    "steps that raise": {"lag": 1, "breaking": True},
}
"""Arguments of ``engine_workloads.workloads``."""
WORKLOADS, RUNS = 20, 1000
"""Most workloads of a piece; pieces with a run of the real engine."""


def piece(number: int) -> Counter[str]:
    """Run up to ``WORKLOADS`` workloads of one kind and, in the first ``RUNS`` pieces, one run.

    Args:
        number: the seed of both.

    Returns:
        Numbers of workloads, of their continued requests, of runs and of theirs.
    """
    torch.set_num_threads(1)  # more would wait for each other on a machine with other work
    counts: Counter[str] = Counter()

    @seed(number)
    @examples(WORKLOADS)
    @given(continuations(workloads(**list(KINDS.values())[number % len(KINDS)])))
    def check(workload: Workload) -> None:
        counts["workloads"] += 1
        counts["continued"] += sum(arrival.begun is not None for arrival in workload.arrivals)
        run(workload)

    check()
    if number < RUNS:
        counts["continued_in_runs"] = check_cuts(number)
        counts["runs"] = 1
    return counts


def main() -> None:
    parser = parser_of(__doc__, record.RESULTS / "cpu" / "continuations.json", 1e9)
    parser.add_argument("--workloads", type=int, default=100_000)
    parser.add_argument("--runs", type=int, default=RUNS)
    options = parser.parse_args()
    wanted = {"workloads": options.workloads, "continued": 0, "runs": min(options.runs, RUNS), "continued_in_runs": 0}
    run_pieces(piece, wanted, options)


if __name__ == "__main__":
    main()
