"""The sizes that steps on a device are padded to, so that there are few kinds of kernels and few CUDA graphs."""

from __future__ import annotations

FEWEST_ROWS = 16
"""The least number of rows in a padded step with prefill chunks, and of rows kept for its prompts."""
SMALLEST_WIDTH = 1024
"""Positions that the narrowest block table of a graph covers."""


def row_bucket(rows: int, fine: bool = False) -> int:
    """Rows that a graph for ``rows`` has: a power of two, above 256 a multiple of 256.

    The products' tiles have such heights, and bulk copies of a tile that reaches past the end of a tensor are slow: a
    step of an 8B model takes 17 ms for 160 rows, and 13 for 256 (H200). ``fine``: 96, 160 and 192 too, where products
    take any number of rows: a layer's take 112, 146 and 163 us there, 125 at 128 rows, 170 at 256, and 182 at 224.
    """
    if fine and (64 < rows <= 96 or 128 < rows <= 192):
        return -(-rows // 32) * 32
    return 1 << (rows - 1).bit_length() if rows <= 256 else -(-rows // 256) * 256


def row_buckets(max_num_seqs: int, fine: bool = False) -> list[int]:
    """Every number of rows that a decode step of up to ``max_num_seqs`` sequences is padded to, the largest first."""
    return sorted({row_bucket(rows, fine) for rows in range(1, max_num_seqs + 1)}, reverse=True)


def token_bucket(tokens: int) -> int:
    """Tokens that a graph for a step with prefill chunks has: at least 64, then in steps of a quarter to an eighth."""
    if tokens <= 64:
        return 64
    step = 1 << ((tokens - 1).bit_length() - 3)
    return -(-tokens // step) * step


def width_bucket(blocks: int, block_size: int, most: int) -> int:
    """Columns of the block table for sequences of up to ``blocks`` blocks: a power of two, or all."""
    width = max(1, SMALLEST_WIDTH // block_size)
    while width < blocks:
        width *= 2
    return min(width, most)


def filled_rows(tokens: int) -> list[int]:
    """Every number of rows that a step padded to ``tokens`` has, with up to ``FEWEST_ROWS`` prompts in it."""
    return sorted({ragged_rows(tokens, FEWEST_ROWS + decodes) for decodes in range(1, tokens)})


def ragged_rows(tokens: int, rows: int) -> int:
    """Rows of the graph of a step with prefill chunks. As many as tokens would look like a step that only decodes."""
    count = max(FEWEST_ROWS, row_bucket(rows))
    return count + FEWEST_ROWS * (count == tokens)
