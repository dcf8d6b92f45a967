"""Storage of an optimizer's states: host memory, or a disk from which states are in memory only while they are
processed.

A state is a float32 number for each number of each parameter, of several kinds (weight, first and second moment). Both
places hand them out a group (``groups.py``) at a time. ``DiskStates`` reads ahead and writes behind, so that disk,
processor and link work at the same time; it keeps four groups in memory, whatever the size of the model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ...hardware.direct_file import DirectFile, PendingTransfer
from ...hardware.host_memory import aligned, host_memory, host_tensor
from .groups import GROUP, PieceGroup, StatePiece, cut

AHEAD = 2
"""Groups that are read ahead of their use."""
BUFFERS = AHEAD + 2
"""Number of buffers: one more than ``AHEAD`` is processed, and one more is written."""


class States(Protocol):
    """States of parameters, by number of their kind."""

    groups: list[PieceGroup]
    nbytes: int

    def walk(self, wanted: Sequence[int]) -> Iterator[tuple[PieceGroup, Tensor]]:
        """Yield the groups with these numbers, in this order, each with its states, float32 ``[kinds, count]``. Changes
        to them are kept once the next group is requested."""
        ...

    def read(self, kind: int, name: str) -> Tensor:
        """Return the states of one parameter as a vector."""
        ...

    def write(self, kind: int, name: str, values: Tensor) -> None:
        """Replace the states of one parameter by a vector."""
        ...

    def settle(self) -> None:
        """Wait for all transfers in progress."""
        ...


class HostStates:
    """States in host memory.

    Args:
        sizes: the numbers of each parameter.
        kinds: number of states of each parameter element.
        most: numbers of a group.

    Raises:
        ValueError: there is not enough memory.
    """

    def __init__(self, sizes: Mapping[str, int], kinds: int, most: int = GROUP) -> None:
        self.groups = cut(sizes, most)
        self._all = host_tensor((kinds, sum(sizes.values())), torch.float32)
        self.nbytes = self._all.nbytes
        self._of = [dict(zip(sizes, row.split(list(sizes.values())), strict=True)) for row in self._all]

    def walk(self, wanted: Sequence[int]) -> Iterator[tuple[PieceGroup, Tensor]]:
        """Yield groups with views of their states; see ``States``."""
        for number in wanted:
            group = self.groups[number]
            yield group, self._all[:, group.start : group.start + group.count]

    def read(self, kind: int, name: str) -> Tensor:
        """Return the memory itself."""
        return self._of[kind][name]

    def write(self, kind: int, name: str, values: Tensor) -> None:
        """Replace the states of one parameter; see ``States``."""
        self._of[kind][name].copy_(values)

    def settle(self) -> None:
        """Do nothing: there are no transfers."""


class DiskStates:
    """States in an unlinked file, which is deleted when this process ends, however it ends.

    Args:
        folder: folder of the file, on a fast disk.
        sizes, kinds, most: as in ``HostStates``.

    Raises:
        ValueError: the folder cannot be written to, or the disk has no room. Later: it fails.
    """

    def __init__(self, folder: str | Path, sizes: Mapping[str, int], kinds: int, most: int = GROUP) -> None:
        self.groups = cut(sizes, most)
        self.nbytes = 4 * kinds * sum(sizes.values())
        self._kinds = kinds
        self._rows = [aligned(4 * group.count) for group in self.groups]
        """Bytes of each kind of a group."""
        self._offsets = [0]
        for row in self._rows:
            self._offsets.append(self._offsets[-1] + kinds * row)
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"parallel.offload_path {folder} cannot be made: {error.strerror}") from None
        self.file = DirectFile(Path(folder) / "states", self._offsets[-1], temporary=True)
        size = kinds * max(self._rows, default=0)
        memory = host_memory(BUFFERS * size)
        self._buffers = [memory[at * size : (at + 1) * size] for at in range(BUFFERS)]
        self._writing: dict[int, tuple[int, PendingTransfer]] = {}
        """Group that is being written from each buffer."""
        self._reading: dict[int, tuple[int, PendingTransfer]] = {}
        """Group that is being read into each buffer."""
        self._turn = 0

    def _bytes(self, buffer: int, number: int) -> Tensor:
        return self._buffers[buffer][: self._kinds * self._rows[number]]

    def _rows_of(self, buffer: int, number: int) -> Tensor:
        rows = self._bytes(buffer, number).view(torch.float32).view(self._kinds, -1)
        return rows[:, : self.groups[number].count]

    def _begin(self, buffer: int, number: int) -> None:
        """Start to read a group, once the buffer is free and the group's last write is complete."""
        for other, (going, pending) in list(self._writing.items()):
            if other == buffer or going == number:
                pending.wait()
                del self._writing[other]
        self._reading[buffer] = number, self.file.read(self._offsets[number], self._bytes(buffer, number))

    def walk(self, wanted: Sequence[int]) -> Iterator[tuple[PieceGroup, Tensor]]:
        """Yield groups with their states, see ``States``. At the end the first groups of ``wanted`` are read again for
        the next walk, which is usually the same."""
        first = self._turn
        for place in range(min(AHEAD, len(wanted))):
            self._ahead((first + place) % BUFFERS, wanted[place])
        for place, number in enumerate(wanted):
            buffer = (first + place) % BUFFERS
            if place + AHEAD < len(wanted):
                self._ahead((buffer + AHEAD) % BUFFERS, wanted[place + AHEAD])
            self._reading.pop(buffer)[1].wait()
            yield self.groups[number], self._rows_of(buffer, number)
            self._writing[buffer] = number, self.file.write(self._offsets[number], self._bytes(buffer, number))
        self._turn = (first + len(wanted)) % BUFFERS
        if len(wanted) >= AHEAD + BUFFERS:  # else the first ones are still being written
            for place in range(AHEAD):
                self._ahead((self._turn + place) % BUFFERS, wanted[place])

    def _ahead(self, buffer: int, number: int) -> None:
        """Ensure that a group is being read into a buffer."""
        if buffer in self._reading:
            coming, pending = self._reading[buffer]
            if coming == number:
                return
            pending.wait()
        for other, (coming, pending) in list(self._reading.items()):  # never twice: one of them would be old
            if coming == number:
                pending.wait()
                del self._reading[other]
        self._begin(buffer, number)

    def read(self, kind: int, name: str) -> Tensor:
        """Return the states of one parameter as a new vector; see ``States``."""
        found = []
        for piece, values in self._pieces(kind, name):
            found.append(values[piece.place].clone())
        return torch.cat(found)

    def write(self, kind: int, name: str, values: Tensor) -> None:
        """Replace the states of one parameter; see ``States``."""
        flat = values.reshape(-1)
        for piece, row in self._pieces(kind, name):
            row[piece.place].copy_(flat[piece.begin : piece.end])
            number = self._number(piece)
            self.file.write(self._offsets[number] + kind * self._rows[number], self._row_bytes(number)).wait()

    def _number(self, piece: StatePiece) -> int:
        return next(number for number, group in enumerate(self.groups) if piece in group.pieces)

    def _row_bytes(self, number: int) -> Tensor:
        return self._buffers[0][: self._rows[number]]

    def _pieces(self, kind: int, name: str) -> Iterator[tuple[StatePiece, Tensor]]:
        """Yield the pieces of a parameter, each with the row of its kind in memory."""
        self.settle()
        for number, group in enumerate(self.groups):
            for piece in group.pieces:
                if piece.name == name:
                    place = self._row_bytes(number)
                    self.file.read(self._offsets[number] + kind * self._rows[number], place).wait()
                    yield piece, place.view(torch.float32)

    def settle(self) -> None:
        """Wait for all transfers, and drop the groups that were read ahead; see ``States``."""
        for _, pending in (*self._writing.values(), *self._reading.values()):
            pending.wait()
        self._writing.clear()
        self._reading.clear()
