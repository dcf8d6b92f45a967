"""Steps that are too large for a graph, run once before requests come.

Their kernels are launched one by one, and each is read from Triton's cache when it is met for the first time. So the
kinds of such steps are run on the block of the cache that belongs to nobody: prompts from their first token on, and
chunks of prompts that have begun, each alone and beside several numbers of sequences that decode.
"""

from __future__ import annotations

from collections.abc import Iterator

from ...scheduling.batch import Draw, ScheduledBatch, ScheduledRow
from ...scheduling.sampling_params import SamplingParams
from .step_sizes import FEWEST_ROWS

EACH = 240
"""Tokens of a prompt, where there are several."""
BEGUN = 16
"""Tokens of a prompt that are computed before its chunk."""
_PARAMS = SamplingParams(temperature=0.0)


def large_steps(
    graph_tokens: int, padding_block: int, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int
) -> Iterator[ScheduledBatch]:
    """The smallest steps that no graph is for; none where graphs are for all.

    Args:
        graph_tokens: tokens of the largest step that has a graph.
        padding_block: what all rows write to, one over the other.
        max_num_seqs, max_num_batched_tokens, max_model_len: the scheduler's limits.
    """
    blocks = [padding_block] * max_model_len
    for decodes in (0, FEWEST_ROWS, 4 * FEWEST_ROWS, 16 * FEWEST_ROWS):
        tokens = graph_tokens + 1
        if decodes + tokens > max_num_batched_tokens or max_model_len <= BEGUN:
            return
        for start, longest in ((0, EACH), (BEGUN, max_num_batched_tokens)):
            longest = min(longest, max_model_len - start)
            pieces = [min(longest, tokens - at) for at in range(0, tokens, longest)]
            sizes = [(start, piece) for piece in pieces] + [(BEGUN, 1)] * decodes
            if len(sizes) <= max_num_seqs:
                yield ScheduledBatch(0, tuple(_row(index, *size, blocks) for index, size in enumerate(sizes)))


def _row(index: int, start: int, tokens: int, blocks: list[int]) -> ScheduledRow:
    """A row of a sequence that no scheduler knows, with a draw."""
    seq_id, prompt = -1 - index, (0,) * (start + tokens)
    draw = Draw(seq_id, 0, 0, _PARAMS, prompt, [])
    return ScheduledRow(seq_id, start, tokens, prompt, [], blocks, (draw,))
