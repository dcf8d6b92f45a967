"""Build an engine on a CUDA GPU by calling, in order: ``setup.py``, ``load.py``, ``measure.py``, ``size.py``,
``capture.py``.

Each part is timed; what it took and where the GPU's memory went is printed when the engine starts.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace

import torch

from ....checkpoints.eagle import HeadSource
from ....checkpoints.layouts import held_layouts
from ....checkpoints.resolve import ModelSource
from ....costs.storage import Storage
from ....parallel.mesh import Mesh
from ...config import EngineConfig
from ...kv_size import KVSize
from .capture import capture
from .compilers import Compilers
from .head import head_runner, load_gpu_head
from .head_runner import GPUHeadRunner
from .load import check_triton_cache, load
from .measure import measure
from .runner import GPURunner
from .setup import Setup, by_torch, set_up
from .size import size
from .startup_times import StartupTimes

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GPUParts:
    """Parts of a GPU engine that ``build_engine`` uses."""

    runner: GPURunner
    size: KVSize
    storage: Storage
    """Formats of weights and cache."""
    description: str
    """The start-up line."""
    report: tuple[str, ...]
    """Use of the GPU's memory, and times of the start-up."""
    fill_tokens: int | None
    """Most tokens of a step with chunked prefill (``scheduling/policies/filling.py``), if prompts are spread over
    steps."""
    head: GPUHeadRunner | None = None
    """Executor of a head that drafts."""


def build_gpu(
    config: EngineConfig,
    source: ModelSource,
    device: torch.device,
    compilers: Compilers | None = None,
    began: float | None = None,
    mesh: Mesh | None = None,
    head_source: HeadSource | None = None,
) -> GPUParts:
    """Load the model, size the cache, capture graphs. ``began``: start time of torch's import (``time.perf_counter``);
    ``mesh``: given if this process is one of several ranks; ``head_source``: a head that drafts for the model.

    Raises:
        ValueError: the model or the cache does not fit, or a setting is at fault; the message says what to change.
    """
    check_triton_cache()
    times = StartupTimes() if began is None else StartupTimes(_last=began)
    if began is not None:
        times.done("torch")
    shard = None if mesh is None else mesh.shard(source.config)
    on_host = 1 if mesh is None else mesh.world.on_host
    model = source.config if shard is None else shard.local
    setup = set_up(config, model, device, shard, ranks=on_host, layouts=held_layouts(source))
    times.done("CUDA")
    loaded = load(setup, source, compilers, times, mesh)
    if mesh is not None:
        mesh.world.exchange(None)  # rank 0 has had the kernels compiled, and the others find them in the cache
        times.done("other ranks")
    measured = measure(setup, loaded.model, mesh)
    times.done("dry run")
    head = None
    if head_source is not None:
        head = load_gpu_head(setup, head_source, source, loaded.model, mesh)
        setup = replace(setup, beside_per_token=head_source.bytes_per_token(setup.dtype.itemsize))
        loaded = loaded._replace(allocated=loaded.allocated + sum(t.nbytes for t in head.parameters()))
        times.done("head")
    account, cache = size(setup, loaded, measured)
    if mesh is not None:
        cache = KVSize.least(mesh.world.exchange(cache))
    if head is not None:
        place = setup.config.block_size, head.config.dim, setup.dtype, device
        head.features.allocate(cache.num_blocks + 1, *place)
        loaded.model.taps = head.features
    runner, cache_bytes = capture(setup, loaded.model, cache, times, mesh)
    drafts = None if head is None else head_runner(setup, head, cache, times)
    report = (*account.lines(cache_bytes), f"start-up: {times}")
    for line in report:
        log.info("%s", line)
    return GPUParts(runner, cache, setup.storage, _description(setup), report, setup.fill_tokens, drafts)


def _description(setup: Setup) -> str:
    kernels = "torch's operators" if by_torch(setup.ops) else "Triton kernels"
    name = torch.cuda.get_device_name(setup.device)
    how = [f"{kernels} on {name} in {str(setup.dtype).removeprefix('torch.')}"]
    how += [] if setup.config.quantization is None else [f"the layers' weights in {setup.config.quantization}"]
    held = sorted({layout.label for _, layout in setup.layouts})
    how += [f"the layers' weights in {' and '.join(held)}, as in the checkpoint"] if held else []
    how += [] if setup.stream is None else [str(setup.stream)]
    if setup.config.kv_cache_dtype != "auto":
        how.append(f"KV cache in {setup.config.kv_cache_dtype}, attention in prompts by Triton kernels")
    how += [f"CUDA graphs {setup.config.cuda_graphs}"]
    how += ["batch-invariant"] if setup.config.deterministic else []
    return ", ".join(how)
