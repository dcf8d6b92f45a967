"""Run random workloads with drafts, and compare the tokens with those of each request alone. Resumes where it stopped.

    python benchmarks/checks/drafted_workloads.py [--workloads 100000] [--minutes 4] [--processes 2]

The workloads are those of ``tests/helpers/engine_workloads.py``: the shipping scheduler on a device that checks every
KV slot, with prompt lookup, suffixes and a draft model, preemption, grammars, failing steps and pipelines. What each
choice must yield is computed from its request alone. A workload that fails ends the check, and is printed. Writes
benchmarks/results/cpu/drafted_workloads.json after each piece, and continues one of the same commit.
"""

from __future__ import annotations

import sys
from collections import Counter
from typing import Any

from hypothesis import given, seed

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.checks._pieces import examples, parser_of, run_pieces

sys.path.insert(0, str(record.ROOT / "tests" / "helpers"))
from engine_workloads import Workload, run, workloads

KINDS: dict[str, dict[str, Any]] = {
    "tokens at once": {"lag": 0},
    "planned ahead": {"lag": 1},
    "preemption storm": {"lag": 1, "storm": True},
    "steps that raise": {"lag": 0, "breaking": True},
    "steps that raise, planned ahead": {"lag": 1, "breaking": True},
    "three stages": {"lag": 2, "depth": 3},
    "preemption storm, two stages": {"lag": 1, "depth": 2, "storm": True},
}
WORKLOADS = 100
"""Most workloads of a piece."""


def piece(number: int) -> Counter[str]:
    """Run up to ``WORKLOADS`` workloads of one kind, with ``number`` as their seed. Returns how many."""
    counts: Counter[str] = Counter()

    @seed(number)
    @examples(WORKLOADS)
    @given(workloads(drafting=True, **list(KINDS.values())[number % len(KINDS)]))
    def check(workload: Workload) -> None:
        counts["workloads"] += 1
        run(workload)

    check()
    return counts


def main() -> None:
    parser = parser_of(__doc__, record.RESULTS / "cpu" / "drafted_workloads.json", 4.0)
    parser.add_argument("--workloads", type=int, default=100_000)
    options = parser.parse_args()
    run_pieces(piece, {"workloads": options.workloads}, options)


if __name__ == "__main__":
    main()
