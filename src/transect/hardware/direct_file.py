"""Files that are read and written past the page cache, asynchronously, by a team of threads.

Optimizer states and streamed weights are larger than memory and are touched once a step: the page cache would only copy
them once more and push other pages out. With O_DIRECT the disk moves bytes straight to and from our buffers. One thread
asks for one part at a time, and a disk is fast only with many requests under way; so each read or write is cut into
parts that a team works on.

O_DIRECT needs offsets, lengths and addresses to be multiples of ``host_memory.ALIGNMENT``. File systems that do not
know it (tmpfs before Linux 6.6, some network mounts) are used through the page cache; ``direct`` says which it is.
"""

from __future__ import annotations

import errno
import os
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from .host_memory import ALIGNMENT

PART_BYTES = 8 * 2**20
THREADS = 16


class PendingTransfer:
    """A read or write in progress."""

    def __init__(self, what: str, parts: list[Future[None]]) -> None:
        self._what, self._parts = what, parts

    @property
    def done(self) -> bool:
        """True if ``wait`` would return at once."""
        return all(part.done() for part in self._parts)

    def wait(self) -> None:
        """Wait until it is done.

        Raises:
            ValueError: it failed (a full or broken disk, a file that is too short).
        """
        parts, self._parts = self._parts, []
        failures = [error for part in parts if (error := part.exception()) is not None]
        if failures:
            reason = failures[0].strerror if isinstance(failures[0], OSError) else str(failures[0])
            raise ValueError(f"{self._what} failed: {reason}") from failures[0]


class DirectFile:
    """File at ``path``, open until ``close``.

    Args:
        nbytes: size of a new file, allocated on the disk at once; None to open an existing file for reading.
        threads: number of parts in flight at the same time.
        temporary: remove the file's name at once; the file is freed with this process.

    Raises:
        ValueError: it cannot be opened, or the disk has no room.
    """

    def __init__(
        self, path: str | Path, nbytes: int | None = None, *, threads: int = THREADS, temporary: bool = False
    ) -> None:
        self.path = Path(path)
        self.direct = True
        try:
            self._handle = self._open(nbytes is not None)
            if temporary:
                self.path.unlink()
            if nbytes is not None and nbytes:
                os.posix_fallocate(self._handle, 0, nbytes)
        except OSError as error:
            raise ValueError(
                f"{self.path} cannot be {'opened' if nbytes is None else 'made'}: {error.strerror}"
            ) from None
        self.nbytes = os.fstat(self._handle).st_size
        self._team = ThreadPoolExecutor(threads, thread_name_prefix="file")

    def _open(self, anew: bool) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC if anew else os.O_RDONLY
        direct = getattr(os, "O_DIRECT", 0)
        try:
            if direct:
                return os.open(self.path, flags | direct, 0o644)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
        self.direct = False
        return os.open(self.path, flags, 0o644)

    def read(self, offset: int, into: Tensor) -> PendingTransfer:
        """Start to read ``into.nbytes`` bytes from ``offset``; do not touch ``into`` before ``wait``."""
        return self._start("reading", offset, into)

    def write(self, offset: int, source: Tensor) -> PendingTransfer:
        """Start to write ``source`` to ``offset``; do not change it before ``wait``."""
        return self._start("writing", offset, source)

    def _start(self, what: str, offset: int, tensor: Tensor) -> PendingTransfer:
        if not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ValueError("a file is read and written from contiguous memory of the host")
        if self.direct and (offset % ALIGNMENT or tensor.nbytes % ALIGNMENT or tensor.data_ptr() % ALIGNMENT):
            raise ValueError(f"{what} {self.path} needs offset, length and address to be multiples of {ALIGNMENT}")
        if not tensor.nbytes:
            return PendingTransfer(f"{what} {self.path}", [])
        bytes_ = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
        move = self._fill if what == "reading" else self._drain
        starts = range(0, len(bytes_), PART_BYTES)
        parts = [self._team.submit(move, bytes_[at : at + PART_BYTES], offset + at) for at in starts]
        return PendingTransfer(f"{what} {self.path}", parts)

    def _fill(self, part: memoryview, offset: int) -> None:
        done = 0
        while done < len(part):
            got = os.preadv(self._handle, [part[done:]], offset + done)
            if not got:
                raise EOFError(f"it ends before byte {offset + len(part)}")
            done += got

    def _drain(self, part: memoryview, offset: int) -> None:
        done = 0
        while done < len(part):
            done += os.pwritev(self._handle, [part[done:]], offset + done)

    def flush(self) -> None:
        """Wait until written data is on the disk."""
        os.fsync(self._handle)

    def close(self) -> None:
        """Finish transfers in progress and close the file."""
        self._team.shutdown()
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
