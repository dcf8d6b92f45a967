"""The work of a serving step, in the numbers that its time depends on."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple


class StepLoad(NamedTuple):
    """The work of a step of prefill chunks and decodes.

    ``learning.py`` learns times over the first three numbers, ``fitting.py`` over all.
    """

    tokens: int
    keys: int = 0
    """Positions of the KV cache that rows of one token read, in all."""
    pairs: int = 0
    """Positions that the tokens of longer rows attend to, summed over these tokens."""
    rows: int = 0
    chunks: int = 0
    """Rows with more than one token."""
    padded: int = 0
    """Tokens that the device computes, padding included."""
    floor: float = 0.0
    """Least seconds on the device; 0 if not known."""
    flops: float = 0.0
    bytes: float = 0.0

    @classmethod
    def of(cls, rows: Iterable[tuple[int, int]]) -> StepLoad:
        """Count the work of rows of (first position, tokens), without padding and floors."""
        tokens = keys = pairs = count = chunks = 0
        for start, new in rows:
            count += 1
            tokens += new
            if new == 1:
                keys += start + 1
            else:
                chunks += 1
                pairs += new * start + new * (new + 1) // 2
        return cls(tokens, keys, pairs, count, chunks, tokens)
