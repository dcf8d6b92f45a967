"""What every benchmark records beside its numbers: machine, versions, commit, runs and spread."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"


def summary(values: Sequence[float]) -> dict[str, float | int]:
    """Median, extremes and number of runs."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": len(values)}


def environment(packages: Sequence[str] = ("torch", "numpy")) -> dict[str, Any]:
    """The machine and the software that made a result."""
    from transect.hardware.cpu import processor_name

    return {
        "processor": processor_name(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "packages": {name: metadata.version(name) for name in packages},
        "commit": commit(),
    }


def commit() -> str:
    """The commit measured, with ``+changes`` when tracked files differ from it."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True).stdout.strip()
    sources = ["src", "benchmarks/*.py"]
    dirty = subprocess.run([*git, "status", "--porcelain", "--", *sources], capture_output=True, text=True).stdout
    return (head or "unknown") + ("+changes" if dirty.strip() else "")


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
