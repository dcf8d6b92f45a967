"""Masks of draws under grammars, on their way to the device, and the logits that wait for them there.

A step's masks are known when the step before has been committed, which is after the step was launched. So it is
launched in two parts: layers and head, whose logits are left here; and, once the masks are there, the draws. The masks
have a stream of their own, so that they are copied while the layers run. Draws with penalties or logprobs find their
logits here too: so one graph of layers and head is for all of them.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ...scheduling.constraint import Constraint, MaskFiller


class MaskTable:
    """Device memory for the masks of one step at a time; allocated by the first step that needs it.

    Args:
        max_draws: of one step.
        fill_masks: makes the masks.
        steps: whose masks may be on their way at once, stages of a pipeline: each has its own place in host memory.
    """

    def __init__(
        self, vocab_size: int, max_draws: int, device: torch.device, fill_masks: MaskFiller, steps: int = 1
    ) -> None:
        self._vocab_size, self._max_draws, self._device = vocab_size, max_draws, device
        self._fill = fill_masks
        self._sent: Tensor | None = None
        self._words: Tensor | None = None
        self._logits: Tensor | None = None
        self._steps, self._turn = steps, 0
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied = [torch.cuda.Event() for _ in range(steps)] if self._stream is not None else []
        """Event of each place in host memory: its masks have been copied."""
        self._used = torch.cuda.Event() if self._stream is not None else None
        """Event: the device has finished reading ``words``."""
        self._cleared = False
        """True once the copying stream has seen that ``words`` were filled with zeros."""

    @property
    def words(self) -> Tensor:
        """int32 ``[max_draws, ceil(V / 32)]`` on the device: masks of the step's draws under a grammar, in order."""
        if self._words is None:
            shape = (self._max_draws, -(-self._vocab_size // 32))
            self._words = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._sent = torch.zeros((self._steps, *shape), dtype=torch.int32, pin_memory=self._device.type == "cuda")
        return self._words

    def keep(self, logits_RV: Tensor) -> None:
        """Copy a step's logits to the memory where they wait for the masks."""
        if self._logits is None:
            shape = (self._max_draws, logits_RV.shape[1])
            self._logits = torch.empty(shape, dtype=logits_RV.dtype, device=self._device)
        self._logits[: len(logits_RV)].copy_(logits_RV)

    def kept(self, rows: int) -> Tensor:
        """Return the waiting logits, ``[rows, V]``, always in the same memory."""
        assert self._logits is not None, "no logits have been stored here"
        return self._logits[:rows]

    def send(self, constraints: Sequence[Constraint]) -> list[str | None]:
        """Make the masks and copy them to ``words`` once the previous step's draws have read those (see ``used``: in a
        pipeline the draws may not have begun). Returns an error or None for each constraint.

        Blocks until the masks of ``steps`` steps before have been copied, as they have where that step has a result.
        """
        words = self.words
        assert self._sent is not None
        turn, count = self._turn, len(constraints)
        self._turn = (turn + 1) % self._steps
        if self._stream is not None:
            self._copied[turn].synchronize()
        sent = self._sent[turn, :count]
        problems = self._fill(constraints, sent.numpy())
        if self._stream is None or self._used is None:
            words[:count].copy_(sent)
            return problems
        draws = torch.cuda.current_stream(self._device)
        if not self._cleared:
            self._stream.wait_stream(draws)
            self._cleared = True
        self._stream.wait_event(self._used)
        with torch.cuda.stream(self._stream):
            words[:count].copy_(sent, non_blocking=True)
        self._copied[turn].record(self._stream)
        draws.wait_stream(self._stream)
        return problems

    def used(self) -> None:
        """Record that the draws which read ``words`` have been launched on this stream."""
        if self._used is not None:
            self._used.record(torch.cuda.current_stream(self._device))
