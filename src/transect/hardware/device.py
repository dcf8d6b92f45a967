"""Detection of the present device: its name, driver and sizes, as reported by the system."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, replace
from functools import cache

import torch

from .cpu import processor_name
from .targets import PROCESSOR, KernelTarget, acted_target, target_named


@dataclass(frozen=True, slots=True)
class Device:
    """One device of this machine.

    Attributes:
        kind: ``cuda`` (NVIDIA), ``hip`` (AMD) or ``cpu``.
        target: compilation target of kernels: ``sm_90``, ``gfx942``; ``cpu`` for a processor.
        name: as the driver gives it.
        driver: version of the GPU driver; empty for a processor.
        torch: version of torch.
        units: multiprocessors of a GPU, threads that torch uses on a processor.
        memory_bytes: size of the device's memory.
        cache_bytes: size of the L2 cache of a GPU; 0 where not known.
        index: which of several GPUs.
        uuid: by which ``nvidia-smi`` knows it; empty for a processor.
    """

    kind: str
    target: str
    name: str
    driver: str
    torch: str
    units: int
    memory_bytes: int
    cache_bytes: int = 0
    index: int = 0
    uuid: str = ""

    @property
    def key(self) -> str:
        """Key of measurements: device, driver and torch version (and threads, on a CPU)."""
        threads = f", {self.units} threads" if self.kind == "cpu" else ""
        return f"{self.name}{threads}; driver {self.driver or 'none'}; torch {self.torch}"


def detect(which: str = "auto") -> Device:
    """Return the device called ``cuda``, ``cuda:1``, ``cpu``, or with ``auto`` the first GPU if there is one.

    Raises:
        ValueError: there is no such device.
    """
    if which == "auto":
        which = "cuda" if torch.cuda.is_available() else "cpu"
    if which == "cpu":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return Device("cpu", "cpu", processor_name(), "", torch.__version__, torch.get_num_threads(), memory)
    try:
        device = torch.device(which)
    except RuntimeError as error:
        raise ValueError(f"{which!r} does not name a device; use auto, cpu, cuda or cuda:0") from error
    if device.type != "cuda":
        raise ValueError(f"{which!r} is not a device that can be measured; use auto, cpu, cuda or cuda:0")
    if not torch.cuda.is_available():
        raise ValueError("torch finds no GPU here; use --device cpu")
    if (device.index or 0) >= torch.cuda.device_count():
        raise ValueError(f"there is no {which}: torch finds {torch.cuda.device_count()} GPU(s)")
    found = torch.cuda.get_device_properties(device)
    hip = torch.version.hip is not None
    target = found.gcnArchName.split(":")[0] if hip else f"sm_{found.major}{found.minor}"
    return Device(
        "hip" if hip else "cuda",
        target,
        found.name,
        str(torch.version.hip) if hip else driver_version(),
        torch.__version__,
        found.multi_processor_count,
        found.total_memory,
        getattr(found, "L2_cache_size", 0),
        device.index or 0,
        "" if hip else f"GPU-{found.uuid}",
    )


def target_of(device: torch.device | None = None) -> KernelTarget:
    """Return the target that kernels on a device (default: torch's current GPU) are chosen and cut for: the one that
    this process's GPU acts as, or its own. ``PROCESSOR`` for a processor; without limits for a GPU that ``targets.py``
    lacks."""
    if device is not None and device.type != "cuda":
        return PROCESSOR
    return acted_target() or own_target(device)


@cache
def own_target(device: torch.device | None = None) -> KernelTarget:
    """Return a GPU's own target."""
    if not torch.cuda.is_available():
        return PROCESSOR
    properties = torch.cuda.get_device_properties(device)
    if torch.version.hip:
        name = properties.gcnArchName.split(":")[0]
    else:
        name = f"sm_{properties.major}{properties.minor}"
    try:
        return target_named(name)
    except ValueError:
        return replace(PROCESSOR, name=name, capability=(0, 0) if torch.version.hip else divmod(int(name[3:]), 10))


def driver_version() -> str:
    """Return the version of the NVIDIA driver; ``unknown`` if ``nvidia-smi`` is not installed."""
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return "unknown"
    lines = done.stdout.split()
    return lines[0] if done.returncode == 0 and lines else "unknown"
