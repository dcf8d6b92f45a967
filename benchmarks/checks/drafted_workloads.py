"""Run random workloads with drafts, and compare the tokens with those of each request alone. Resumes where it stopped.

    python benchmarks/checks/drafted_workloads.py [--workloads 100000] [--minutes 4] [--processes 2]

The workloads are those of ``tests/helpers/engine_workloads.py``: the shipping scheduler on a device that checks every
KV slot, with prompt lookup, suffixes and a draft model, preemption, grammars, failing steps and pipelines. What each
choice must yield is computed from its request alone. A workload that fails ends the check; the number of its piece,
which is its seed, and the workload are printed, and ``--piece N`` runs that piece alone and makes the workload smaller.
Writes benchmarks/results/cpu/drafted_workloads.json after each piece, and continues one of the same commit.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, Phase, given, seed, settings

import _paths  # noqa: F401
from benchmarks import record
from benchmarks.checks._pieces import run_pieces

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "helpers"))
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


def piece(number: int, shrink: bool = False) -> Counter[str]:
    """Run up to ``WORKLOADS`` workloads of one kind, with ``number`` as their seed. Returns how many. ``shrink``: make
    one that fails smaller, which can take minutes."""
    counts: Counter[str] = Counter()
    phases = (Phase.generate, Phase.shrink) if shrink else (Phase.generate,)

    @seed(number)
    @settings(
        max_examples=WORKLOADS, deadline=None, database=None, phases=phases, suppress_health_check=list(HealthCheck)
    )
    @given(workloads(drafting=True, **list(KINDS.values())[number % len(KINDS)]))
    def check(workload: Workload) -> None:
        counts["workloads"] += 1
        run(workload)

    check()
    return counts


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--piece", type=int, help="run this piece alone, and record nothing")
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "drafted_workloads.json")
    options = parser.parse_args()
    if options.piece is not None:
        print(piece(options.piece, shrink=True))
        return
    run_pieces(piece, {"workloads": options.workloads}, options.minutes, options.processes, options.out)


if __name__ == "__main__":
    main()
