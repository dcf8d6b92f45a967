"""Measures the ceilings of this machine's processor and memory. Takes a few seconds."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable
from pathlib import Path

import torch

from ..costs.ceilings import Ceilings

PROBE_BYTES = 256 * 2**20
MATRIX = 1024
REPEATS = 7
LAUNCHES = 2000


def processor_name() -> str:
    """Return the processor's model name as the system gives it."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def best_seconds(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Return the shortest of several runs: the machine's speed without disturbance."""
    work()
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return min(times)


def memory_bandwidth() -> tuple[float, float, float]:
    """Measure (read, copy, update in place) in bytes per second with torch's current number of threads; a copy and an
    update count both directions."""
    source = torch.ones(PROBE_BYTES // 4)
    target = torch.empty_like(source)
    read = PROBE_BYTES / best_seconds(source.sum)
    copy = 2 * PROBE_BYTES / best_seconds(lambda: target.copy_(source))
    update = 2 * PROBE_BYTES / best_seconds(lambda: target.neg_())
    return read, copy, update


def matmul_rate(dtype: torch.dtype) -> float:
    """Measure the FLOP/s of a square product of random numbers, with torch's current number of threads."""
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, MATRIX, MATRIX, generator=generator).to(dtype)
    return 2 * MATRIX**3 / best_seconds(lambda: a @ b, 5)


def launch_seconds(launches: int = LAUNCHES) -> float:
    """Measure the time of one eager operation on one element, back to back."""
    x = torch.zeros(1)

    def work() -> None:
        for _ in range(launches):
            x.add_(1)

    return best_seconds(work, 3) / launches


def measure() -> Ceilings:
    """Measure the bandwidth of reads, copies and updates over 256 MiB, products in float32 and bfloat16, and the cost
    of an eager call."""
    read, copy, update = memory_bandwidth()
    rates = {str(d).removeprefix("torch."): matmul_rate(d) for d in (torch.float32, torch.bfloat16)}
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    name = f"{processor_name()}, {torch.get_num_threads()} threads"
    return Ceilings(name, read, copy, rates, launch_seconds(), memory_bytes=memory, update_bytes_per_second=update)
