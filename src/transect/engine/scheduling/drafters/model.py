"""Draft with a smaller model of the same vocabulary (Leviathan et al. 2023; Chen et al. 2023).

The small model has an executor and a pool of KV blocks of its own. A sequence that drafts for the first time, or again
after steps without drafts, is caught up with: tokens that its prefix cache holds are not computed again. After wrong
drafts the KV after the last right one is overwritten. When the pool is full, sequences that have not drafted for the
longest time lose their blocks.
"""

from __future__ import annotations

from typing import Any

import msgspec

from ..batch import Executor
from ..kv_cache import KVCache
from ..request import Sequence
from ..sequence_blocks import SequenceBlocks
from .drawn import Drafting, DrawnDrafts


class ModelDrafter(DrawnDrafts):
    """Drafts of a smaller model.

    Args:
        executor: runs the small model.
        num_blocks, block_size: its KV pool.
        enable_prefix_caching: find the KV of prompts that begin alike.
        others: see ``DrawnDrafts``.
    """

    def __init__(
        self,
        executor: Executor,
        *,
        num_blocks: int,
        block_size: int,
        enable_prefix_caching: bool = True,
        **others: Any,
    ) -> None:
        super().__init__(executor, **others)
        cache = KVCache(num_blocks, enable_prefix_caching=enable_prefix_caching)
        self._blocks = SequenceBlocks(cache, block_size)
        self._mirrors: dict[int, Sequence] = {}
        """The small model's state of each sequence that holds blocks, by seq_id; the last that drafted comes last."""
        self._known: dict[int, int] = {}
        """By seq_id: output tokens that were known at its last drafts."""

    def behind(self, seq: Sequence) -> int:
        """Return the number of known tokens that a first draft for ``seq`` has to compute, as far as is known."""
        mirror = self._mirrors.get(seq.seq_id)
        if mirror is None:
            return seq.length
        return seq.length - min(mirror.scheduled, seq.prompt_len + self._known[seq.seq_id])

    def ended(self, seq_id: int, output: list[int]) -> None:
        """Forget a sequence; its blocks may be found again by the prefix cache."""
        mirror = self._mirrors.pop(seq_id, None)
        if mirror is not None:
            del self._known[seq_id]
            self._blocks.release(mirror)

    def clear_cache(self) -> None:
        """Forget the KV of prefixes that no sequence holds."""
        self._blocks.cache.clear()

    def _forget_all(self) -> None:
        self._mirrors.clear()
        self._known.clear()
        self._blocks.reset(self._step)

    def _computed(self, seq_id: int, state: Drafting) -> None:
        mirror = self._mirrors[seq_id]
        self._blocks.register(mirror, min(mirror.scheduled, mirror.prompt_len + self._known[seq_id]))

    def _prepare(self, seq: Sequence, count: int, kept: set[int]) -> Drafting | None:
        """Bring the state of a sequence up to its known tokens; see ``DrawnDrafts``."""
        mirror, output = self._mirrors.pop(seq.seq_id, None), seq.output_token_ids
        end = seq.length + count - 1  # the last draft is not computed
        if mirror is None:
            mirror = Sequence(seq.request, seq.seq_id, seq.index, seq.rank, seq.draws[0].seed)
            mirror.output_token_ids.extend(output)
            mirror.length = seq.length
            cached = self._blocks.find_prefix(mirror)
            needed = self._blocks.blocks_for(end) - len(cached) + self._blocks.cache.count_unused(cached)
            if not self._free_blocks(needed, kept):
                return None
            cached = self._blocks.find_prefix(mirror)  # some may have been evicted
            needed = self._blocks.blocks_for(seq.length) - len(cached) + self._blocks.cache.count_unused(cached)
            if needed > self._blocks.cache.num_free:
                return None
            self._blocks.place(mirror, cached)
        else:
            tokens, same = mirror.output_token_ids, self._known[seq.seq_id]
            while same < min(len(tokens), len(output)) and tokens[same] == output[same]:
                same += 1
            del tokens[same:]
            tokens.extend(output[same:])
            mirror.length = seq.length
            mirror.scheduled = min(mirror.scheduled, seq.prompt_len + same, seq.length - 1)
        self._mirrors[seq.seq_id] = mirror
        self._known[seq.seq_id] = len(output)
        while len(mirror.block_ids) < self._blocks.blocks_for(end):
            if not self._free_blocks(1, kept | {seq.seq_id}) or not self._blocks.grow(mirror):
                return None
        self._number += 1  # executors remember what a number drew last, which may have been wrong
        mirror.constraint = None if seq.constraint is None else seq.constraint.fork()
        mirror.draws = (msgspec.structs.replace(mirror.draws[0], seq_id=self._number, constraint=mirror.constraint),)
        return mirror

    def _free_blocks(self, needed: int, kept: set[int]) -> bool:
        """Take blocks of sequences that are not in ``kept`` until ``needed`` are free."""
        for seq_id in list(self._mirrors):
            if self._blocks.cache.num_free >= needed:
                return True
            if seq_id not in kept:
                self.ended(seq_id, [])
        return self._blocks.cache.num_free >= needed
