"""Record machine, versions, commit, runs and spread beside the numbers of a benchmark."""

from __future__ import annotations

import json
import re
import statistics
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from transect.hardware.environment import commit, environment

__all__ = [
    "COMMITS",
    "RESULTS",
    "ROOT",
    "cited",
    "command",
    "commit",
    "environment",
    "made_at",
    "peak_memory_bytes",
    "release",
    "summary",
    "write",
]

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
COMMITS = RESULTS / "commits.json"
"""Commits that results name and this repository lacks; written by ``commits.py``."""


@cache
def release() -> str:
    """Return the newest version that CHANGELOG.md has as a heading ``## 1.2.3``.

    Raises:
        ValueError: there is no such heading.
    """
    versions = re.findall(r"^## (\d+\.\d+\.\d+)\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    if not versions:
        raise ValueError("CHANGELOG.md has no heading like '## 1.2.3'")
    return max(versions, key=_number)


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")))


@cache
def _absent() -> frozenset[str]:
    return frozenset(json.loads(COMMITS.read_text())["not_in_repository"])


def cited(commit: str) -> str:
    """Return the name of a commit for a page, marked if this repository does not have that commit."""
    return f"{commit} (not in this repository)" if commit.partition("+")[0] in _absent() else commit


def made_at(runs: Iterable[Mapping[str, Any]]) -> str:
    """Name the commits of these runs; mark commits that are not in the repository, and runs before the last release.

    Args:
        runs: anything with a ``commit``, and with a ``version`` where the run recorded one.
    """
    latest = release()
    current: dict[str, None] = {}
    older: dict[str, None] = {}
    for run in runs:
        version = run.get("version")
        known = current if version and _number(version) >= _number(latest) else older
        known[cited(run["commit"])] = None
    parts = []
    if current:
        parts.append(f"commit {', '.join(current)}")
    if older:
        parts.append(f"commit {', '.join(older)} (measured before {latest})")
    return "; ".join(parts)


def command(path: str) -> str:
    """Return the command line of the benchmark at ``path``, without the places of its output."""
    given = iter(sys.argv[1:])
    kept = [each for each in given if not (each in ("--out", "--keep") and next(given, None))]
    return " ".join(["python", path, *kept])


def summary(values: Sequence[float]) -> dict[str, float | int]:
    """Return the median, extremes and number of runs."""
    return {"median": statistics.median(values), "min": min(values), "max": max(values), "runs": len(values)}


def write(path: Path, result: dict[str, Any]) -> None:
    """Keep a result as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=2) + "\n")


def peak_memory_bytes() -> int:
    """Return the largest resident memory of this process so far (Linux)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("this system does not tell a process's peak memory")
