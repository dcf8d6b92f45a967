"""Draft with an EAGLE-3 head, which reads hidden states of the engine's model (``models/eagle.py``).

The model keeps a feature of each token beside its keys and values, and the head keeps its own keys and values in blocks
of the same numbers: there is no second pool. Entry i of a sequence has feature i and token i + 1, so a sequence of n
tokens has n - 1 entries, and the output of the last one is the first draft. The executor leaves that output as the
feature of the next entry; the model overwrites it when it verifies the drafts.

What the prefix cache gives a sequence holds features, and keys and values of entries only where another sequence has
drafted; so a sequence that drafts for the first time computes all of its entries, one layer of them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import msgspec

from ..batch import Draw, Executor
from ..constraint import Constraint
from ..request import Sequence
from ..sequence_blocks import SequenceBlocks
from .drawn import Drafting, Drafts, DrawnDrafts


@dataclass(slots=True)
class Entries:
    """State of a sequence in the head; see ``Drafting``. Its tokens are those of the sequence from the second one."""

    prompt_token_ids: tuple[int, ...]
    output_token_ids: list[int]
    block_ids: list[int]
    draws: tuple[Draw, ...]
    stop_ids: tuple[int, ...]
    length: int = 0
    scheduled: int = 0
    constraint: Constraint | None = None
    known: int = 0
    """Entries of known tokens at the last drafts: the features of those before the last one are the model's."""


class HeadDrafter(DrawnDrafts):
    """Drafts of a head.

    Args:
        executor: runs the head; it draws at the position after the next (``ahead``).
        blocks: of the engine's sequences.
        others: see ``DrawnDrafts``.
    """

    def __init__(self, executor: Executor, *, blocks: SequenceBlocks, **others: Any) -> None:
        super().__init__(executor, **others)
        self._blocks = blocks
        self._entries: dict[int, Entries] = {}

    def draft(self, wanted: Iterable[tuple[Sequence, int]]) -> Drafts:
        """Draft tokens; see ``DrawnDrafts``. Blocks for the drafts alone are released again: the scheduler adds those
        of the drafts that it takes."""
        asked = list(wanted)
        held = [len(seq.block_ids) for seq, _ in asked]
        try:
            return super().draft(asked)
        finally:
            for (seq, _), count in zip(asked, held, strict=True):
                self._blocks.shrink(seq, max(count, self._blocks.blocks_for(seq.length)))

    def behind(self, seq: Sequence) -> int:
        """Return the number of entries that a first draft for ``seq`` has to compute."""
        entries = self._entries.get(seq.seq_id)
        computed = 0 if entries is None or entries.block_ids is not seq.block_ids else entries.known
        return max(1, seq.length - 1 - computed)

    def ended(self, seq_id: int, output: list[int]) -> None:
        """Forget a sequence."""
        self._entries.pop(seq_id, None)

    def _forget_all(self) -> None:
        self._entries.clear()

    def _prepare(self, seq: Sequence, count: int, kept: set[int]) -> Drafting | None:
        """Bring the state of a sequence up to its known tokens; see ``DrawnDrafts``."""
        if seq.length < 2:
            return None
        while len(seq.block_ids) < self._blocks.blocks_for(seq.length + count):
            if not self._blocks.grow(seq):
                return None
        entries = self._entries.get(seq.seq_id)
        if entries is None or entries.block_ids is not seq.block_ids:  # blocks were lost, or copied
            entries = Entries(seq.prompt_token_ids[1:], [], seq.block_ids, seq.draws[:1], seq.stop_ids)
            self._entries[seq.seq_id] = entries
        entries.output_token_ids[:] = seq.output_token_ids
        entries.length = seq.length - 1
        entries.scheduled, entries.known = min(entries.known, entries.length - 1), entries.length
        self._number += 1  # executors remember what a number drew last, which may have been wrong
        entries.constraint = None if seq.constraint is None else seq.constraint.fork()
        draw = msgspec.structs.replace(
            seq.draws[0],
            seq_id=self._number,
            output_token_ids=entries.output_token_ids,
            constraint=entries.constraint,
        )
        entries.draws = (draw,)
        return entries
