"""``Mesh``: the ranks of a ``World`` in a ``RankLayout``, with a ``Group`` along each axis."""

from __future__ import annotations

import time
from functools import cached_property
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from ..spec.layouts.ranks import AXES, RankLayout
from ..spec.layouts.shards import Shard
from ..spec.model import ModelConfig
from .group import Group
from .world import World

PROBES = 20


class Mesh:
    """Coordinates of each rank along the axes, and the groups along each axis. All ranks create it, with the same
    layout.

    Args:
        world: the ranks; None if this process is the only one.

    Attributes:
        rank: this process's number.
        layout: the sizes of the axes.
        place: coordinates of this rank.
        tensor, context, pipeline, data: the groups along the axes that this rank belongs to.
        replicas: the ranks that have the same weights, along data and context.
        parts: the ranks that have one whole model between them, along pipeline and tensor.
        links: the group along pipeline, four times, each with connections of its own.

    Raises:
        ValueError: the layout has more or fewer ranks than there are.
    """

    def __init__(self, world: World | None, layout: RankLayout) -> None:
        size = 1 if world is None else world.size
        if layout.size != size:
            raise ValueError(
                f"there are {size} ranks, and the layout ({layout}) has {layout.size}: make its sizes multiply "
                f"to {size}, or start as many ranks"
            )
        self._world, self.layout = world, layout
        self.rank = 0 if world is None else world.rank
        self.place = layout.place(self.rank)
        self.data, self.pipeline, self.context, self.tensor = (self._group(axis) for axis in AXES)
        self.replicas = self._group("data", "context")
        self.parts = self._group("pipeline", "tensor")
        self.links = [self.pipeline, *(self._group("pipeline", link=link) for link in (1, 2, 3))]

    @property
    def world(self) -> World:
        """World of ranks, if there are several."""
        assert self._world is not None
        return self._world

    def shard(self, config: ModelConfig) -> Shard:
        """Return the part of a model that this rank has.

        Raises:
            ValueError: the model cannot be cut so.
        """
        place, layout = self.place, self.layout
        sharing = (place.data * layout.tensor + place.tensor, layout.data * layout.tensor) if layout.expert else (0, 1)
        return Shard(config, place.tensor, layout.tensor, place.pipeline, layout.pipeline, *sharing)

    def _group(self, *axes: str, link: int = 0) -> Group:
        """Return this rank's group along some axes. Every rank creates all groups, in the same order, as torch
        requires."""
        own = Group.alone()
        if all(getattr(self.layout, axis) == 1 for axis in axes):
            return own
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in range(self.layout.size):
            rest = self.layout.place(rank)._replace(**dict.fromkeys(axes, 0))
            found.setdefault(tuple(rest), []).append(rank)
        for ranks in found.values():
            group = self.world.group(tuple(ranks), (*axes, link))
            if self.rank in ranks:
                own = Group(tuple(ranks), ranks.index(self.rank), group)
        return own

    def seconds(self) -> float:
        """Return the seconds that this rank's host has spent on communication along the axes and on waiting for
        tokens."""
        return self.world.seconds + sum(group.seconds for group in (self.data, self.pipeline, self.tensor))

    @cached_property
    def device_mesh(self) -> DeviceMesh:
        """The same ranks as torch's ``DeviceMesh``, for DTensor and FSDP; its axes are those of ``AXES``."""
        return init_device_mesh(self.world.device.type, self.layout.sizes, mesh_dim_names=AXES)

    def link_times(self, sizes: tuple[int, ...] = (8 << 10, 4 << 20)) -> dict[int, float]:
        """Measure seconds of an all-reduce of each size in bytes along the tensor axis, best of a few.

        All ranks call it.
        """
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
