"""The runner of a GPU engine, with its KV cache, the CUDA graphs that are captured at the start, and larger steps that
run once to load their kernels."""

from __future__ import annotations

from collections.abc import Iterator

from ....models.decoder import Decoder
from ....parallel.mesh import Mesh
from ....text.grammar.constraint import MaskFiller
from ...kv_size import KVSize
from ...scheduling.batch import Draw, ScheduledBatch, ScheduledRow
from ...scheduling.sampling_params import SamplingParams
from .measure import NO_FACTORS, runner_of, with_padding_adapter
from .runner import GPURunner
from .setup import Setup
from .startup_times import StartupTimes
from .step_sizes import FEWEST_ROWS, row_buckets

WARM_WIDTHS = 2
"""Widths of block tables whose graphs are captured at start-up outside of servers (contexts up to 4096 tokens)."""
EACH = 240
"""Tokens of a prompt of a large step that has several prompts."""
BEGUN = 16
"""Tokens of a prompt that are computed before its chunk."""
_PARAMS = SamplingParams(temperature=0.0)


def capture(
    setup: Setup, model: Decoder, cache: KVSize, times: StartupTimes, mesh: Mesh | None = None
) -> tuple[GPURunner, int]:
    """Build the runner and capture its graphs. Returns the runner and the bytes of its KV cache, which has one block
    more than ``cache`` for padding."""
    config = setup.config
    caches = model.new_kv_cache(cache.num_blocks + 1, config.block_size, setup.cache_dtype)
    for each in caches:
        each[:, -1].zero_()
    limits = setup.limits | {"max_model_len": cache.max_model_len}
    runner = runner_of(
        model,
        caches,
        mesh,
        **limits,
        graphs=config.cuda_graphs != "off",
        sample_on_device=config.gpu.device_sampling,
        fill_masks=MaskFiller(),
        **setup.tricks,
    )
    times.done("KV cache")
    if config.cuda_graphs == "on":
        rows = row_buckets(limits["max_num_seqs"], setup.tricks["fine_rows"])
        drafts = config.speculation is not None
        runner.warm(rows, None if setup.irregular else WARM_WIDTHS, mixed=setup.irregular, drafts=drafts)
        times.done(f"{0 if runner.graphs is None else len(runner.graphs)} CUDA graphs")
        if setup.irregular and (mesh is None or mesh.pipeline.size == 1):
            with_padding_adapter(runner)
            adapters = ("",) if runner.adapters is None else ("", NO_FACTORS)
            for adapter in adapters:
                for batch in large_steps(runner.graph_tokens, cache.num_blocks, **limits, adapter=adapter):
                    runner.submit(batch).result()
            times.done("large steps")
    runner.started()
    return runner, sum(each.nbytes for each in caches)


def large_steps(
    graph_tokens: int,
    padding_block: int,
    *,
    max_num_seqs: int,
    max_num_batched_tokens: int,
    max_model_len: int,
    adapter: str = "",
) -> Iterator[ScheduledBatch]:
    """Yield the smallest steps that are too large for a graph; none where all steps have graphs.

    Kernels of such steps are launched one by one, and each is loaded from Triton's cache at its first launch. So each
    kind of step runs once, before requests arrive, on the padding block of the KV cache: prompts from their first token
    on, and later chunks of prompts, each alone and beside several numbers of decoding sequences.

    Args:
        graph_tokens: tokens of the largest step that has a graph.
        padding_block: block that all rows write to, overwriting each other.
        max_num_seqs, max_num_batched_tokens, max_model_len: the scheduler's limits.
        adapter: adapter of all rows.
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
    """Make a row with a draw, of a sequence that no scheduler knows."""
    seq_id, prompt = -1 - index, (0,) * (start + tokens)
    draw = Draw(seq_id, 0, 0, _PARAMS, prompt, [])
    return ScheduledRow(seq_id, start, tokens, prompt, [], blocks, (draw,), adapter=adapter)
