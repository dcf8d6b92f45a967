"""``Mesh``: the ranks of a ``World`` in a ``Layout``, with a ``Group`` along each axis."""

from __future__ import annotations

import time
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from .group import Group
from .layout import AXES, Layout
from .world import World

PROBES = 20


class Mesh:
    """Which rank does what, and who does it together. All ranks make it, with the same layout.

    Attributes:
        layout: the sizes of the axes.
        place: where this rank is.
        tensor, pipeline, data: the groups along the axes that this rank belongs to.

    Raises:
        ValueError: the layout has more or fewer ranks than there are.
    """

    def __init__(self, world: World, layout: Layout) -> None:
        if layout.size != world.size:
            raise ValueError(
                f"there are {world.size} ranks, and the layout ({layout}) has {layout.size}: make its sizes multiply "
                f"to {world.size}, or start as many ranks"
            )
        self.world, self.layout = world, layout
        self.place = layout.place(world.rank)
        groups = {}
        for axis in AXES:
            groups[axis] = self._group(axis)
        self.data, self.pipeline, self.tensor = (groups[axis] for axis in AXES)

    def _group(self, axis: str) -> Group:
        """The own group along an axis. Every rank makes all groups, in the same order, as torch demands."""
        own = Group.alone()
        if getattr(self.layout, axis) == 1:
            return own
        seen = set()
        for rank in range(self.layout.size):
            place = self.layout.place(rank)
            ranks = tuple(self.layout.rank(place._replace(**{axis: at})) for at in range(getattr(self.layout, axis)))
            if ranks in seen:
                continue
            seen.add(ranks)
            group = dist.new_group(list(ranks))
            if self.world.rank in ranks:
                own = Group(ranks, ranks.index(self.world.rank), group)
        return own

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """The same ranks as torch's ``DeviceMesh``, for DTensor and FSDP; its axes are those of ``AXES``."""
        return init_device_mesh(self.world.device.type, self.layout.sizes, mesh_dim_names=AXES)

    def link_times(self, sizes: tuple[int, ...] = (8 << 10, 4 << 20)) -> dict[int, float]:
        """Seconds of an all-reduce of so many bytes along the tensor axis, the best of a few. All ranks call it."""
        found = {}
        for size in sizes:
            x = torch.zeros(size // 4, device=self.world.device)
            best = float("inf")
            for _ in range(PROBES if size < 1 << 20 else 3):
                began = time.perf_counter()
                self.tensor.all_reduce(x)
                _wait(x)
                best = min(best, time.perf_counter() - began)
            found[size] = best
        return found


def _wait(x: Any) -> None:
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
