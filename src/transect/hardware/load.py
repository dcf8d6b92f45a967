"""Measure how busy a device is with other work: a rate measured on a busy machine is not a ceiling."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

STAT = Path("/proc/stat")
QUIET = 0.1
"""Largest share of the time that other work may use while a ceiling is measured."""
SAMPLE_S = 0.2
PATIENCE_S = 3.0


def cpu_load(seconds: float = SAMPLE_S) -> float:
    """Return the share of the cores' time used while this process slept for ``seconds``; 0 if unknown."""
    before = _times()
    time.sleep(seconds)
    after = _times()
    if before is None or after is None or after[1] <= before[1]:
        return 0.0
    return min(1.0, max(0.0, (after[0] - before[0]) / (after[1] - before[1])))


def _times() -> tuple[int, int] | None:
    """Return (used ticks, all ticks) of the cores that this process may run on, since the machine started."""
    ours = {f"cpu{core}" for core in os.sched_getaffinity(0)}
    used = total = 0
    try:
        for line in STAT.read_text().splitlines():
            name, *ticks = line.split()
            if name in ours:
                user, nice, system, idle, waiting, *others = map(int, ticks[:8])
                used += user + nice + system + sum(others)
                total += user + nice + system + sum(others) + idle + waiting
    except (OSError, ValueError):
        return None
    return (used, total) if total else None


def gpu_load(uuid: str) -> float:
    """Return the recent share of time in which kernels ran on a GPU, from ``nvidia-smi``; 0 if that is missing."""
    query = ["nvidia-smi", "-i", uuid, "--query-gpu=utilization.gpu", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30)
        return int(done.stdout.split()[0]) / 100 if done.returncode == 0 else 0.0
    except (OSError, subprocess.TimeoutExpired, ValueError, IndexError):
        return 0.0


def wait_until_quiet(load: Callable[[], float], patience_s: float = PATIENCE_S) -> float:
    """Wait for up to ``patience_s`` until ``load`` is at most ``QUIET``; returns the last load."""
    until = time.monotonic() + patience_s
    while (seen := load()) > QUIET and time.monotonic() < until:
        time.sleep(SAMPLE_S)
    return seen
