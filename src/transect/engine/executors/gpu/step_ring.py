"""Host memory of the steps in flight, and the copies to the device and back.

Each step under way has a row of pinned memory for its inputs and one for what it draws, and they take turns. On the
device the inputs lie in one place, the ``arena``, after the tokens that steps draw.

With ``kernels`` both copies are kernels of the step (``ops/comm/ring_copy.py``), so of its CUDA graph, and the device
counts the turns too: every step that is run takes and gives once, and ``ended`` follows on the host. Without, the
copies are torch's, before and after a step.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ....ops.comm.ring_copy import triton_ring_copy
from ....ops.lang.jit import has_dependent_launch
from .step_inputs import StepMemory

RING = 3
"""Steps with separate host memory: one in preparation, one or two in flight."""
LINE = 128
"""Alignment of inputs and results in bytes; kernels copy whole lines."""


def whole_lines(nbytes: int) -> int:
    """Round ``nbytes`` up to whole lines."""
    return -(-nbytes // LINE) * LINE


class StepRing:
    """The ring of one runner.

    Args:
        arena: uint8 on the device; results, ``inputs_at`` bytes of them, then inputs.
        kernels: see above; only for a GPU, or Triton's interpreter.
        rows: steps whose memory is apart.
    """

    def __init__(self, arena: Tensor, inputs_at: int, *, kernels: bool, rows: int = RING) -> None:
        cuda = arena.is_cuda
        self._drawn, self._inputs = arena[:inputs_at], arena[inputs_at:]
        sizes = len(self._inputs), inputs_at
        self._sent, self._given = (torch.zeros((rows, n), dtype=torch.uint8, pin_memory=cuda) for n in sizes)
        self._memory = [StepMemory(row.numpy()) for row in self._sent]
        self._results = [row.numpy() for row in self._given]
        self._busy: list[torch.cuda.Event | None] = [None] * rows
        self._turn = 0
        self._device_turn = torch.zeros(1, dtype=torch.int32, device=arena.device) if kernels else None
        self._words = [t.view(torch.int64) for t in (self._sent, self._inputs, self._drawn, self._given)]
        self._dependent_launch = has_dependent_launch(arena.device)

    def memory(self) -> StepMemory:
        """Return the memory for the inputs of the next step; waits until the device no longer reads it."""
        busy = self._busy[self._turn]
        if busy is not None:
            busy.synchronize()
        return self._memory[self._turn]

    def send(self, nbytes: int) -> None:
        """Copy a step's inputs before the step, unless the step itself does."""
        if self._device_turn is None:
            self._inputs[:nbytes].copy_(self._sent[self._turn, :nbytes], non_blocking=True)

    def take(self, nbytes: int) -> None:
        """Launch the first kernel of a step, which copies its inputs."""
        if self._device_turn is not None:
            sent, inputs, _, _ = self._words
            triton_ring_copy(
                sent, inputs[: whole_lines(nbytes) // 8], self._device_turn, dependent_launch=self._dependent_launch
            )

    def give(self) -> None:
        """Launch the last kernel of a step, which copies its results."""
        if self._device_turn is not None:
            _, _, drawn, given = self._words
            triton_ring_copy(drawn, given, self._device_turn, advance=True, dependent_launch=self._dependent_launch)

    def ended(self) -> int:
        """Advance the turn after a launch. Returns the turn of the launched step."""
        turn = self._turn
        self._turn = (turn + 1) % len(self._memory)
        return turn

    def failed(self) -> None:
        """Wait for the device after a failed step, and take its turn back."""
        for memory in self._memory:
            memory.holds = None
        if self._device_turn is not None:
            self._device_turn.fill_(self._turn)
            self._device_turn.item()  # nothing reads the inputs any more
        elif self._drawn.is_cuda:
            torch.cuda.current_stream(self._drawn.device).synchronize()

    def results(self, turn: int, stream: torch.cuda.Stream | None) -> tuple[np.ndarray, torch.cuda.Event | None]:
        """Return the draws of this turn's step, uint8, and an event after which they are complete (None on a CPU)."""
        if self._device_turn is None:
            self._given[turn].copy_(self._drawn, non_blocking=True)
        if stream is None:
            return self._results[turn].copy(), None
        event = self._busy[turn] = torch.cuda.Event()
        event.record(stream)
        return self._results[turn], event
