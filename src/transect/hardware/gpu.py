"""Measures what a GPU can do, in a few seconds: memory bandwidth, matrix rate by dtype, cost of a launch."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from .ceilings import Ceilings

PROBE_BYTES = 2 * 2**30
MATRIX = 8192
REPEATS = 15


def median_seconds(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Median device time of one call, by events, after three calls that are not counted."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        work()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3)
    return statistics.median(times)


def measure(device: str = "cuda") -> Ceilings:
    """Read and copy bandwidth over 2 GiB, matrix products of random numbers in bfloat16 and float32.

    Raises:
        ValueError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise ValueError("no GPU was found; measure the processor with transect.hardware.cpu instead")
    source = torch.randn(PROBE_BYTES // 4, device=device)
    target = torch.empty_like(source)
    copy = 2 * PROBE_BYTES / median_seconds(lambda: target.copy_(source))
    read = PROBE_BYTES / median_seconds(lambda: source.sum())
    rates = {}
    for dtype in (torch.bfloat16, torch.float32):
        a, b = torch.randn(2, MATRIX, MATRIX, device=device).to(dtype)
        out = torch.empty_like(a)

        def product(a: torch.Tensor = a, b: torch.Tensor = b, out: torch.Tensor = out) -> torch.Tensor:
            return torch.mm(a, b, out=out)

        rates[str(dtype).removeprefix("torch.")] = 2 * MATRIX**3 / median_seconds(product, 7)
    return Ceilings(torch.cuda.get_device_name(device), read, copy, rates)


def launch_seconds(device: str = "cuda", launches: int = 2000) -> float:
    """Host time of one eager launch of a tiny kernel, back to back."""
    x = torch.zeros(1, device=device)
    for _ in range(100):
        x.add_(1)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(launches):
        x.add_(1)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / launches
