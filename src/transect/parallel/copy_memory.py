"""How much memory ranks share for sums by copy engines (``peer_copies.py``). Plain arithmetic, no torch."""

from __future__ import annotations

MOST_RANKS = 8
SLOTS = 3
SIGNALS = 4096
"""Bytes in which others post: of each kind and slot one number for each rank."""
ALIGN = 256
"""Parts begin at multiples of so many bytes."""
CHUNK_BYTES = 64 << 20


def part_bytes(ranks: int, chunk_bytes: int) -> int:
    """The most bytes of a part of a chunk."""
    return max(1, chunk_bytes // (ranks * ALIGN)) * ALIGN


def memory_bytes(ranks: int, chunk_bytes: int = CHUNK_BYTES) -> int:
    """Bytes that each rank shares."""
    return SIGNALS + SLOTS * ranks * part_bytes(ranks, chunk_bytes)
