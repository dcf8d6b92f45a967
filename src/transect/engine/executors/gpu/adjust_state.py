"""Keep the state of logit adjustments (bias, allowed tokens, penalties, min_tokens) on the device between steps.

Each such choice has a row in two tables of ``ops/sampling/adjust_logits.py``: counts of the tokens it has used, and
its bias (-inf for a token that must not be drawn now). The device adds a step's tokens to the counts itself, so nothing
is sent in a steady step. A row is written when a choice first draws, when it returns after others have taken its row,
and when ``min_tokens`` is reached.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ....ops.sampling.adjust_logits import IN_PROMPT, MOST
from ...scheduling.batch import Draw
from ..penalties import is_penalised


@dataclass(slots=True)
class _Line:
    row: int
    next_position: int
    """Position of the draw for which the counts are ready."""
    masked: bool
    last_step: int


class AdjustState:
    """Rows of the tables, by choice; the tables grow when a step needs more.

    ``generation`` changes with the addresses of ``counts`` int16 and ``bias`` float32 ``[lines, V]``.

    Args:
        depth: stages of the pipeline, which is also the number of groups that draw in turns; each group has rows.
    """

    def __init__(self, vocab_size: int, device: torch.device, lines: int = 16, depth: int = 1) -> None:
        self.generation = 0
        self.counts = torch.zeros((lines, vocab_size), dtype=torch.int16, device=device)
        self.bias = torch.zeros((lines, vocab_size), dtype=torch.float32, device=device)
        self._lines: dict[int, _Line] = {}
        self._free = list(range(lines))
        self._kept = depth
        """Latest steps whose lines are kept."""

    @property
    def nbytes(self) -> int:
        return self.counts.nbytes + self.bias.nbytes

    def forget(self) -> None:
        """Free all lines."""
        self._lines.clear()
        self._free = list(range(len(self.counts)))

    def line(self, draw: Draw, position: int, step: int) -> int:
        """Return the line for a draw of this step, up to date; the step then counts the drawn token."""
        line = self._lines.get(draw.seq_id)
        fresh = line is None
        if line is None:
            line = self._lines[draw.seq_id] = _Line(self._take(step), -1, False, step)
        masked = bool(draw.masked_at(position))
        if fresh or line.masked != masked:
            self._write(self.bias, line.row, self._bias_of(draw, position))
        if line.next_position != position and (fresh or is_penalised(draw)):
            self._write(self.counts, line.row, self._counts_of(draw, position))
        line.masked, line.next_position, line.last_step = masked, position + 1, step
        return line.row

    def _take(self, step: int) -> int:
        if not self._free:
            for seq_id, line in list(self._lines.items()):
                if line.last_step < step - self._kept:
                    del self._lines[seq_id]
                    self._free.append(line.row)
        if not self._free:
            held = len(self.counts)
            self.counts = torch.cat((self.counts, torch.zeros_like(self.counts)))
            self.bias = torch.cat((self.bias, torch.zeros_like(self.bias)))
            self._free.extend(range(held, 2 * held))
            self.generation += 1
        return self._free.pop()

    @staticmethod
    def _write(table: Tensor, row: int, values: np.ndarray) -> None:
        source = torch.from_numpy(values)
        if table.is_cuda:
            source = source.pin_memory()
        table[row].copy_(source, non_blocking=True)

    def _bias_of(self, draw: Draw, position: int) -> np.ndarray:
        bias = np.zeros(self.bias.shape[1], np.float32)
        allowed = draw.params.allowed_token_ids
        if allowed is not None:
            bias[:] = -np.inf
            bias[list(allowed)] = 0.0
        for token, value in (draw.params.logit_bias or {}).items():
            bias[token] += value
        bias[list(draw.masked_at(position))] = -np.inf
        return bias

    def _counts_of(self, draw: Draw, position: int) -> np.ndarray:
        counts = np.zeros(self.counts.shape[1], np.int16)
        if is_penalised(draw):
            output = draw.output_token_ids[: position - len(draw.prompt_token_ids)]
            if output:
                used, times = np.unique(np.asarray(output), return_counts=True)
                counts[used] = np.minimum(times, MOST)
            prompt = np.unique(np.asarray(draw.prompt_token_ids))
            counts[prompt] += np.int16(IN_PROMPT)
        return counts
