"""Sums between ranks, measured as in a step; ``costs/serving.py`` predicts steps of several ranks by them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ..costs.links import MeasuredLinks
from ..ops.lang.philox import GROUP
from ..parallel.mesh import Mesh
from ..parallel.shared_sums import graph_seconds, shared_sums
from ..parallel.world import World
from ..spec.layouts.ranks import RankLayout

JOB = "transect.bench.scaling:sum_times"
REPEATS = 20
SIZES = tuple(8 << 10 + 2 * power for power in range(8))
"""Bytes, from 8 KiB to 128 MiB."""


class SumTimes(NamedTuple):
    """Seconds of an all-reduce, by bytes."""

    library: dict[int, float]
    """Seconds by NCCL or gloo."""
    own: dict[int, float]
    """Seconds by our kernels (``parallel/shared_sums.py``), for the sizes that are tried."""
    said: str
    """Reason that our kernels are not used, or the size up to which they are faster."""

    def best(self) -> MeasuredLinks:
        """Return the faster way of each size."""
        worst = float("inf")
        sizes = {*self.library, *self.own}
        quicker = {n: min(self.library.get(n, worst), self.own.get(n, worst)) for n in sizes}
        return MeasuredLinks(quicker, shared=GROUP if self.own else 0)


def sum_times(world: World, sizes: Sequence[int] = SIZES) -> SumTimes:
    """Measure the seconds of an all-reduce of bfloat16, by bytes; the job of every rank. On GPUs the sums run in a CUDA
    graph, in turn, without a launch from the host, as in a step."""
    group = Mesh(world, RankLayout(tensor=world.size)).tensor
    found = {}
    for size in sizes:
        x = torch.zeros(max(1, size // 2), dtype=torch.bfloat16, device=world.device)
        repeats = max(2, min(REPEATS, (1 << 30) // size))

        def work(x: torch.Tensor = x) -> None:
            group.all_reduce(x)

        work()
        mine = graph_seconds(work, world.device, repeats) if x.is_cuda else _seconds(work)
        found[size] = max(world.exchange(mine))
    if world.device.type != "cuda":
        return SumTimes(found, {}, "our kernels are for GPUs")
    if group.ranks not in world.sums:
        world.sums[group.ranks] = shared_sums(world, group)
    sums = world.sums[group.ranks]
    own = {} if isinstance(sums, str) else {each.nbytes: each.own for each in sums.times}
    return SumTimes(found, own, str(sums))


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began
