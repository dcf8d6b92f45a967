"""The KV blocks of sequences over their lives: admission, growth, forks, copy-on-write, and release.

What makes it more than a list of blocks is that steps may be in flight. Blocks that such a step uses are given back
only when its result is known, and a block becomes findable by the prefix cache only when its tokens are known and
written.
"""

from __future__ import annotations

from collections import Counter

from .kv_cache import ROOT_HASH, KVCache, chain_hash
from .request import Sequence


class SequenceBlocks:
    """Moves blocks between a ``KVCache`` and sequences.

    Args:
        cache: the pool.
        block_size: tokens per block.
    """

    def __init__(self, cache: KVCache, block_size: int) -> None:
        self.cache = cache
        self.block_size = block_size
        self.reset(0)

    def reset(self, step: int) -> None:
        """Free all blocks and drop their contents; steps up to number ``step`` are done or void. Sequences must have
        dropped their blocks."""
        self.cache.reset()
        self.committed_step = step
        """Number of the last step up to which all are done."""
        self._after_step: dict[int, list[list[int]]] = {}
        """Blocks to release when a step is done."""
        self._copy_sources: Counter[int] = Counter()
        """References that are held only until a copy out of the block is done."""
        self._copies_of_step: dict[int, list[int]] = {}

    @property
    def returns_pending(self) -> bool:
        """True if a step in flight holds blocks that are released with its result."""
        return bool(self._after_step)

    @property
    def num_pending(self) -> int:
        """References to blocks that are released when the steps in flight are done; some blocks have other users."""
        return sum(len(block_ids) for waiting in self._after_step.values() for block_ids in waiting)

    def held_or_needed(self, seq: Sequence) -> int:
        """Return the blocks of a running sequence, or those that a waiting one needs for its tokens."""
        return len(seq.block_ids) or self.blocks_for(seq.length)

    def blocks_for(self, num_tokens: int) -> int:
        """Return the number of blocks that ``num_tokens`` tokens need."""
        return -(-num_tokens // self.block_size)

    def find_prefix(self, seq: Sequence) -> list[int]:
        """Find cached blocks that begin ``seq``, without taking them; at least its last token is left to compute, and
        those of a prompt whose results are requested."""
        if not self.cache.enable_prefix_caching:
            return []
        most = seq.length - 1 if seq.request.prompt_done else min(seq.length - 1, seq.request.spec.cacheable)
        full = most // self.block_size
        self._extend_hashes(seq, full)
        return self.cache.match(seq.block_hashes[:full])

    def place(self, seq: Sequence, cached: list[int]) -> None:
        """Give a waiting sequence blocks for all its tokens: those found by ``find_prefix``, and fresh ones in
        ascending order (kernels read neighbours at once). The caller has checked that there are enough."""
        self.cache.share(cached)
        fresh: list[int] = []
        for _ in range(self.blocks_for(seq.length) - len(cached)):
            block_id = self.cache.allocate()
            assert block_id is not None, "admission counted the free blocks wrongly"
            fresh.append(block_id)
        seq.block_ids = [*cached, *sorted(fresh)]
        seq.num_registered = len(cached)
        seq.scheduled = len(cached) * self.block_size

    def fork(self, leader: Sequence, choice: Sequence) -> None:
        """Start ``choice`` at the end of the prompt computed by ``leader``, on the same blocks."""
        choice.block_ids = list(leader.block_ids)
        self.cache.share(choice.block_ids)
        choice.block_hashes = list(leader.block_hashes)
        choice.num_registered = leader.scheduled // self.block_size
        choice.scheduled = leader.scheduled

    def owns_shared_block(self, seq: Sequence) -> bool:
        """Return True if no other sequence needs the partly filled block that ``seq`` shared at the fork.

        A planned or running copy out of the block does not count, since it runs before anything written now.
        """
        assert seq.shared_block is not None
        block_id = seq.block_ids[seq.shared_block]
        return self.cache.ref_count(block_id) - self._copy_sources[block_id] == 1

    def copy_shared_block(self, seq: Sequence, step: int) -> tuple[int, int] | None:
        """Give ``seq`` its own copy of the shared block (copy-on-write), in step number ``step``. Returns (source,
        destination), or None if no block is free. The source is held until that step is done."""
        assert seq.shared_block is not None
        target = self.cache.allocate()
        if target is None:
            return None
        source = seq.block_ids[seq.shared_block]
        block_ids = list(seq.block_ids)
        block_ids[seq.shared_block] = target
        seq.block_ids = block_ids
        seq.shared_block = None
        self._copy_sources[source] += 1
        self._copies_of_step.setdefault(step, []).append(source)
        self._after_step.setdefault(step, []).append([source])
        return source, target

    def grow(self, seq: Sequence) -> bool:
        """Add a block to ``seq``; False if none is free."""
        block_id = self.cache.allocate()
        if block_id is None:
            return False
        seq.block_ids.append(block_id)
        return True

    def shrink(self, seq: Sequence, count: int) -> None:
        """Release the blocks of ``seq`` after its first ``count``; no step in flight may use them."""
        surplus = seq.block_ids[count:]
        del seq.block_ids[count:]
        self.cache.release(surplus)

    def register(self, seq: Sequence, computed: int) -> None:
        """Register the full blocks among the first ``computed`` tokens with the prefix cache. Their KV must be written,
        their tokens known."""
        full = computed // self.block_size
        if self.cache.enable_prefix_caching:
            self._extend_hashes(seq, full)
            for i in range(seq.num_registered, full):
                self.cache.register(seq.block_ids[i], seq.block_hashes[i])
        seq.num_registered = full

    def distrust(self, block_ids: list[int]) -> None:
        """Remove blocks from the prefix cache, because logits computed from their contents were not finite."""
        self.cache.forget(block_ids)

    def release(self, seq: Sequence) -> None:
        """Release all blocks of ``seq``: now, or when the last step that uses them is done."""
        block_ids, seq.block_ids = seq.block_ids, []
        seq.scheduled = seq.num_registered = 0
        seq.shared_block = None
        if not block_ids:
            return
        if seq.last_step > self.committed_step:
            self._after_step.setdefault(seq.last_step, []).append(block_ids)
        else:
            self.cache.release(block_ids)

    def step_done(self, step: int) -> None:
        """Release the blocks that waited for the end of ``step``, whose result is known."""
        self.committed_step = step
        for source in self._copies_of_step.pop(step, ()):
            self._copy_sources[source] -= 1
            if not self._copy_sources[source]:
                del self._copy_sources[source]
        for block_ids in self._after_step.pop(step, ()):
            self.cache.release(block_ids)

    def _extend_hashes(self, seq: Sequence, num_blocks: int) -> None:
        hashes = seq.block_hashes
        root = bytes.fromhex(seq.adapter) if seq.adapter else ROOT_HASH
        for i in range(len(hashes), num_blocks):
            start = i * self.block_size
            hashes.append(chain_hash(hashes[-1] if hashes else root, seq.tokens(start, start + self.block_size)))
