"""Storage of streamed layers: pinned host memory, or a file on a disk.

A file is read ahead of its use into a few pieces of pinned memory, by threads and past the page cache
(``hardware/direct_file.py``): what is read once a step would only push other pages out.
"""

from __future__ import annotations

import os
import uuid
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch
from torch import Tensor

from ...hardware.direct_file import DirectFile, PendingTransfer
from ...hardware.host_memory import Ring, host_memory

PINNERS = 4
"""Layers whose memory is pinned concurrently while others are loaded."""
AHEAD = 3
"""Layers of a file that are read, or sent, concurrently."""


class Homes(Protocol):
    """Streamed layers by index."""

    def memory(self, place: int) -> Tensor:
        """Return the memory, uint8, that a layer's bytes are written to when a model is loaded."""
        ...

    def written(self, place: int) -> None:
        """Mark a layer as written, as of the current stream of a GPU."""
        ...

    def settle(self) -> None:
        """Mark all layers as written."""
        ...

    def ready(self, place: int) -> bool:
        """Return True if ``send`` would not wait."""
        ...

    def send(self, place: int, slot: Tensor) -> None:
        """Copy a layer into a slot, on the current stream of a GPU; waits until it has been read."""
        ...


class HostHomes:
    """Storage in host memory, pinned for a GPU: layer by layer, in threads, while weights are being loaded.

    Args:
        sizes: bytes of each layer.
        device: that the layers are sent to.
    """

    def __init__(self, sizes: Sequence[int], device: torch.device) -> None:
        self._device = device
        pinners = ThreadPoolExecutor(PINNERS, thread_name_prefix="pin")
        self._memory: list[Future[Tensor]] = [pinners.submit(_memory, size, device) for size in sizes]
        pinners.shutdown(wait=False)

    def memory(self, place: int) -> Tensor:
        return self._memory[place].result()

    def written(self, place: int) -> None:
        """Do nothing: the bytes are in their final memory."""

    def settle(self) -> None:
        """Do nothing: all layers are in their final memory."""

    def ready(self, place: int) -> bool:
        return True

    def send(self, place: int, slot: Tensor) -> None:
        memory = self.memory(place)
        slot[: len(memory)].copy_(memory, non_blocking=True)


class FileHomes:
    """Storage in an unlinked file of a folder, which is deleted with the process.

    Args:
        sizes: bytes of each layer, multiples of a page.
        folder: on the disk that is to be read from.
        device: that the layers are sent to.

    Raises:
        ValueError: the folder cannot be written to, or has no room.
    """

    def __init__(self, sizes: Sequence[int], folder: str, device: torch.device) -> None:
        self._sizes, self._device = list(sizes), device
        self._starts = [sum(self._sizes[:place]) for place in range(len(sizes))]
        path = os.path.join(folder, f"transect-layers-{uuid.uuid4().hex}")
        self._file = DirectFile(path, sum(self._sizes), temporary=True)
        weakref.finalize(self, self._file.close)
        self._writing: dict[int, Tensor] = {}
        """Layers that are partly loaded."""
        self._written: deque[tuple[PendingTransfer, Tensor]] = deque()
        """Writes in progress, with memory that is free afterwards."""
        self._ring: Ring | None = None
        self._reading: deque[tuple[int, Tensor, PendingTransfer]] = deque()
        """Reads in progress, in order."""
        self._next: int | None = None
        """Layer to be read into the memory of the one that was sent last."""

    def memory(self, place: int) -> Tensor:
        if place not in self._writing:
            if self._written:
                pending, memory = self._written.popleft()
                pending.wait()
            else:
                memory = _memory(max(self._sizes), self._device)
            self._writing[place] = memory
        return self._writing[place][: self._sizes[place]]

    def written(self, place: int) -> None:
        """Start writing the layer to the file."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        memory = self._writing.pop(place)
        self._written.append((self._file.write(self._starts[place], memory[: self._sizes[place]]), memory))

    def settle(self) -> None:
        """Wait until everything is on the disk, and free the memory."""
        for place in list(self._writing):
            self.written(place)
        for pending, _ in self._written:
            pending.wait()
        self._written.clear()
        self._file.flush()
        with _on(self._device):
            self._ring = Ring(AHEAD, max(self._sizes), pin=self._device.type == "cuda")

    def ready(self, place: int) -> bool:
        return bool(self._reading) and self._reading[0][0] == place and self._reading[0][2].done

    def send(self, place: int, slot: Tensor) -> None:
        assert self._ring is not None
        if self._next is not None:
            self._read(self._next)
        if not self._reading or self._reading[0][0] != place:
            self._begin(place)
        _, memory, pending = self._reading.popleft()
        pending.wait()
        slot[: len(memory)].copy_(memory, non_blocking=True)
        if self._device.type == "cuda":
            sent = next(each for each in self._ring.slots if each.memory.data_ptr() == memory.data_ptr())
            sent.busy_until(torch.cuda.current_stream(self._device))
        self._next = (place + AHEAD) % len(self._sizes)

    def _begin(self, place: int) -> None:
        """Drop the reads in progress: another layer is requested than the next one."""
        for _, _, pending in self._reading:
            pending.wait()
        self._reading.clear()
        for ahead in range(AHEAD):
            self._read((place + ahead) % len(self._sizes))

    def _read(self, place: int) -> None:
        assert self._ring is not None
        memory = self._ring.take().memory[: self._sizes[place]]
        self._reading.append((place, memory, self._file.read(self._starts[place], memory)))
        self._next = None


def _memory(size: int, device: torch.device) -> Tensor:
    with _on(device):
        return host_memory(size, pin=device.type == "cuda", threads=max(1, (os.cpu_count() or 1) // PINNERS))


def _on(device: torch.device) -> AbstractContextManager[object]:
    """Select this device's context for pinning memory: a thread without one would create a context on the first GPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
