"""Where layers that stream live: pinned host memory, or a file on a disk."""

from __future__ import annotations

import logging
import mmap
import os
import tempfile
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch
from torch import Tensor

from .file_reads import ReadAhead

log = logging.getLogger(__name__)

PINNERS = 4
"""Threads that pin memory while weights are loaded."""


class Homes(Protocol):
    """Layers by their places in the stream."""

    def memory(self, place: int) -> Tensor:
        """Where a layer's bytes are written to when a model is loaded; uint8."""
        ...

    def settle(self) -> None:
        """All layers are written."""
        ...

    def ready(self, place: int) -> bool:
        """Whether ``send`` would not wait."""
        ...

    def send(self, place: int, slot: Tensor) -> None:
        """Copy a layer into a slot, on the current stream of a GPU; waits until it has been read."""
        ...


class HostHomes:
    """In host memory, pinned for a GPU: piece by piece, in threads of their own, while weights are being loaded.

    Args:
        sizes: bytes of each layer.
        device: that the layers are sent to.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self._device = device
        pinners = ThreadPoolExecutor(PINNERS, thread_name_prefix="pin")
        self._memory: list[Future[Tensor]] = [pinners.submit(self._make, size) for size in sizes]
        pinners.shutdown(wait=False)

    def _make(self, size: int) -> Tensor:
        memory = mmap.mmap(-1, size)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            memory.madvise(mmap.MADV_HUGEPAGE)
        made = torch.frombuffer(memory, dtype=torch.uint8)
        if self._device.type == "cuda":
            made[:: mmap.PAGESIZE].zero_()  # so that its pages are there, which pinning does more slowly
            _pin(made, self._device)
        return made

    def memory(self, place: int) -> Tensor:
        return self._memory[place].result()

    def settle(self) -> None:
        """Nothing is left to do."""

    def ready(self, place: int) -> bool:
        return True

    def send(self, place: int, slot: Tensor) -> None:
        memory = self.memory(place)
        slot[: len(memory)].copy_(memory, non_blocking=True)


def _pin(memory: Tensor, device: torch.device) -> None:
    """Register memory with the driver, and take that back when the tensor goes. Pinned memory from torch's own
    allocator would be rounded up to a power of two.

    Raises:
        RuntimeError: the driver refuses.
    """
    runtime = torch.cuda.cudart()
    with torch.cuda.device(device):
        torch.cuda.check_error(int(runtime.cudaHostRegister(memory.data_ptr(), memory.nbytes, 1)))
    weakref.finalize(memory, runtime.cudaHostUnregister, memory.data_ptr()).atexit = False


class FileHomes:
    """In a file of a folder, which has no name there: it goes with the process.

    Args:
        sizes: bytes of each layer, multiples of a page.
        folder: on the disk that is to be read from.
        device: that the layers are sent to.

    Raises:
        ValueError: the folder cannot be written to, or has no room.
    """

    def __init__(self, sizes: Sequence[int], folder: str, device: torch.device) -> None:
        self._sizes = list(sizes)
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + size)
        try:
            number, path = tempfile.mkstemp(prefix="transect-layers-", dir=folder)
        except OSError as error:
            raise ValueError(f"offload_folder {folder!r} cannot be written to ({error}): give another") from error
        try:
            try:
                os.posix_fallocate(number, 0, starts[-1])
            except OSError as error:
                raise ValueError(
                    f"offload_folder {folder!r} has no room for {starts[-1] / 2**30:.1f} GiB ({error}): give another"
                ) from error
            whole = torch.from_file(path, shared=True, size=starts[-1], dtype=torch.uint8)
            self._reads = ReadAhead(path, list(zip(starts, sizes, strict=False)), device)
        finally:
            os.unlink(path)
        self._file = number
        weakref.finalize(self, os.close, number).atexit = False
        self._memory: list[Tensor] = list(whole.split(self._sizes))

    def memory(self, place: int) -> Tensor:
        return self._memory[place]

    def settle(self) -> None:
        """On the disk, and out of this process's memory."""
        os.fsync(self._file)
        self._memory.clear()

    def ready(self, place: int) -> bool:
        return self._reads.ready(place)

    def send(self, place: int, slot: Tensor) -> None:
        self._reads.send(place, slot)
