"""What every benchmark records beside its numbers: machine, versions, commit, runs and spread."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transect.hardware.environment import commit, environment

__all__ = ["RESULTS", "ROOT", "commit", "environment", "peak_memory_bytes", "summary", "write"]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def summary(values: Sequence[float]) -> dict[str, float | int]:
    """Median, extremes and number of runs."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": len(values)}


def write(path: Path, result: dict[str, Any]) -> None:
    """Keep a result as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


def peak_memory_bytes() -> int:
    """The largest resident memory of this process so far (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system does not tell a process's peak memory")
