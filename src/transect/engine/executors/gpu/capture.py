"""The runner of a GPU engine, with its KV cache and the CUDA graphs that are captured at the start."""

from __future__ import annotations

from ....models.decoder import Decoder
from ....parallel.mesh import Mesh
from ....text.grammar.constraint import MaskFiller
from ...kv_size import KVSize
from .large_steps import large_steps
from .measure import NO_FACTORS, runner_of, with_padding_adapter
from .runner import GPURunner
from .setup import Setup
from .startup_times import StartupTimes
from .step_sizes import row_buckets

WARM_WIDTHS = 2
"""Widths of block tables whose graphs are captured at the start where no server waits (contexts up to 4096 tokens)."""


def capture(
    setup: Setup, model: Decoder, cache: KVSize, times: StartupTimes, mesh: Mesh | None = None
) -> tuple[GPURunner, int]:
    """The runner, and the bytes of its KV cache, which has one block more than ``cache`` says, for padding."""
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
        runner.warm(rows, None if setup.irregular else WARM_WIDTHS, mixed=setup.irregular)
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
