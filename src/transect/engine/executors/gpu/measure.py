"""Measures the GPU memory of the largest step by running it."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from ....models.decoder import Decoder
from ....parallel.experts import meeting
from ....parallel.mesh import Mesh
from ...scheduling.batch import Draw, ScheduledBatch, ScheduledRow
from ...scheduling.sampling_params import SamplingParams
from ..adapter_slots import AdapterSlots
from .runner import GPURunner
from .setup import Setup
from .sharing_runner import GPUSharingRunner, GPUSharingStageRunner
from .stage_runner import GPUStageRunner

NO_FACTORS = "none"
"""Name of the adapter of ``with_padding_adapter``."""


class MeasuredBytes(NamedTuple):
    """Bytes."""

    tables: int
    """Bytes of a runner's tables: the inputs of its steps."""
    largest_step: int
    """Bytes of activations and logits."""


def measure(setup: Setup, model: Decoder, mesh: Mesh | None = None) -> MeasuredBytes:
    """Run the largest steps once, on a cache of two blocks. All ranks of a ``mesh`` must call it."""
    held = torch.cuda.memory_allocated(setup.device)
    runner = trial_runner(model, setup.config.block_size, setup.cache_dtype, mesh, **setup.tricks, **setup.limits)
    tables = torch.cuda.memory_allocated(setup.device) - held
    torch.cuda.reset_peak_memory_stats(setup.device)
    with_padding_adapter(runner)
    run_largest_steps(runner, **setup.limits)
    peak = torch.cuda.max_memory_allocated(setup.device) - held - tables
    del runner
    torch.cuda.empty_cache()
    return MeasuredBytes(tables, peak)


def trial_runner(
    model: Decoder,
    block_size: int,
    dtype: torch.dtype,
    mesh: Mesh | None = None,
    *,
    sample_on_device: bool = True,
    **settings: Any,
) -> GPURunner:
    """Build a runner without graphs on a cache of two blocks, to try steps; ``settings`` as for ``GPURunner``."""
    caches = model.new_kv_cache(2, block_size, dtype)
    for cache in caches:
        cache.zero_()
    return runner_of(model, caches, mesh, graphs=False, sample_on_device=sample_on_device, **settings)


def runner_of(model: Decoder, caches: tuple[Tensor, Tensor], mesh: Mesh | None, **options: Any) -> GPURunner:
    """Build the executor of a model or of a pipeline stage; ``options`` as for ``GPURunner``."""
    if mesh is not None:
        options.setdefault("anyone", lambda own: any(mesh.world.exchange(own)))
    sharing = meeting(model)
    if mesh is not None and mesh.pipeline.size > 1:
        if sharing is not None:
            return GPUSharingStageRunner(model, *caches, sharing, mesh=mesh, **options)
        return GPUStageRunner(model, *caches, mesh, **options)
    if sharing is not None:
        return GPUSharingRunner(model, *caches, sharing, **options)
    return GPURunner(model, *caches, **options)


def with_padding_adapter(runner: GPURunner) -> None:
    """Let rows name an adapter without factors: the kernels of adapters run, and change nothing."""
    adapters = runner.model.adapters
    runner.adapters = None if adapters is None else AdapterSlots(adapters, lambda _: {})


def run_largest_steps(runner: GPURunner, *, max_num_seqs: int, max_num_batched_tokens: int, max_model_len: int) -> None:
    """Run as much prefill as a step may hold, then as many decodes, all with logprobs."""
    # Every row writes to block 0, one over the other: what is measured does not depend on it.
    rows = min(max_num_seqs, max_num_batched_tokens)
    length = min(max_num_batched_tokens // rows, max_model_len)
    params = SamplingParams(temperature=1.0, top_p=0.9, logprobs=5)
    blocks = [0] * max_model_len
    adapter = "" if runner.adapters is None else NO_FACTORS
    prompt = (0,) * length
    for decode in (False, True):
        start = length - 1 if decode else 0
        made = []
        for seq_id in range(rows):
            draw = Draw(seq_id, 0, seq_id, params, prompt, [])
            made.append(ScheduledRow(seq_id, start, length - start, prompt, [], blocks, (draw,), adapter=adapter))
        runner.submit(ScheduledBatch(int(decode), tuple(made))).result()
