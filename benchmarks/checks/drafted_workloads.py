"""Run random workloads with drafts, and compare the tokens with those of each request alone. Resumes where it stopped.

    python benchmarks/checks/drafted_workloads.py [--workloads 100000] [--minutes 4] [--out FILE]

The workloads are those of ``tests/helpers/engine_workloads.py``: the shipping scheduler on a device that checks every
KV slot, with prompt lookup, suffixes and a draft model, preemption, grammars, failing steps and pipelines. What each
choice must yield is computed from its request alone. Each kind has its own seeds; the record says how many of each
have been run, so another call resumes there. A workload that fails ends the run, and is printed.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from hypothesis import HealthCheck, given, seed, settings

import _paths  # noqa: F401
from benchmarks import record

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
BATCH = 100
"""Workloads between two records."""


def run_batch(kind: str, number: int) -> None:
    """Run ``BATCH`` workloads of a kind; ``number`` decides which."""

    @seed(number)
    @settings(max_examples=BATCH, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(workloads(drafting=True, **KINDS[kind]))
    def check(workload: Workload) -> None:
        run(workload)

    check()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--out", type=Path, default=record.RESULTS / "cpu" / "drafted_workloads.json")
    options = parser.parse_args()
    found: dict[str, Any] = {"batches": dict.fromkeys(KINDS, 0), "seconds": 0.0}
    if options.out.exists():
        found = json.loads(options.out.read_text())
    began = before = time.perf_counter()
    while BATCH * sum(found["batches"].values()) < options.workloads:
        kind = min(KINDS, key=lambda each: found["batches"][each])
        run_batch(kind, found["batches"][kind])
        found["batches"][kind] += 1
        now = time.perf_counter()
        found["seconds"] += now - before
        before = now
        found |= {"workloads": BATCH * sum(found["batches"].values()), "environment": record.environment()}
        record.write(options.out, found)
        if now - began > 60 * options.minutes:
            break
    print(f"{found['workloads']} workloads in {found['seconds']:.0f} s, all as without drafts")


if __name__ == "__main__":
    main()
