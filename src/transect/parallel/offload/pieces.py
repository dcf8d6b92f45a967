"""Storage of the weights of layers that do not run: host memory, or a file on a fast disk (ZeRO-Infinity).

A rank keeps a piece of the weights of each unit (a layer, or what is outside the layers; ``sharded.py``), and sends it
to its device over its own link when the unit's turn comes. Pieces in a file are read ahead into pinned memory, in the
order in which a step asks for them: up through the layers, and down again::

    disk    read 3 │ read 4 │ ...      memory   2, 3 on their way      device   layer 1 runs, 2 arrives

The optimizer makes new weights a part at a time, in the order of the model. Those of a unit are put together in memory
and written when the last part is there.

Rajbhandari et al. 2021, arXiv:2104.07857.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from ...hardware.direct_file import DirectFile, PendingTransfer
from ...hardware.host_memory import Ring, aligned, host_memory, host_tensor
from .groups import StatePiece

AHEAD = 2
"""Units that are read ahead of their use."""


class Pieces(Protocol):
    """The pieces of a rank, by the numbers of their units: the layers from 0 on, then the parameters outside of
    layers."""

    def keep(self, unit: int, values: Tensor) -> Tensor:
        """Store a piece, ``[numbers]``. The returned tensor represents it: the optimizer's parameters are views of it,
        and it may have no memory."""
        ...

    def send(self, unit: int, to: Tensor) -> None:
        """Copy a piece to the device, on the current stream; waits until it has been read."""
        ...

    def send_part(self, unit: int, begin: int, end: int, to: Tensor) -> None:
        """Copy some numbers of a piece to the device. All parts of one unit are requested before those of another."""
        ...


class HostPieces:
    """Pieces in host memory, pinned for a GPU; the optimizer changes them in place. ``device``: target of the
    copies."""

    def __init__(self, device: torch.device) -> None:
        self._pin = device.type == "cuda"
        self._all: dict[int, Tensor] = {}

    def keep(self, unit: int, values: Tensor) -> Tensor:
        """Store a piece, see ``Pieces``. Raises ValueError if there is not enough memory."""
        memory = host_tensor(values.shape, values.dtype, pin=self._pin)
        self._all[unit] = memory.copy_(values)
        return memory

    def send(self, unit: int, to: Tensor) -> None:
        """Copy a piece to the device; see ``Pieces``."""
        to.copy_(self._all[unit], non_blocking=True)

    def send_part(self, unit: int, begin: int, end: int, to: Tensor) -> None:
        """Copy a part of a piece to the device; see ``Pieces``."""
        to.copy_(self._all[unit][begin:end], non_blocking=True)


class FilePieces:
    """Pieces in an unlinked file, which is deleted with this process.

    Args:
        folder: folder of the file, on a fast disk.
        sizes: bytes of the piece of each unit; the last unit is what is outside the layers.
        device: that they go to.

    Raises:
        ValueError: the folder cannot be written to, or the disk has no room. Later: it fails.
    """

    def __init__(self, folder: str | Path, sizes: Sequence[int], device: torch.device) -> None:
        self._sizes = [aligned(size) for size in sizes]
        self._starts = [sum(self._sizes[:unit]) for unit in range(len(sizes))]
        try:
            Path(folder).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"parallel.offload_path {folder} cannot be made: {error.strerror}") from None
        self.file = DirectFile(Path(folder) / "weights", sum(self._sizes), temporary=True)
        layers = len(sizes) - 1
        self._turns = [*range(layers), *reversed(range(layers))]
        """Order in which a step requests layers."""
        self._next = 0
        """Turn of the layer that is sent next."""
        self._sent = -1
        """Layer that was sent last; -1 for none, or for the parameters outside of layers."""
        self._held: tuple[int, Tensor] | None = None
        """Unit whose parts are being sent, and the memory that holds it."""
        self._ring = Ring(AHEAD + 1, max(self._sizes), pin=device.type == "cuda")
        self._reading: deque[tuple[int, Tensor, PendingTransfer]] = deque()
        self._writing: dict[int, tuple[PendingTransfer, Tensor]] = {}
        """Writes in progress by unit, with the memory that is written from."""

    def keep(self, unit: int, values: Tensor) -> Tensor:
        """Write a piece to the file; see ``Pieces``."""
        self.write(unit, values)
        self.settle()
        return torch.empty(values.shape, dtype=values.dtype, device="meta")

    def send(self, unit: int, to: Tensor) -> None:
        """Copy a piece to the device, see ``Pieces``, and read the next units ahead."""
        memory = self._taken(unit)
        to.view(torch.uint8).copy_(memory[: to.nbytes], non_blocking=True)
        self._busy(memory, to)
        self._read_ahead(unit)

    def send_part(self, unit: int, begin: int, end: int, to: Tensor) -> None:
        """Copy a part of a piece to the device, see ``Pieces``. The unit stays in memory until parts of another are
        requested."""
        if self._held is None or self._held[0] != unit:
            self._held = None
            self._held = unit, self._taken(unit)
            self._read_ahead(unit)
        memory = self._held[1].view(to.dtype)
        to.copy_(memory[begin:end], non_blocking=True)
        self._busy(self._held[1], to)

    def _taken(self, unit: int) -> Tensor:
        """Return the memory that holds a piece."""
        if not self._reading or self._reading[0][0] != unit:
            self._turn_to(unit)
        _, memory, pending = self._reading.popleft()
        pending.wait()
        return memory

    def _busy(self, memory: Tensor, to: Tensor) -> None:
        """Keep memory until the copies from it are done."""
        if to.is_cuda:
            slot = next(slot for slot in self._ring.slots if slot.memory.data_ptr() == memory.data_ptr())
            slot.busy_until(torch.cuda.current_stream(to.device))

    def _read_ahead(self, unit: int) -> None:
        """Start to read the unit that follows ``unit``."""
        layer = unit + 1 < len(self._sizes)
        self._sent = unit if layer else -1
        if layer:
            self._next = (self._next + 1) % len(self._turns)
        for ahead in range(len(self._reading), min(AHEAD, len(self._turns))):
            self._read(self._turns[(self._next + ahead) % len(self._turns)])

    def _turn_to(self, unit: int) -> None:
        """Read a piece next that was expected later, or not at all."""
        if any(each == unit for each, *_ in self._reading):  # a layer that is still whole takes no second turn
            while self._reading[0][0] != unit:
                self._reading.popleft()[2].wait()
                self._next = (self._next + 1) % len(self._turns)
            return
        self.forget()
        if unit + 1 < len(self._sizes):
            self._next = len(self._turns) - 1 - unit if unit < self._sent else unit
        self._read(unit)

    def _read(self, unit: int) -> None:
        if unit in self._writing:
            self._writing.pop(unit)[0].wait()
        memory = self._ring.take().memory[: self._sizes[unit]]
        self._reading.append((unit, memory, self.file.read(self._starts[unit], memory)))

    def forget(self) -> None:
        """Drop the pieces that were read ahead: they are about to change, or other ones are wanted."""
        self._held = None
        for _, _, pending in self._reading:
            pending.wait()
        self._reading.clear()
        self._next = 0

    def write(self, unit: int, values: Tensor) -> None:
        """Start writing a piece; ``values`` are copied first."""
        memory = self.memory(unit)
        memory[: values.nbytes].copy_(values.reshape(-1).view(torch.uint8))
        self.written(unit, memory)

    def memory(self, unit: int) -> Tensor:
        """Return memory to assemble a piece in, uint8: that of a finished write, or new memory."""
        for other, (pending, memory) in list(self._writing.items()):
            if pending.done or len(self._writing) > AHEAD:
                pending.wait()
                del self._writing[other]
                if len(memory) >= self._sizes[unit]:
                    return memory
        return host_memory(self._sizes[unit])

    def written(self, unit: int, memory: Tensor) -> None:
        """Start writing the memory that ``memory`` returned, which must not change afterwards."""
        if unit in self._writing:
            self._writing.pop(unit)[0].wait()
        self._writing[unit] = self.file.write(self._starts[unit], memory[: self._sizes[unit]]), memory

    def read(self, unit: int) -> Tensor:
        """Return a piece as bytes, in memory of its own."""
        if unit in self._writing:
            self._writing.pop(unit)[0].wait()
        memory = host_memory(self._sizes[unit])
        self.file.read(self._starts[unit], memory).wait()
        return memory

    def settle(self) -> None:
        """Wait for all writes, and free their memory."""
        for pending, _ in self._writing.values():
            pending.wait()
        self._writing.clear()


class FileUpload:
    """Replaces pieces in a file by an optimizer's new weights; like ``upload.Upload`` for memory.

    Args:
        pieces: the file.
        places: by parameter, the unit and where in its piece (``begin``, ``end``) the parameter lies.
        dtype: of all of them.
    """

    def __init__(self, pieces: FilePieces, places: Mapping[str, tuple[int, int, int]], dtype: torch.dtype) -> None:
        self._pieces, self._places, self._dtype = pieces, dict(places), dtype
        self._count: dict[int, int] = {}
        """Numbers of each unit."""
        for unit, begin, end in self._places.values():
            self._count[unit] = self._count.get(unit, 0) + end - begin
        self._made: dict[int, tuple[Tensor, list[tuple[int, int]]]] = {}
        """Memory of partly updated units, with the updated ranges."""

    def read(self, name: str) -> Tensor:
        """Return the numbers of a parameter, in memory of their own."""
        unit, begin, end = self._places[name]
        return self._pieces.read(unit).view(self._dtype)[begin:end].clone()

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Enclose the writes of a step."""
        self._pieces.forget()
        yield
        for unit, (memory, parts) in self._made.items():  # some of it had no gradient, and stays as it is
            new, old = memory.view(self._dtype), self._pieces.read(unit).view(self._dtype)
            for begin, end in parts:
                old[begin:end] = new[begin:end]
            self._pieces.written(unit, old.view(torch.uint8))
        self._made.clear()

    @contextmanager
    def piece(self, piece: StatePiece) -> Iterator[Tensor]:
        """Yield a vector for the new numbers of a piece."""
        unit, first, _ = self._places[piece.name]
        if unit not in self._made:
            self._made[unit] = self._pieces.memory(unit), []
        memory, parts = self._made[unit]
        begin, end = first + piece.begin, first + piece.end
        yield memory.view(self._dtype)[begin:end]
        parts.append((begin, end))
        if sum(end - begin for begin, end in parts) == self._count[unit]:
            self._pieces.written(unit, memory)
            del self._made[unit]

    def whole(self, name: str, values: Tensor) -> None:
        """Replace all of a parameter."""
        with self.piece(StatePiece(name, 0, len(values), 0)) as out:
            out.copy_(values)

    def wait(self) -> None:
        """Wait until all new weights are in the file."""
        self._pieces.settle()
