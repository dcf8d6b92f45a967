"""Count the CPU cores that this process can keep busy, and divide them between an engine and its server.

Threads of an operator wait for each other, so one that shares its core with another thread delays all of them. Linux
places a thread that wakes on a core without work; where helpers of a server keep the only such core busy, it puts two
threads of the engine on one core. So the engine keeps to all cores but one, and all else to that one.
"""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Collection, Iterator
from pathlib import Path

MEMBERSHIP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")
SERVER_CORES = 4
"""Cores of an engine from which one is left for the server's process: HTTP, encoding and checks of grammars. Without it
they interrupt a thread of the engine, for which all other threads wait in each operator."""
POLITEST = 15
"""Niceness of helper processes on the core that is left: HTTP, which needs half of it, hardly waits for them."""

_all: set[int] = set()
"""Cores of this process, once its threads have been confined to some of them."""
_kept: Collection[int] = ()
"""Cores that the main thread was confined to."""
_left: Collection[int] = ()
"""Cores for threads that ``step_aside``."""


def own_cores() -> set[int]:
    """Return the cores that this process may run on, also those that its threads were kept from."""
    return _all or set(os.sched_getaffinity(0))


def confine(cores: Collection[int]) -> None:
    """Confine the main thread to these cores, or to all if there are none; to be called by it. Threads and processes
    that it starts later inherit them."""
    global _all, _kept
    if not cores and not _all:
        return
    every = own_cores()
    os.sched_setaffinity(0, cores or every)
    _all, _kept = every, cores or every


def leave_core(threads: int) -> list[int]:
    """Confine the main thread, and those it starts, to all cores but the last, if that leaves one for each of
    ``threads`` and there are ``SERVER_CORES``. Returns the core that is left, or nothing."""
    global _left
    cores = sorted(own_cores())
    if threads + 1 != len(cores) or usable_cores() < max(len(cores), SERVER_CORES):
        return []
    try:
        confine(cores[:-1])
    except OSError:  # forbidden, as in some sandboxes
        return []
    _left = cores[-1:]
    return cores[-1:]


def step_aside() -> None:
    """Confine the calling thread, and what it starts, to the core that ``leave_core`` has left; does nothing if there
    is none."""
    if _left:
        os.sched_setaffinity(0, _left)


def helper_cores() -> int:
    """Count the cores for threads that ``step_aside``."""
    return len(_left or own_cores())


def niceness(shared: int) -> int:
    """Return the niceness of a helper process: ``shared`` if it runs on cores of the engine, which must not stop it."""
    return POLITEST if _kept or _left else shared


@contextlib.contextmanager
def undivided() -> Iterator[None]:
    """Let processes that the main thread starts in this block have all cores."""
    if _kept:
        os.sched_setaffinity(0, _all)
    try:
        yield
    finally:
        if _kept:
            os.sched_setaffinity(0, _kept)


def usable_cores() -> int:
    """Return the number of cores that this process may run on, limited by the CPU quota of its container (``docker run
    --cpus``).

    With more threads than the quota allows, all of them are stopped for a part of every 100 ms.
    """
    return min([len(own_cores()), *map(math.ceil, _quotas())])


def _quotas() -> list[float]:
    """Return the limits in cores, of the control groups of this process and of all enclosing groups."""
    try:
        lines = MEMBERSHIP.read_text().splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "cpu" in controllers.split(","):  # version 2 names none
            mount = CGROUPS / controllers
            group = mount / path.lstrip("/")
            # In a container the mount may be the group itself, whatever its path is outside.
            found += [_quota(folder) for folder in {mount, group, *group.parents} if folder.is_relative_to(mount)]
    return [quota for quota in found if quota > 0]


def _quota(group: Path) -> float:
    """Return the CPU time per period, in cores; 0 if there is no limit."""
    for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):  # versions 2 and 1
        try:
            quota, period = " ".join((group / name).read_text() for name in names).split()
            return float(quota) / float(period)
        except (OSError, ValueError):  # no such file, or "max"
            continue
    return 0.0
