"""Host memory: how much is free, and buffers that a GPU and a disk can read and write directly.

A GPU copies beside its other work only from and to pages that stay where they are (pinned, or page-locked). A disk
moves bytes past the page cache only to and from memory that is aligned. ``host_memory`` gives both. The system
allocates a page when it is first touched, which takes longer than to write it. Therefore several threads touch the
pages, and huge pages are requested.

``Ring`` is a few such buffers that are used in turn, so that much data passes through little pinned memory.
"""

from __future__ import annotations

import ctypes
import math
import mmap
import os
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

ALIGNMENT = 4096
"""Alignment in bytes of addresses, offsets and lengths in direct reads and writes; a multiple of every disk's
sector."""
HUGE_PAGE = 2 * 2**20
TOUCH_BYTES = 256 * 2**20
"""Bytes of memory that one thread touches at a time."""


class _Mapping(mmap.mmap):
    """Private memory. A Python class, so that finalizers run before the memory is freed."""


def aligned(nbytes: int) -> int:
    """Round ``nbytes`` up to ``ALIGNMENT``."""
    return -(-nbytes // ALIGNMENT) * ALIGNMENT


def host_memory(nbytes: int, *, pin: bool = False, threads: int = 0) -> Tensor:
    """Allocate zeros, uint8 ``[nbytes]``, at an address that is a multiple of ``ALIGNMENT``. The memory is freed with
    the tensor.

    Args:
        pin: lock the pages for copies to and from GPUs.
        threads: number of threads that touch the pages at once; 0 for the number of cores.

    Raises:
        ValueError: there is not enough memory, or the system does not let this process pin it.
    """
    if not nbytes:
        return torch.empty(0, dtype=torch.uint8)
    size = -(-nbytes // HUGE_PAGE) * HUGE_PAGE if nbytes >= HUGE_PAGE else aligned(nbytes)
    try:
        mapping = _Mapping(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise ValueError(f"the host gives no {size / 2**30:.1f} GiB of memory ({error}): offload less") from None
    if hasattr(mmap, "MADV_HUGEPAGE"):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)
    _touch(memory.data_ptr(), size, threads or len(os.sched_getaffinity(0)))
    if pin:
        _pin(mapping, memory.data_ptr(), size)
    return memory[:nbytes]


def host_tensor(shape: Sequence[int], dtype: torch.dtype, *, pin: bool = False, threads: int = 0) -> Tensor:
    """Allocate zeros of this shape and dtype by ``host_memory``, with its errors."""
    count = math.prod(shape)
    return host_memory(count * dtype.itemsize, pin=pin, threads=threads).view(dtype).view(*shape)


def _touch(address: int, size: int, threads: int) -> None:
    parts = range(0, size, TOUCH_BYTES)
    if len(parts) == 1 or threads == 1:
        ctypes.memset(address, 0, size)
        return
    with ThreadPoolExecutor(threads) as team:
        for _ in team.map(lambda at: ctypes.memset(address + at, 0, min(TOUCH_BYTES, size - at)), parts):
            pass


def _pin(mapping: _Mapping, address: int, size: int) -> None:
    runtime = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(address, size, 0))
    if code:
        raise ValueError(
            f"{size / 2**30:.1f} GiB of host memory could not be pinned (CUDA error {code}): the limit may be that of "
            "locked memory (ulimit -l), or of the container"
        )
    weakref.finalize(mapping, runtime.cudaHostUnregister, address).atexit = False


class Slot:
    """One buffer of a ``Ring``: ``memory`` is uint8."""

    def __init__(self, memory: Tensor) -> None:
        self.memory = memory
        self._until: torch.cuda.Event | None = None

    def view(self, count: int, dtype: torch.dtype) -> Tensor:
        """View the first ``count`` numbers, ``[count]``."""
        return self.memory[: count * dtype.itemsize].view(dtype)

    def busy_until(self, stream: torch.cuda.Stream) -> None:
        """Mark the slot as used until the work submitted to ``stream`` so far is done."""
        if self._until is None:
            self._until = torch.cuda.Event()
        self._until.record(stream)

    def wait(self) -> None:
        """Wait until the device no longer uses the slot."""
        if self._until is not None:
            self._until.synchronize()


class Ring:
    """Buffers that are used in turn.

    Args:
        count: 2 to fill one while the other is copied; more where times differ.
        nbytes: of each.
        pin: for copies to and from a GPU.
    """

    def __init__(self, count: int, nbytes: int, *, pin: bool) -> None:
        step = aligned(nbytes)
        memory = host_memory(count * step, pin=pin)
        self.slots = [Slot(memory[at * step : at * step + nbytes]) for at in range(count)]
        self.nbytes = nbytes
        self._next = 0

    def take(self) -> Slot:
        """Return the next buffer, once the device no longer uses it."""
        slot = self.slots[self._next]
        self._next = (self._next + 1) % len(self.slots)
        slot.wait()
        return slot


def free_memory() -> int:
    """Return the bytes that this process can still take: the machine's, or its container's if that allows less (Linux).

    Raises:
        ValueError: the system does not say; give the size of the KV cache.
    """
    free = _meminfo_available()
    if free is None:
        raise ValueError("this system does not say how much memory is free: give num_kv_blocks or kv_cache_bytes")
    container = _cgroup_available()
    return free if container is None else min(free, container)


def _meminfo_available() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    return None


def _cgroup_available() -> int | None:
    root = Path("/sys/fs/cgroup")
    for limit, used in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            return int((root / limit).read_text()) - int((root / used).read_text())
        except (OSError, ValueError):  # no such control group, or "max"
            continue
    return None
