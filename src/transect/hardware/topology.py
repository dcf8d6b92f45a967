"""Detect the connections in this machine: NUMA nodes of the host, and the links between GPUs.

The kinds of links are those of ``nvidia-smi topo -m``. Their bandwidth is measured by copies between each pair of GPUs.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

NODES = Path("/sys/devices/system/node")
COPY_BYTES = 256 * 2**20
KINDS = {
    "PIX": "PCIe, one bridge",
    "PXB": "PCIe, several bridges",
    "PHB": "PCIe, through the host bridge",
    "NODE": "PCIe, between host bridges of a NUMA node",
    "SYS": "between NUMA nodes",
}
ANSI = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True, slots=True)
class NumaNode:
    """Processors near the same memory. ``cpus`` as Linux writes lists: ``0-15,32-47``."""

    number: int
    cpus: str
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Link:
    """Link between two GPUs; bytes per second in one direction, 0 if not measured."""

    first: int
    second: int
    kind: str
    bytes_per_second: float = 0.0


@dataclass(frozen=True, slots=True)
class Topology:
    """The connections of a machine."""

    nodes: tuple[NumaNode, ...]
    links: tuple[Link, ...] = ()


def topology(*, measure: bool = True) -> Topology:
    """Return the connections of this machine. ``measure``: measure also the copies between each pair of GPUs."""
    count = torch.cuda.device_count()
    if count < 2:
        return Topology(numa_nodes())
    kinds = link_kinds(_nvidia_smi())
    pairs = [(i, j) for i in range(count) for j in range(i + 1, count)]
    rate: Callable[[int, int], float] = copy_rate if measure else lambda i, j: 0.0
    links = tuple(Link(i, j, described(kinds.get((i, j), "")), rate(i, j)) for i, j in pairs)
    return Topology(numa_nodes(), links)


def numa_nodes(folder: Path = NODES) -> tuple[NumaNode, ...]:
    """Return the NUMA nodes listed by Linux; none if it lists none."""
    found = []
    for node in sorted(folder.glob("node[0-9]*"), key=lambda path: int(path.name[4:])):
        try:
            total = re.search(r"MemTotal:\s*(\d+) kB", (node / "meminfo").read_text())
            cpus = (node / "cpulist").read_text().strip()
        except OSError:
            continue
        found.append(NumaNode(int(node.name[4:]), cpus, int(total.group(1)) * 1024 if total else 0))
    return tuple(found)


def link_kinds(table: str) -> dict[tuple[int, int], str]:
    """Return the kinds in the matrix that ``nvidia-smi topo -m`` prints, by pairs of GPUs."""
    lines = [ANSI.sub("", line).split() for line in table.splitlines()]
    heads = next((line for line in lines if line and line[0] == "GPU0" and "X" not in line), [])
    columns = [int(name[3:]) if re.fullmatch(r"GPU\d+", name) else None for name in heads]
    found = {}
    for line in lines:
        if line and re.fullmatch(r"GPU\d+", line[0]) and "X" in line:
            for column, kind in zip(columns, line[1:], strict=False):
                if column is not None and kind != "X":
                    found[int(line[0][3:]), column] = kind
    return found


def described(kind: str) -> str:
    """Return a kind in words."""
    if match := re.fullmatch(r"NV(\d+)", kind):
        return f"NVLink, {match.group(1)} links"
    return KINDS.get(kind, "not known")


def copy_rate(first: int, second: int) -> float:
    """Measure the bytes per second of copies from one GPU to another, the best of five."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{first}")
    target = torch.empty_like(source, device=f"cuda:{second}")
    best = float("inf")
    for _ in range(6):  # the first sets up the peer mapping
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.device(first):
            start.record()
            target.copy_(source, non_blocking=True)
            end.record()
            end.synchronize()
        best = min(best, start.elapsed_time(end) * 1e-3)
    return COPY_BYTES / best


def _nvidia_smi() -> str:
    try:
        done = subprocess.run(["nvidia-smi", "topo", "-m"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
