"""Measure collectives between ranks, and check their results.

Bandwidths are those of nccl-tests (its PERFORMANCE.md). For a collective over n ranks on S bytes in t seconds,
``algbw = S / t``. ``busbw`` is what has to cross each rank's link, whatever the algorithm, over t:

==============  ==============================  ==================
collective      S                               busbw / algbw
==============  ==============================  ==================
all_reduce      the buffer of a rank            2 (n - 1) / n
all_gather      what each rank has in the end   (n - 1) / n
reduce_scatter  what each rank has at first     (n - 1) / n
all_to_all      the buffer of a rank            (n - 1) / n
send_recv       what a rank sends to the next   1
==============  ==============================  ==================

Out of place the result is another buffer than the input; in place it is the same (of all_gather and reduce_scatter: the
rank's own part of it). torch's all_reduce works in place, so out of place it is a copy and then that. What has no such
form is left out. ``all_reduce_ours`` is that of ``ops/comm/all_reduce.py``, between GPUs, for sizes that its memory
takes. The floor is what has to cross a rank's link, at the rate at which GPUs copy. Buffers hold small
whole numbers, so sums are exact in every dtype and every order.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..hardware.topology import copy_rate
from ..parallel.group import Group
from ..parallel.mesh import Mesh
from ..parallel.peer_sums import PeerSums
from ..parallel.shared_sums import graph_seconds, shared_sums
from ..parallel.world import World
from ..spec.layouts.ranks import RankLayout

JOB = "transect.bench.collectives:measure"
OURS = "all_reduce_ours"
WARM_UP = 3
DTYPES = ("float32", "bfloat16", "float16")
Run = Callable[[], object]


@dataclass(frozen=True, slots=True)
class Sweep:
    """Measurements to make. ``sizes`` are S, in bytes; ``dtype`` a torch dtype by name.

    Raises:
        ValueError: a collective or dtype is not known.
    """

    collectives: tuple[str, ...]
    sizes: tuple[int, ...]
    dtype: str = "float32"
    iterations: int = 20
    graphs: bool = False
    """True if iterations on GPUs are replayed from a CUDA graph, as in an engine, and not launched one by one."""
    most_bytes: int = 1 << 30
    """Most bytes that all iterations together move; larger sizes have fewer iterations."""

    def __post_init__(self) -> None:
        for name in self.collectives:
            if name not in (*COLLECTIVES, OURS):
                raise ValueError(f"there is no collective {name!r}: choose from {', '.join((*COLLECTIVES, OURS))}")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")


@dataclass(frozen=True, slots=True)
class CollectiveRow:
    """One measurement. Seconds are of the slowest rank, a mean over iterations; ``wrong`` counts numbers."""

    collective: str
    bytes: int
    in_place: bool
    seconds: float
    algbw: float
    busbw: float
    wrong: int
    floor: float | None = None
    """Floor in seconds; None if the link's rate is unknown."""

    def to_dict(self) -> dict[str, Any]:
        """Return the fields; bandwidths in bytes per second."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Case:
    """A collective on existing buffers: a function that runs it, and its expected results."""

    run: Run
    result: Tensor
    expected: Tensor


def bus_factor(collective: str, ranks: int) -> float:
    """Return busbw over algbw."""
    if collective == "send_recv":
        return 1.0
    return (2 if collective in ("all_reduce", OURS) else 1) * (ranks - 1) / ranks


def sizes_between(least: int, most: int, factor: int) -> tuple[int, ...]:
    """List ``least``, times ``factor`` each, up to ``most``, which is the last.

    Raises:
        ValueError: there are none.
    """
    if least < 1 or most < least or factor < 2:
        raise ValueError(
            f"sizes from {least} to {most} by a factor of {factor} cannot be listed: give a least size of 1 or more, "
            "a largest one that is no smaller, and a factor of 2 or more"
        )
    found = [least]
    while found[-1] < most:
        found.append(min(found[-1] * factor, most))
    return tuple(found)


def measure(world: World, plan: Sweep) -> list[CollectiveRow]:
    """Run all measurements: the job of every rank."""
    dtype = getattr(torch, plan.dtype)
    group = Mesh(world, RankLayout(tensor=world.size)).tensor
    if OURS in plan.collectives and world.device.type == "cuda" and group.ranks not in world.sums:
        world.sums[group.ranks] = shared_sums(world, group)
    group.sums = sums if isinstance(sums := world.sums.get(group.ranks), PeerSums) else None
    link = world.exchange(_link_rate(world))[0]
    rows = []
    for name in plan.collectives:
        for size in plan.sizes:
            count = max(1, size // (dtype.itemsize * group.size)) * group.size
            for in_place in (False, True):
                made = _our_all_reduce if name == OURS else COLLECTIVES[name]
                case = made(group, count, dtype, world.device, in_place)
                if case is not None:
                    row = _timed(world, group, name, count * dtype.itemsize, in_place, case, plan)
                    rows.append(row if link is None else replace(row, floor=row.seconds * row.busbw / link))
    return rows


def _link_rate(world: World) -> float | None:
    """Measure the bytes per second of a copy between two GPUs of this host; None if there are none."""
    if world.device.type != "cuda" or torch.cuda.device_count() < 2 or world.rank:
        return None
    first = world.device.index or 0
    return copy_rate(first, (first + 1) % torch.cuda.device_count())


def _timed(world: World, group: Group, name: str, size: int, in_place: bool, case: _Case, plan: Sweep) -> CollectiveRow:
    case.run()  # once on fresh buffers: what it makes is looked at
    wrong = int((case.result != case.expected).sum())
    for _ in range(WARM_UP - 1):
        case.run()
    iterations = max(1, min(plan.iterations, plan.most_bytes // size))
    if plan.graphs and world.device.type == "cuda":
        mine = graph_seconds(case.run, world.device, iterations)
    else:
        mine = _seconds(world, case, iterations)
    found = world.exchange((mine, wrong))
    seconds = max(each[0] for each in found)
    rate = size / seconds
    factor = bus_factor(name, group.size)
    return CollectiveRow(name, size, in_place, seconds, rate, rate * factor, sum(each[1] for each in found))


def _seconds(world: World, case: _Case, iterations: int) -> float:
    """Measure the seconds of one of several iterations that are launched consecutively."""
    _settle(world)
    world.exchange(None)  # a barrier
    began = time.perf_counter()
    for _ in range(iterations):
        case.run()
    _settle(world)
    return (time.perf_counter() - began) / iterations


def _settle(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)


def _numbers(rank: int, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make the input of a rank: small whole numbers, different on each rank."""
    return ((torch.arange(count, device=device) + 3 * rank) % 7).to(dtype)


def _all_reduce(group: Group, count: int, dtype: torch.dtype, device: torch.device, in_place: bool) -> _Case:
    mine = _numbers(group.rank, count, dtype, device)
    total = _sum(group, count, dtype, device)
    if in_place:
        return _Case(lambda: dist.all_reduce(mine, group=group.group), mine, total)
    out = torch.empty_like(mine)
    return _Case(lambda: dist.all_reduce(out.copy_(mine), group=group.group), out, total)


def _our_all_reduce(group: Group, count: int, dtype: torch.dtype, device: torch.device, in_place: bool) -> _Case | None:
    mine = _numbers(group.rank, count, dtype, device)
    if group.sums is None or group.sums.peers.refusal(mine) is not None:
        return None
    out = mine if in_place else torch.empty_like(mine)
    peers = group.sums.peers
    return _Case(lambda: peers.sum(mine, out), out, _sum(group, count, dtype, device))


def _all_gather(group: Group, count: int, dtype: torch.dtype, device: torch.device, in_place: bool) -> _Case:
    each = count // group.size
    out = torch.zeros(count, dtype=dtype, device=device)
    mine = _numbers(group.rank, each, dtype, device)
    if in_place:
        part = out[group.rank * each : (group.rank + 1) * each]
        part.copy_(mine)
        mine = part
    expected = torch.cat([_numbers(rank, each, dtype, device) for rank in range(group.size)])
    return _Case(lambda: group.gather_into(out, mine), out, expected)


def _reduce_scatter(group: Group, count: int, dtype: torch.dtype, device: torch.device, in_place: bool) -> _Case:
    each = count // group.size
    mine = _numbers(group.rank, count, dtype, device)
    part = slice(group.rank * each, (group.rank + 1) * each)
    out = mine[part] if in_place else torch.empty(each, dtype=dtype, device=device)
    expected = _sum(group, count, dtype, device)[part]
    return _Case(lambda: group.scatter_into(out, mine), out, expected)


def _all_to_all(group: Group, count: int, dtype: torch.dtype, device: torch.device, in_place: bool) -> _Case | None:
    if in_place:
        return None
    each = count // group.size
    mine = _numbers(group.rank, count, dtype, device)
    out = torch.empty_like(mine)
    part = slice(group.rank * each, (group.rank + 1) * each)
    expected = torch.cat([_numbers(rank, count, dtype, device)[part] for rank in range(group.size)])
    return _Case(lambda: dist.all_to_all_single(out, mine, group=group.group), out, expected)


def _send_recv(group: Group, count: int, dtype: torch.dtype, device: torch.device, in_place: bool) -> _Case | None:
    """Build the case in which every rank sends to the next, and receives from the previous one."""
    if in_place:
        return None
    mine, out = _numbers(group.rank, count, dtype, device), torch.zeros(count, dtype=dtype, device=device)
    after, before = (group.rank + 1) % group.size, (group.rank - 1) % group.size

    def run() -> None:
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, mine, group=group.group, group_peer=after),
                dist.P2POp(dist.irecv, out, group=group.group, group_peer=before),
            ]
        )
        for work in works:
            work.wait()

    return _Case(run, out, _numbers(before, count, dtype, device))


def _sum(group: Group, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    parts: Sequence[Tensor] = [_numbers(rank, count, dtype, device) for rank in range(group.size)]
    return torch.stack([*parts]).sum(0)


COLLECTIVES: dict[str, Callable[[Group, int, torch.dtype, torch.device, bool], _Case | None]] = {
    "all_reduce": _all_reduce,
    "all_gather": _all_gather,
    "reduce_scatter": _reduce_scatter,
    "all_to_all": _all_to_all,
    "send_recv": _send_recv,
}
