"""Measures what this machine's processor and memory can do. Takes about a second."""

from __future__ import annotations

import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

PROBE_BYTES = 256 * 2**20
REPEATS = 7


def processor_name() -> str:
    """The processor's model name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def best_seconds(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """The shortest of several runs: what the machine can do when nothing else disturbs it."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def memory_bandwidth() -> tuple[float, float]:
    """(read, copy) in bytes per second with torch's current number of threads; a copy counts both directions."""
    source = torch.ones(PROBE_BYTES // 4)
    target = torch.empty_like(source)
    read = PROBE_BYTES / best_seconds(source.sum)
    copy = 2 * PROBE_BYTES / best_seconds(lambda: target.copy_(source))
    return read, copy
