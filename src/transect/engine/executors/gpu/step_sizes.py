"""Padded sizes of steps on a device, which keep the kinds of kernels and CUDA graphs few."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

FEWEST_ROWS = 16
"""Fewest rows of a padded step with prefill chunks, and of rows reserved for its prompts."""
SMALLEST_WIDTH = 1024
"""Positions covered by the narrowest block table of a graph."""
MIXED_WIDTHS = (4096, 16384)
"""Positions covered by block tables of steps with prefill chunks, besides the full width."""
FINE_TOKENS = 512
"""Most tokens of steps whose numbers of rows are finely graded; larger steps, or those with longer sequences, have one
of two."""
COARSE_ROWS = 64
"""The smaller of the two numbers of rows for steps above ``FINE_TOKENS``."""
FINE_ROWS = (48, 96, 160, 192, 208)
"""Numbers of sequences that have graphs besides powers of two. From about 100 rows on, products are bound by
arithmetic, so padding rows take time. (224 rows were slower than 256: few tilings end there.)"""
QUARTERS = {True: 2048, False: 512}
"""Tokens up to which there is a graph for each quarter of a power of two, and not only for each half: for sequences of
up to ``MIXED_WIDTHS[0]`` tokens, and for longer ones."""
SLOWER = {192: 256, 224: 256, 448: 512}
"""Sizes that take longer than the next larger size, which replaces them: products come in tiles of 128 rows. A step of
an 8B model takes 7.3 ms for 192 tokens, 7.9 for 224 and 7.0 for 256; 15.0 for 448 and 12.3 for 512 (H200)."""


def row_bucket(rows: int, fine: bool = False) -> int:
    """Round ``rows`` up to the rows of a graph: a power of two, above 256 a multiple of 256.

    The products' tiles have such heights, and bulk copies of a tile that reaches past the end of a tensor are slow: a
    step of an 8B model takes 17 ms for 160 rows, and 13 for 256 (H200). ``fine``: ``FINE_ROWS`` too, where products
    take any number of rows, and above 256 multiples of 128, the height of Hopper's tiles.
    """
    if rows > 256:
        step = 128 if fine else 256
        return -(-rows // step) * step
    power = 1 << (rows - 1).bit_length()
    return min(power, next((each for each in FINE_ROWS if each >= rows), power)) if fine else power


def row_buckets(max_num_seqs: int, fine: bool = False) -> list[int]:
    """List all padded numbers of rows of decode steps of up to ``max_num_seqs`` sequences, largest first."""
    return sorted({row_bucket(rows, fine) for rows in range(1, max_num_seqs + 1)}, reverse=True)


def token_bucket(tokens: int, quarters: int = QUARTERS[True]) -> int:
    """Round ``tokens`` up to the tokens of a graph with prefill chunks: at least 64, then in steps of a quarter to an
    eighth, above ``quarters`` of a half to a quarter, skipping sizes that are ``SLOWER``."""
    if tokens <= 64:
        return 64
    step = 1 << ((tokens - 1).bit_length() - (3 if tokens <= quarters else 2))
    size = -(-tokens // step) * step
    return SLOWER.get(size, size)


def width_bucket(blocks: int, block_size: int, most: int) -> int:
    """Return the columns of the block table for sequences of up to ``blocks`` blocks: enough for 1024 positions, or 4,
    16, ... times as many, or all. (A wider table costs microseconds to copy; each width has graphs of its own.)"""
    width = max(1, SMALLEST_WIDTH // block_size)
    while width < blocks:
        width *= 4
    return min(width, most)


def widths(block_size: int, most: int) -> list[int]:
    """List all results of ``width_bucket``, narrowest first."""
    found = [width_bucket(1, block_size, most)]
    while found[-1] < most:
        found.append(width_bucket(found[-1] + 1, block_size, most))
    return found


class MixedSize(NamedTuple):
    """Tokens, rows and columns of the block table of the graph of a step with prefill chunks."""

    tokens: int
    rows: int
    width: int


def mixed_size(tokens: int, rows: int, blocks: int, block_size: int, most: int, max_rows: int) -> MixedSize:
    """Return the padded size of a step with prefill chunks.

    Args:
        tokens: number of tokens to compute.
        rows: places for prompts, and sequences that decode.
        blocks: of the longest sequence.
        block_size, most: tokens of a block of the cache, blocks of the longest sequence that there may be.
        max_rows: as ``rows``, for as many sequences as there may be.
    """
    width = next((each for each in _mixed_widths(block_size, most) if each >= blocks), most)
    narrow = width * block_size <= MIXED_WIDTHS[0]
    tokens = token_bucket(tokens, QUARTERS[narrow])
    largest = max(2 * FEWEST_ROWS, row_bucket(max_rows))
    count = max(2 * FEWEST_ROWS, row_bucket(rows))
    if tokens > FINE_TOKENS or not narrow:
        count = max(count, largest if rows > COARSE_ROWS else COARSE_ROWS)
    return MixedSize(tokens, ragged_rows(tokens, count), width)


def mixed_sizes(max_tokens: int, block_size: int, most: int, max_num_seqs: int) -> list[MixedSize]:
    """List all results of ``mixed_size`` for up to ``max_tokens`` tokens with up to ``FEWEST_ROWS`` prompts, narrow
    block tables first, largest steps first."""
    found: dict[MixedSize, None] = {}
    for blocks in _mixed_widths(block_size, most):
        quarters = QUARTERS[blocks * block_size <= MIXED_WIDTHS[0]]
        buckets = {token_bucket(tokens, quarters): tokens for tokens in range(2, max_tokens + 1)}
        for tokens in sorted(buckets.values(), reverse=True):
            for decodes in range(min(tokens, max_num_seqs), -1, -1):
                rows = FEWEST_ROWS + decodes
                size = mixed_size(tokens, rows, blocks, block_size, most, FEWEST_ROWS + max_num_seqs)
                found.setdefault(size)
    return list(found)


def _mixed_widths(block_size: int, most: int) -> list[int]:
    return sorted({min(most, -(-positions // block_size)) for positions in MIXED_WIDTHS} | {most})


def ragged_rows(tokens: int, rows: int) -> int:
    """Return the rows of a step with prefill chunks; never equal to ``tokens``, which would mark a step that only
    decodes."""
    count = max(FEWEST_ROWS, row_bucket(rows))
    return count + FEWEST_ROWS * (count == tokens)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPadding:
    """Padded step sizes of one engine, used to predict its step times.

    Attributes:
        graph_tokens: tokens of the largest step with prefill chunks that has a graph.
        fine: see ``row_bucket``. multiple: of tokens, in larger steps.
        rows: most sequences. context: most positions of a sequence.
    """

    graph_tokens: int
    rows: int
    context: int
    fine: bool = False
    multiple: int = 1
    block_size: int = 16

    def decodes(self, rows: int) -> int:
        """Return the tokens of a step that only decodes ``rows`` sequences, padding included."""
        return row_bucket(rows, self.fine)

    def tokens(self, tokens: int, rows: int, chunks: int, longest: int) -> int:
        """Return the tokens of a step, padding included; ``chunks`` of its rows have several tokens, and its longest
        sequence reaches position ``longest``."""
        if not chunks:
            return self.decodes(rows)
        if tokens > self.graph_tokens:
            return -(-tokens // self.multiple) * self.multiple
        size, most = self.block_size, -(-self.context // self.block_size)
        places = max(FEWEST_ROWS, row_bucket(chunks)) + rows - chunks
        return mixed_size(tokens, places, -(-longest // size), size, most, FEWEST_ROWS + self.rows).tokens
