"""How much memory sums between GPUs go through (``all_reduce.py`` has the method). Plain arithmetic, no torch."""

from __future__ import annotations

LINE, STATE, REGIONS = 16, 256, 4
"""Bytes of a line, of a rank's state, and the number of regions of lines (``all_reduce.cu``)."""
ONE_SHOT_BYTES = 256 << 10
"""Up to which more than two ranks sum in one shot."""
MOST_BYTES = 8 << 20
"""The largest sum that an engine asks the kernels for."""


def memory_bytes(lines: int) -> int:
    """Bytes of a rank's memory with regions of so many lines."""
    return STATE + REGIONS * lines * LINE


def in_two_shots(ranks: int, nbytes: int) -> bool:
    """Whether a sum of so many bytes goes in two shots."""
    return ranks > 2 and nbytes > ONE_SHOT_BYTES


def lines_for(ranks: int, most_bytes: int) -> int:
    """Lines of a region that takes sums of up to so many bytes."""
    vectors = -(-most_bytes // 16)
    if not in_two_shots(ranks, most_bytes):
        return ranks * vectors
    return ranks * max(-(-vectors // ranks), ONE_SHOT_BYTES // 16)
