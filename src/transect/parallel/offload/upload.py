"""Transfer of new weights from host memory to a device, while the CPU computes the next ones."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from ...hardware.host_memory import Ring
from .groups import GROUP, StatePiece

SLOTS = 4


class Upload:
    """Copies new pieces of parameters to the device.

    Args:
        parameters: contiguous, on one device.
        most: numbers of a piece.
    """

    def __init__(self, parameters: Mapping[str, Tensor], device: torch.device, most: int = GROUP) -> None:
        self._flat = {name: parameter.detach().view(-1) for name, parameter in parameters.items()}
        self._stream: torch.cuda.Stream | None = None
        if device.type == "cuda" and self._flat:
            widest = max(parameter.element_size() for parameter in parameters.values())
            self._stream = torch.cuda.Stream(device)
            self._ring = Ring(SLOTS, widest * most, pin=True)

    def read(self, name: str) -> Tensor:
        """Return the numbers of a parameter, on the host."""
        return self._flat[name].cpu()

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Enclose the copies of a step: they wait for the device's use of the old weights, and its later work waits for
        them."""
        if self._stream is None:
            yield
            return
        current = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(current)
        yield
        current.wait_stream(self._stream)

    @contextmanager
    def piece(self, piece: StatePiece) -> Iterator[Tensor]:
        """Yield a vector in host memory for the new numbers of a piece, which are sent afterwards."""
        target = self._flat[piece.name][piece.begin : piece.end]
        if self._stream is None:
            yield target
            return
        slot = self._ring.take()
        made = slot.view(target.numel(), target.dtype)
        yield made
        with torch.cuda.stream(self._stream):
            target.copy_(made, non_blocking=True)
        slot.busy_until(self._stream)

    def whole(self, name: str, values: Tensor) -> None:
        """Send all of a parameter, from pinned memory that must not change until ``wait``."""
        with torch.cuda.stream(self._stream):  # None: on the host, at once
            self._flat[name].copy_(values, non_blocking=True)

    def wait(self) -> None:
        """Wait until all sent weights have arrived."""
        if self._stream is not None:
            self._stream.synchronize()
