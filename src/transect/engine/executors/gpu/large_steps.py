"""Warm up steps that are too large for a CUDA graph, before requests arrive.

Kernels of such steps are launched one by one, and each is loaded from Triton's cache at its first launch. So each kind
of step runs once on the padding block of the KV cache: prompts from their first token on, and later chunks of prompts,
each alone and beside several numbers of decoding sequences.
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
    graph_tokens: int,
    padding_block: int,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    adapter: str = "",
) -> Iterator[ScheduledBatch]:
    """The smallest steps that no graph is for; none where graphs are for all.

    Args:
        graph_tokens: tokens of the largest step that has a graph.
        padding_block: block that all rows write to, overwriting each other.
        max_num_seqs, max_num_batched_tokens, max_model_len: the scheduler's limits.
        adapter: of all rows.
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
                yield ScheduledBatch(0, tuple(_row(index, *size, blocks, adapter) for index, size in enumerate(sizes)))


def _row(index: int, start: int, tokens: int, blocks: list[int], adapter: str) -> ScheduledRow:
    """A row of a sequence that no scheduler knows, with a draw."""
    seq_id, prompt = -1 - index, (0,) * (start + tokens)
    draw = Draw(seq_id, 0, 0, _PARAMS, prompt, [])
    return ScheduledRow(seq_id, start, tokens, prompt, [], blocks, (draw,), adapter=adapter)
