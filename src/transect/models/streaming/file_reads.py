"""Reads pieces of a file in a fixed order, again and again, ahead of their use.

A few pieces of (pinned) host memory are filled by threads, each with a part of a piece at a time, so that a disk has
several requests at once. Reads go past the page cache (``O_DIRECT``) where the file system can do that: what is read
once in a step would only push other pages out. ``os.preadv`` releases Python's lock while it reads.
"""

from __future__ import annotations

import logging
import mmap
import os
import weakref
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

import torch
from torch import Tensor

log = logging.getLogger(__name__)

READERS = 8
PART = 16 * 2**20
"""Bytes of one request."""
AHEAD = 3
"""Pieces that are read, or sent, at the same time."""


class _Piece(NamedTuple):
    place: int
    buffer: int
    parts: list[Future[None]]


class ReadAhead:
    """Pieces of a file, in turn.

    Args:
        path: of the file; it may be unlinked once this is made.
        pieces: (start, bytes) of each, multiples of a page.
        device: that they are sent to.
    """

    def __init__(self, path: str, pieces: Sequence[tuple[int, int]], device: torch.device) -> None:
        self._pieces = list(pieces)
        self._file = _open(path)
        self._cuda = device.type == "cuda"
        size = max(size for _, size in pieces)
        self._buffers = [_page_aligned(size, pinned=self._cuda) for _ in range(AHEAD)]
        self._sent: list[torch.cuda.Event | None] = [None] * AHEAD
        self._threads = ThreadPoolExecutor(READERS, thread_name_prefix="read")
        self._reading: deque[_Piece] = deque()
        weakref.finalize(self, _close, self._threads, self._file)

    def ready(self, place: int) -> bool:
        """Whether a piece has been read, and is the next."""
        return bool(self._reading) and self._reading[0].place == place and all(p.done() for p in self._reading[0].parts)

    def send(self, place: int, slot: Tensor) -> None:
        """Copy a piece to the device, on the current stream; waits until it is read. The ones after it are read on."""
        if not self._reading or self._reading[0].place != place:
            self._begin(place)
        _, buffer, parts = self._reading.popleft()
        for part in parts:
            part.result()
        size = self._pieces[place][1]
        slot[:size].copy_(self._buffers[buffer][:size], non_blocking=True)
        if self._cuda:
            sent = self._sent[buffer] = torch.cuda.Event()
            sent.record()
        self._read((place + AHEAD) % len(self._pieces), buffer)

    def _begin(self, place: int) -> None:
        """Forget what is being read: another piece is wanted than the one whose turn it is."""
        for piece in self._reading:
            wait(piece.parts)
        self._reading.clear()
        for buffer in range(AHEAD):
            self._read((place + buffer) % len(self._pieces), buffer)

    def _read(self, place: int, buffer: int) -> None:
        start, size = self._pieces[place]
        parts = [
            self._threads.submit(self._read_part, buffer, start, first, min(first + PART, size))
            for first in range(0, size, PART)
        ]
        self._reading.append(_Piece(place, buffer, parts))

    def _read_part(self, buffer: int, start: int, first: int, last: int) -> None:
        sent = self._sent[buffer]
        if sent is not None:
            sent.synchronize()
        memory: Any = memoryview(self._buffers[buffer].numpy())  # type: ignore[arg-type]
        while first < last:
            count = os.preadv(self._file, [memory[first:last]], start + first)
            if not count:
                raise OSError("the file that holds the layers has become shorter")
            first += count


def _open(path: str) -> int:
    if hasattr(os, "O_DIRECT"):
        try:
            file = os.open(path, os.O_RDONLY | os.O_DIRECT)
            os.preadv(file, [mmap.mmap(-1, mmap.PAGESIZE)], 0)
            return file
        except OSError as error:
            log.warning("%s is read through the page cache: its file system has no direct reads (%s)", path, error)
    return os.open(path, os.O_RDONLY)


def _page_aligned(size: int, *, pinned: bool) -> Tensor:
    """Memory that begins at a page, as direct reads want it."""
    spare = torch.empty(size + mmap.PAGESIZE, dtype=torch.uint8, pin_memory=pinned)
    first = -spare.data_ptr() % mmap.PAGESIZE
    return spare[first : first + size]


def _close(threads: ThreadPoolExecutor, file: int) -> None:
    threads.shutdown(wait=True, cancel_futures=True)
    os.close(file)
