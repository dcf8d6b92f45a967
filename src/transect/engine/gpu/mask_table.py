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

from ..constraint import Constraint, MaskFiller


class MaskTable:
    """Memory for one step at a time; nothing is taken before the first step that needs it.

    Args:
        max_draws: of one step.
        fill_masks: makes the masks.
    """

    def __init__(self, vocab_size: int, max_draws: int, device: torch.device, fill_masks: MaskFiller) -> None:
        self._vocab_size, self._max_draws, self._device = vocab_size, max_draws, device
        self._fill = fill_masks
        self._sent: Tensor | None = None
        self._words: Tensor | None = None
        self._logits: Tensor | None = None
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._cleared = False
        """The stream of the copies knows that ``words`` have been filled with zeros."""

    @property
    def words(self) -> Tensor:
        """int32 ``[max_draws, ceil(V / 32)]`` on the device: masks of the step's draws under a grammar, in order."""
        if self._words is None:
            shape = (self._max_draws, -(-self._vocab_size // 32))
            self._words = torch.zeros(shape, dtype=torch.int32, device=self._device)
            self._sent = torch.zeros(shape, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        return self._words

    def keep(self, logits_RV: Tensor) -> None:
        """Copy a step's logits to where they wait for the masks."""
        if self._logits is None:
            shape = (self._max_draws, logits_RV.shape[1])
            self._logits = torch.empty(shape, dtype=logits_RV.dtype, device=self._device)
        self._logits[: len(logits_RV)].copy_(logits_RV)

    def kept(self, rows: int) -> Tensor:
        """``[rows, V]``: the logits that wait; always the same memory."""
        assert self._logits is not None, "no logits have been left here"
        return self._logits[:rows]

    def send(self, constraints: Sequence[Constraint]) -> list[str | None]:
        """Make the masks and copy them to ``words``; for each constraint what is wrong, or None.

        The device must be done with the masks before: so it is, once the step that they were for has a result.
        """
        words = self.words
        assert self._sent is not None
        count = len(constraints)
        problems = self._fill(constraints, self._sent.numpy()[:count])
        if self._stream is None:
            words[:count].copy_(self._sent[:count])
            return problems
        draws = torch.cuda.current_stream(self._device)
        if not self._cleared:
            self._stream.wait_stream(draws)
            self._cleared = True
        with torch.cuda.stream(self._stream):
            words[:count].copy_(self._sent[:count], non_blocking=True)
        draws.wait_stream(self._stream)
        return problems
