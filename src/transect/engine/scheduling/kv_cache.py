"""Manage the pool of KV blocks: their references, and the contents that can be reused (the prefix cache).

The memory of keys and values is cut into blocks of ``block_size`` tokens (PagedAttention, Kwon et al. 2023). A block
has a reference count. When the count falls to zero the block is free, but until it is reused its contents can be found
under the hash of all tokens up to its end; the block unused for the longest time is reused first (LRU).

The hash of a block is BLAKE2b-256 over the hash of the block before it and its own tokens, so it identifies the
whole prefix. Before the first block stands the content id of the request's adapter, if it has one. Collisions are
infeasible, even for an attacker who searches for them.

This file is bookkeeping only: block numbers in, block numbers out, no tensor.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from hashlib import blake2b

ROOT_HASH = b""

RULES = {"eviction": {"by": ("KVCache.allocate", "KVCache.release"), "settings": {"num_blocks": 60}}}


def chain_hash(parent: bytes, token_ids: Iterable[int]) -> bytes:
    """Hash (32 bytes) of a full block: of ``parent``, the hash of the block before (for the first ``ROOT_HASH``, or the
    32 bytes of an adapter's id), and the block's own tokens (each below 2**31)."""
    return blake2b(parent + array("i", token_ids).tobytes(), digest_size=32).digest()


class KVCache:
    """Reference-counted blocks ``0 .. num_blocks - 1`` and the prefix cache over them.

    Args:
        num_blocks: size of the pool.
        enable_prefix_caching: without it nothing is registered and nothing found.
    """

    def __init__(self, num_blocks: int, *, enable_prefix_caching: bool = True) -> None:
        self.num_blocks = num_blocks
        self.enable_prefix_caching = enable_prefix_caching
        self.evictions = 0
        """Blocks whose cached contents were dropped for new ones."""
        self.reset()

    def reset(self) -> None:
        """Free all blocks and forget their contents."""
        self._refs = [0] * self.num_blocks
        self._blank = list(range(self.num_blocks - 1, -1, -1))
        """Free blocks without reusable contents; the last is taken first."""
        self._unused: OrderedDict[int, None] = OrderedDict()
        """Free blocks with registered contents, least recently used first."""
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that can be taken now, those with cached contents included."""
        return len(self._blank) + len(self._unused)

    @property
    def num_cached(self) -> int:
        """Free blocks whose contents can still be found."""
        return len(self._unused)

    def unused(self) -> Iterable[int]:
        """Iterate over the free blocks whose contents can still be found, the one that is reused first at the
        beginning."""
        return self._unused

    def ref_count(self, block_id: int) -> int:
        """Return the number of sequences and steps in flight that refer to the block."""
        return self._refs[block_id]

    def allocate(self) -> int | None:
        """Take a free block (reference count 1), dropping its cached contents; None if there is none."""
        if self._blank:
            block_id = self._blank.pop()
        elif self._unused:
            block_id, _ = self._unused.popitem(last=False)
            self._unregister(block_id)
            self.evictions += 1
        else:
            return None
        self._refs[block_id] = 1
        return block_id

    def share(self, block_ids: Iterable[int]) -> None:
        """Add a reference to each block, which is in use already, or free and found by ``match``."""
        refs = self._refs
        for block_id in block_ids:
            if refs[block_id] == 0:
                del self._unused[block_id]
            refs[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Remove a reference from each block. Later blocks of a sequence count as older in the LRU order: a prefix is
        worthless without its beginning, but not without its end."""
        refs = self._refs
        for block_id in reversed(block_ids):
            assert refs[block_id] > 0, f"block {block_id} was released more often than taken"
            refs[block_id] -= 1
            if refs[block_id] == 0:
                if block_id in self._hash_of:
                    self._unused[block_id] = None
                else:
                    self._blank.append(block_id)

    def match(self, hashes: Iterable[bytes]) -> list[int]:
        """Return the blocks that hold the longest cached prefix of a chain of hashes, without adding references."""
        found: list[int] = []
        for key in hashes:
            block_id = self._block_of.get(key)
            if block_id is None:
                break
            found.append(block_id)
        return found

    def count_unused(self, block_ids: Iterable[int]) -> int:
        """Return the number of the blocks without a reference."""
        return sum(self._refs[block_id] == 0 for block_id in block_ids)

    def register(self, block_id: int, key: bytes) -> None:
        """Make the contents of a full, computed block reusable. If another block has the same contents, that one stays
        registered."""
        if self.enable_prefix_caching and key not in self._block_of and block_id not in self._hash_of:
            self._block_of[key] = block_id
            self._hash_of[block_id] = key

    def forget(self, block_ids: Iterable[int]) -> None:
        """Unregister the contents of blocks, because they may be wrong."""
        for block_id in block_ids:
            self._unregister(block_id)
            if block_id in self._unused:
                del self._unused[block_id]
                self._blank.append(block_id)

    def clear(self) -> None:
        """Unregister all cached contents. Blocks in use keep their references."""
        self._hash_of.clear()
        self._block_of.clear()
        self._blank.extend(reversed(self._unused))
        self._unused.clear()

    def _unregister(self, block_id: int) -> None:
        key = self._hash_of.pop(block_id, None)
        if key is not None:
            del self._block_of[key]
