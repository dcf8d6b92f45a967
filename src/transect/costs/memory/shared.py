"""Memory that GPUs share for sums: by kernels (``ops/comm/all_reduce.py``) and by copy engines
(``parallel/peer_copies.py``)."""

from __future__ import annotations

LINE, STATE, REGIONS = 16, 256, 4
"""Bytes of a line, of a rank's state, and the number of regions of lines (``ops/comm/all_reduce.cu``)."""
ONE_SHOT_BYTES = 256 << 10
"""Largest sum, in bytes, that more than two ranks compute in one shot."""
MOST_BYTES = 8 << 20
"""Largest sum, in bytes, that an engine passes to the kernels."""


def sums_bytes(lines: int) -> int:
    """Return the bytes of a rank's memory with regions of ``lines`` lines."""
    return STATE + REGIONS * lines * LINE


def in_two_shots(ranks: int, nbytes: int) -> bool:
    """Return True if a sum of ``nbytes`` bytes takes two shots."""
    return ranks > 2 and nbytes > ONE_SHOT_BYTES


def lines_for(ranks: int, most_bytes: int) -> int:
    """Return the lines of a region that takes sums of up to ``most_bytes``."""
    vectors = -(-most_bytes // 16)
    if not in_two_shots(ranks, most_bytes):
        return ranks * vectors
    return ranks * max(-(-vectors // ranks), ONE_SHOT_BYTES // 16)


# ---- copy engines --------------------------------------------------------------------------------------------------

COPY_RANKS = 8
"""Most ranks that sum by copy engines."""
SLOTS = 3
SIGNALS = 4096
"""Bytes of the other ranks' signals: one number for each kind, slot and rank."""
ALIGN = 256
"""Alignment of parts in bytes."""
CHUNK_BYTES = 64 << 20


def part_bytes(ranks: int, chunk_bytes: int) -> int:
    """Return the most bytes of a part of a chunk."""
    return max(1, chunk_bytes // (ranks * ALIGN)) * ALIGN


def copies_bytes(ranks: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Return the bytes that each rank shares."""
    return SIGNALS + SLOTS * ranks * part_bytes(ranks, chunk_bytes)
