"""Measures the ceilings of a GPU, in a few seconds: memory bandwidth, matrix rate by dtype, cost of a launch, host
link."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from ..costs.ceilings import Ceilings
from .device import target_of

PROBE_BYTES = 2 * 2**30
LINK_BYTES = 256 * 2**20
MATRIX = 8192
REPEATS = 15


def median_seconds(work: Callable[[], object], repeats: int = REPEATS) -> float:
    """Measure the median device time of one call, by events, after three uncounted calls."""
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


@contextmanager
def _tf32(allowed: bool) -> Iterator[None]:
    """Allow or forbid rounding float32 products to tf32 while the block runs."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def bandwidths(device: str) -> tuple[float, float]:
    """Measure (read, copy) in bytes per second over at most 2 GiB; a copy counts both directions."""
    free, _ = torch.cuda.mem_get_info(device)
    nbytes = min(PROBE_BYTES, free // 4 // 4096 * 4096)
    source = torch.randn(nbytes // 4, device=device)
    target = torch.empty_like(source)
    copy = 2 * nbytes / median_seconds(lambda: target.copy_(source))
    return nbytes / median_seconds(source.sum), copy


def matmul_rates(device: str) -> dict[str, float]:
    """Measure the FLOP/s of a square product of random numbers, by dtype: float32, tf32, bfloat16, float16, and fp8 if
    the device has it."""
    side = MATRIX
    flops = 2 * side**3
    a, b = torch.randn(2, side, side, device=device)
    rates = {}
    with _tf32(False):
        rates["float32"] = flops / median_seconds(lambda: torch.mm(a, b), 5)
    if torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0):
        with _tf32(True):
            rates["tf32"] = flops / median_seconds(lambda: torch.mm(a, b), 7)
    for dtype in (torch.bfloat16, torch.float16):
        x, y = a.to(dtype), b.to(dtype)
        out = torch.empty_like(x)

        def product(x: torch.Tensor = x, y: torch.Tensor = y, out: torch.Tensor = out) -> torch.Tensor:
            return torch.mm(x, y, out=out)

        rates[str(dtype).removeprefix("torch.")] = flops / median_seconds(product)
    if has_fp8(device):
        x8, y8 = a.to(torch.float8_e4m3fn), b.to(torch.float8_e4m3fn).T
        one = torch.ones((), device=device)

        def product8() -> torch.Tensor:
            return torch._scaled_mm(x8, y8, one, one, out_dtype=torch.bfloat16, use_fast_accum=True)

        rates["float8_e4m3fn"] = flops / median_seconds(product8)
    return rates


def has_fp8(device: str) -> bool:
    """Return True if matrix products of float8_e4m3fn run on the tensor cores: compute capability 8.9 and up."""
    return target_of(torch.device(device)).fp8_products


def launch_seconds(device: str = "cuda", launches: int = 2000) -> float:
    """Measure the host time of one eager launch of a tiny kernel, back to back."""
    x = torch.zeros(1, device=device)
    for _ in range(100):
        x.add_(1)
    torch.cuda.synchronize(device)
    start = time.perf_counter()
    for _ in range(launches):
        x.add_(1)
    torch.cuda.synchronize(device)
    return (time.perf_counter() - start) / launches


def link(device: str = "cuda") -> tuple[float, float]:
    """Measure (host to device, device to host) in bytes per second, through pinned memory."""
    host = torch.empty(LINK_BYTES, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(LINK_BYTES, dtype=torch.uint8, device=device)
    up = LINK_BYTES / median_seconds(lambda: there.copy_(host, non_blocking=True), 7)
    down = LINK_BYTES / median_seconds(lambda: host.copy_(there, non_blocking=True), 7)
    return up, down


def measure(device: str = "cuda") -> Ceilings:
    """Measure everything above on one device.

    Raises:
        ValueError: there is no GPU.
    """
    if not torch.cuda.is_available():
        raise ValueError("no GPU was found; measure the processor with transect.hardware.cpu instead")
    with torch.cuda.device(device):
        launch = launch_seconds(device)
        read, copy = bandwidths(device)
        rates = matmul_rates(device)
        up, down = link(device)
        torch.cuda.empty_cache()
    memory = torch.cuda.get_device_properties(device).total_memory
    return Ceilings(torch.cuda.get_device_name(device), read, copy, rates, launch, up, down, memory)
