"""Measure the host links of several ranks at the same time, for the floor of streamed layers."""

from __future__ import annotations

import time

import torch

from ..hardware.gpu import LINK_BYTES, link
from ..parallel.world import World

JOB = "transect.bench.host_link:rates"
COPIES = 3


def rates(world: World, argument: object = None) -> list[float]:
    """Measure the bytes per second from pinned host memory to the device of each rank, all at the same time."""
    world.exchange(None)
    return world.exchange(rate(world.device))


def rate(device: torch.device) -> float:
    """Measure the host link of one device; on a CPU a copy in memory, which replaces the link there."""
    if device.type == "cuda":
        return link(str(device))[0]
    source, target = (torch.ones(LINK_BYTES // 4, dtype=torch.uint8) for _ in range(2))
    times = []
    for _ in range(COPIES):
        began = time.perf_counter()
        target.copy_(source)
        times.append(time.perf_counter() - began)
    return source.nbytes / min(times)
