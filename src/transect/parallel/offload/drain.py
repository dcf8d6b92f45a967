"""Move gradients from a device into host memory during the backward pass.

A gradient is copied, a part at a time, through pinned buffers on a stream of its own, and forgotten on the device as
soon as that is done. A thread here takes each part in: the first gradient of a step is stored, those of later
micro-batches are added to it in float32. It also adds up their squares, so the norm is known when the last part is
there.
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor

import torch
from torch import Tensor

from ...hardware.host_memory import Ring, Slot
from ...ops.cpu.adamw import HostKernels, TorchKernels

PART = 2**23
"""Numbers of a gradient that are copied together."""
SLOTS = 8


class Drain:
    """Host memory in which gradients are accumulated.

    Args:
        into: target of each gradient by name: contiguous, in host memory, with as many numbers.
        kernels: used by one thread at a time, while something is on its way.
        part: numbers that are copied together.
    """

    def __init__(
        self,
        into: Mapping[str, Tensor],
        kernels: HostKernels | TorchKernels,
        *,
        part: int = PART,
    ) -> None:
        self.into = {name: tensor.view(-1) for name, tensor in into.items()}
        self.kernels, self.part = kernels, part
        self.given: set[str] = set()
        """Names of gradients received since ``clear``."""
        self._parts: set[tuple[str, int]] = set()
        """Parameters, with the offsets of their received parts."""
        self._squares: dict[tuple[str, int], float] = {}
        self._under_way: list[Future[None]] = []
        self._stream: torch.cuda.Stream | None = None
        self._free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="gradients")

    def _stream_of(self, device: torch.device) -> torch.cuda.Stream:
        """Return the stream of copies from a GPU, created with its buffers when the first gradient arrives from
        there."""
        if self._stream is None:
            self._stream = torch.cuda.Stream(device)
            for slot in Ring(SLOTS, 4 * self.part, pin=True).slots:
                self._free.put(slot)
        return self._stream

    @torch.no_grad()
    def take(self, name: str, gradient: Tensor, first: int = 0) -> None:
        """Start accumulating a gradient, which the caller may drop: on a GPU its memory is kept until it is copied.
        ``first``: offset of the gradient's numbers; each part of a parameter is given separately every time."""
        add = (name, first) in self._parts
        self._parts.add((name, first))
        self.given.add(name)
        flat = gradient.detach().reshape(-1)
        if not flat.is_cuda:
            self._take_in(name, first, flat, add)
            return
        stream = self._stream_of(flat.device)
        stream.wait_stream(torch.cuda.current_stream(flat.device))
        for begin in range(0, flat.numel(), self.part):
            some = flat[begin : begin + self.part]
            slot = self._free.get()
            place = slot.view(some.numel(), some.dtype)
            with torch.cuda.stream(stream):
                place.copy_(some, non_blocking=True)
            slot.busy_until(stream)
            self._under_way.append(self._thread.submit(self._arrived, name, first + begin, slot, place, add))
        flat.record_stream(stream)

    def _arrived(self, name: str, begin: int, slot: Slot, place: Tensor, add: bool) -> None:
        try:
            slot.wait()
            self._take_in(name, begin, place, add)
        finally:
            self._free.put(slot)

    def _take_in(self, name: str, begin: int, some: Tensor, add: bool) -> None:
        into = self.into[name][begin : begin + some.numel()]
        self._squares[name, begin] = self.kernels.take_in(some, into, add)

    def wait(self) -> None:
        """Wait until all gradients have arrived."""
        under_way, self._under_way = self._under_way, []
        for part in under_way:
            part.result()

    def squares(self, counts: Callable[[str], bool] = lambda name: True) -> float:
        """Return the sum of the squares of all gradients that count, by their names; waits for all."""
        self.wait()
        return sum(self._squares[key] for key in sorted(self._squares) if counts(key[0]))

    def clear(self) -> None:
        """Drop all gradients."""
        self.wait()
        self.given.clear()
        self._parts.clear()
        self._squares.clear()
