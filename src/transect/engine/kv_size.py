"""Choose the number of KV blocks, and check that they fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .config import EngineConfig

MIB = 2**20
SHARE_OF_FREE_MEMORY = 4
"""Default divisor of the free memory for the cache, because the machine runs other programs too."""
DEFAULT_MOST_BYTES = 2048 * MIB
"""Upper limit of the cache's default size, in bytes."""


@dataclass(frozen=True, slots=True)
class KVSize:
    """``num_blocks`` of the pool, and the context length that fits, in tokens."""

    num_blocks: int
    max_model_len: int

    @classmethod
    def least(cls, sizes: Sequence[KVSize]) -> KVSize:
        """Return the size that fits on every rank."""
        return cls(min(each.num_blocks for each in sizes), min(each.max_model_len for each in sizes))


def kv_size(
    config: EngineConfig,
    *,
    model_positions: int,
    bytes_per_token: float,
    free_bytes: int,
    max_num_seqs: int | None = None,
    default_bytes: int | None = None,
) -> KVSize:
    """Choose the size of the KV cache.

    Args:
        model_positions: the longest context of the model.
        bytes_per_token: keys and values of all layers.
        free_bytes: memory that is free once the weights are loaded.
        max_num_seqs: sequences that run at the same time; None for the default on a CPU.
        default_bytes: most bytes to take if the configuration gives no size; None for a quarter of the free memory, at
            most 2 GiB.

    Raises:
        ValueError: the context is longer than the model's, or the cache does not fit; the message has the numbers.
    """
    wanted = config.max_model_len
    if wanted is not None and wanted > model_positions:
        raise ValueError(
            f"max_model_len is {wanted}, but the model knows {model_positions} positions: set it to that or less"
        )
    longest = model_positions if wanted is None else wanted
    size = config.block_size
    block_bytes = bytes_per_token * size
    if config.num_kv_blocks is not None:
        blocks = config.num_kv_blocks
    elif config.kv_cache_tokens is not None:
        blocks = -(-config.kv_cache_tokens // size)
    elif config.kv_cache_bytes is not None:
        blocks = int(config.kv_cache_bytes // block_bytes)
    else:
        if default_bytes is None:
            default_bytes = default_cache_bytes(free_bytes)
        usable = (max_num_seqs or config.limits("cpu")[0]) * -(-longest // size)
        blocks = min(usable, int(default_bytes // block_bytes))
    if blocks * block_bytes > free_bytes:
        raise ValueError(
            f"a KV cache of {blocks} blocks of {size} tokens takes {blocks * block_bytes / MIB:.0f} MiB, but "
            f"{free_bytes / MIB:.0f} MiB are free: {int(free_bytes // block_bytes)} blocks "
            f"({int(free_bytes // block_bytes) * size} tokens) would fit"
        )
    held = blocks * size
    if blocks < 1:
        raise ValueError(
            f"there is no room for one KV block of {size} tokens ({block_bytes / MIB:.1f} MiB): make the cache larger "
            "(kv_cache_tokens)"
        )
    if wanted is not None and held < wanted:
        raise ValueError(
            f"max_model_len is {wanted}, but the KV cache holds {held} tokens in all: lower max_model_len, or make the "
            "cache larger (kv_cache_tokens)"
        )
    return KVSize(blocks, min(longest, held))


def default_cache_bytes(free_bytes: int) -> int:
    """Return the bytes that the cache takes on a CPU if the configuration gives no size."""
    return min(free_bytes // SHARE_OF_FREE_MEMORY, DEFAULT_MOST_BYTES)
