"""Keep the sequences of recent steps in slots, so that a step's inputs are built by array operations.

A sequence (a row, or a choice that draws) gets a slot when it is first seen: a row in the host copies of block tables
and sampling parameters, and in the record of where its last token was drawn. Slots only cache what batches contain:
slots that the last steps did not use are reassigned when room is needed.
"""

from __future__ import annotations

import numpy as np

from ...scheduling.batch import Draw, ScheduledRow


class SequenceTable:
    """Table of slots for sequences.

    Args:
        max_num_seqs: most sequences of one step.
        max_blocks: most blocks of one sequence.
        block_size: tokens of a block.
        depth: stages of the pipeline: a step may continue the sequences of the step this many steps before.
        ahead: positions after the end of a row that its block table covers too.
    """

    def __init__(self, max_num_seqs: int, max_blocks: int, block_size: int, depth: int = 1, ahead: int = 0) -> None:
        # Two steps' worth may be needed: rows and draws of this one, draws of the last. In a pipeline more of the last.
        slots = (2 + depth) * max_num_seqs + 2
        self._kept = max(1, depth - 1)
        """Latest steps whose slots are kept."""
        self._block_size, self._ahead = block_size, ahead
        self._slot_of: dict[int, int] = {}
        self._free = list(range(slots))
        self._blocks: list[list[int] | None] = [None] * slots
        self._known = np.zeros(slots, np.int32)
        """Filled entries of the block table."""
        self._draws: list[Draw | None] = [None] * slots
        self._used = np.zeros(slots, np.int64)
        """Last step that used the slot."""
        self.table = np.zeros((slots, max_blocks), np.int32)
        self.drawn_step = np.full(slots, -1, np.int64)
        """Last step that drew for the sequence, with the position and the index among the step's draws."""
        self.drawn_position = np.zeros(slots, np.int32)
        self.drawn_index = np.zeros(slots, np.int32)
        self.seed = np.zeros(slots, np.int64)
        self.choice = np.zeros(slots, np.int32)
        self.top_k = np.zeros(slots, np.int32)
        self.temperature = np.zeros(slots, np.float32)
        self.top_p = np.ones(slots, np.float32)
        self.min_p = np.zeros(slots, np.float32)
        self.repetition = np.ones(slots, np.float32)
        self.frequency = np.zeros(slots, np.float32)
        self.presence = np.zeros(slots, np.float32)
        self.adjusted = np.zeros(slots, np.bool_)
        """True if a bias or penalties change every draw."""
        self.masked_until = np.zeros(slots, np.int32)
        """Position up to which some tokens are forbidden."""
        self.logprobs = np.full(slots, -1, np.int32)
        """Requested alternatives; -1 for no logprobs."""

    def forget(self) -> None:
        """Free all slots."""
        self._slot_of.clear()
        self._free = list(range(len(self._blocks)))

    def row(self, row: ScheduledRow, step: int) -> int:
        """Return the slot of a row's sequence, with an up-to-date block table."""
        slot = self._slot_of.get(row.seq_id)
        if slot is None:
            slot = self._enter(row.seq_id, step)
        self._used[slot] = step
        needed = -(-(row.start + row.num_tokens + self._ahead) // self._block_size)
        if self._blocks[slot] is not row.block_ids:
            self._blocks[slot] = row.block_ids
            self._known[slot] = 0
        known = int(self._known[slot])
        if known < needed:
            self.table[slot, known:needed] = row.block_ids[known:needed]
            self._known[slot] = needed
        return slot

    def grown(self, slots: np.ndarray, ends: np.ndarray, step: int) -> np.ndarray:
        """Record that a step uses these slots. Returns the indices of slots that lack blocks for their first ``ends``
        tokens."""
        self._used[slots] = step
        return np.flatnonzero(self._known[slots] * self._block_size < ends + self._ahead)

    def draw(self, draw: Draw, step: int) -> int:
        """Return the slot of the sequence that a token is drawn for, with its parameters filled in."""
        slot = self._slot_of.get(draw.seq_id)
        if slot is None:
            slot = self._enter(draw.seq_id, step)
        self._used[slot] = step
        if self._draws[slot] is not draw:
            self._fill(slot, draw)
        return slot

    def _enter(self, seq_id: int, step: int) -> int:
        if not self._free:
            for other, slot in list(self._slot_of.items()):
                if self._used[slot] < step - self._kept:
                    del self._slot_of[other]
                    self._free.append(slot)
        slot = self._slot_of[seq_id] = self._free.pop()
        self._blocks[slot] = self._draws[slot] = None
        self.drawn_step[slot] = -1
        return slot

    def _fill(self, slot: int, draw: Draw) -> None:
        self._draws[slot] = draw
        params = draw.params
        self.seed[slot] = draw.seed - 2**64 if draw.seed >= 2**63 else draw.seed
        self.choice[slot] = draw.choice
        self.top_k[slot] = max(0, min(params.top_k, 2**31 - 1))
        self.temperature[slot] = params.temperature
        self.top_p[slot] = params.top_p
        self.min_p[slot] = params.min_p
        self.repetition[slot] = params.repetition_penalty
        self.frequency[slot] = params.frequency_penalty
        self.presence[slot] = params.presence_penalty
        penalised = params.repetition_penalty != 1.0 or params.presence_penalty or params.frequency_penalty
        self.adjusted[slot] = penalised or draw.biased
        self.masked_until[slot] = draw.min_position if draw.stop_ids else 0
        self.logprobs[slot] = -1 if params.logprobs is None else params.logprobs
