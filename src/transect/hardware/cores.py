"""Count the CPU cores that this process can keep busy."""

from __future__ import annotations

import math
import os
from pathlib import Path

MEMBERSHIP = Path("/proc/self/cgroup")
CGROUPS = Path("/sys/fs/cgroup")


def usable_cores() -> int:
    """Return the number of cores that this process may run on, limited by the CPU quota of its container (``docker run
    --cpus``).

    With more threads than the quota allows, all of them are stopped for a part of every 100 ms.
    """
    return min([len(os.sched_getaffinity(0)), *map(math.ceil, _quotas())])


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
