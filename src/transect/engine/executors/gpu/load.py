"""A model on its GPU, and the kernels that it runs, which other processes compile meanwhile."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch

from ....checkpoints.kv_scales import take_scales
from ....checkpoints.load import load_on_device
from ....checkpoints.resolve import ModelSource
from ....models.decoder import Decoder
from ....models.fused_stack import Fusions
from ....models.weights.kinds import kinds_for
from ....parallel.load import GROUP, load_shard_on_device
from ....parallel.mesh import Mesh
from ....spec.numbers.layouts import BlockLayout
from ....spec.numbers.registry import takes_scales
from ...adapters import adapter_room
from . import warm_kernels
from .compilers import Compilers
from .setup import Setup
from .startup_times import StartupTimes

log = logging.getLogger(__name__)


class Loaded(NamedTuple):
    """A model on its GPU, and the bytes that torch allocated for it."""

    model: Decoder
    allocated: int


def check_triton_cache() -> None:
    """Check, before minutes are spent on weights, that Triton can create its cache folder.

    Raises:
        ValueError: its folder cannot be made.
    """
    import triton

    folder = Path(triton.knobs.cache.dir)
    advice = "set TRITON_CACHE_DIR to a folder that can be written to"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"Triton has no place for compiled kernels ({error}): {advice}") from error
    if not os.access(folder, os.W_OK):
        log.warning("Triton cannot write to %s, and will fail for kernels that it does not hold: %s", folder, advice)


def load(
    setup: Setup,
    source: ModelSource,
    compilers: Compilers | None,
    times: StartupTimes,
    mesh: Mesh | None = None,
) -> Loaded:
    """Start compiling the kernels, load the weights (or this rank's part) meanwhile, then wait for the kernels.

    Raises:
        ValueError: a file of the model is at fault.
    """
    config, tricks = setup.config, setup.tricks
    chained = not config.deterministic
    work = warm_kernels.KernelWork(
        config=setup.model,
        dtype=setup.dtype,
        block_size=config.block_size,
        deterministic=config.deterministic,
        dependent_launch=config.gpu.dependent_launch,
        fused_operators=config.gpu.fused_operators,
        whole_prompts=tricks["whole_prompts"],
        fine_rows=tricks["fine_rows"],
        copy_kernels=tricks["copy_kernels"],
        chained_blocks=chained,
        quantization=config.quantization,
        layouts=setup.layouts,
        cache_dtype=setup.cache_dtype,
        **setup.limits,
    )
    warming = warm_kernels.start(work, setup.ops, setup.device, compilers, setup.asked)
    if warming.collected:
        times.done(f"{warming.collected} kernels found")
    read = partial(load_on_device, device=setup.device)
    if config.enable_lora:
        read = partial(read, adapters=adapter_room(config))
    if mesh is not None:
        in_blocks = bool(setup.layouts) and all(isinstance(layout, BlockLayout) for _, layout in setup.layouts)
        # Files with blocks say themselves where these cannot be cut.
        read = partial(load_shard_on_device, mesh=mesh, group=1 if in_blocks else GROUP)
    model = read(
        source,
        dtype=setup.dtype,
        ops=setup.ops,
        max_positions=setup.limits["max_model_len"],
        seed=config.seed or 0,
        fusions=Fusions.all(config.gpu.fused_operators),
        kinds=kinds_for(
            config.quantization,
            setup.device,
            dependent_launch=config.gpu.dependent_launch,
            layouts=setup.layouts,
            chained_blocks=chained,
            batch_invariant=config.deterministic,
        ),
        stream=setup.stream,
    )
    if takes_scales(config.kv_cache_dtype):
        take_scales(model, source, slice(None) if mesh is None else mesh.shard(source.config).layers)
    times.done("weights")
    allocated = torch.cuda.memory_allocated(setup.device) - setup.allocated
    compiled = warming.wait()
    times.done(f"{compiled} kernels compiled" if warming.collected else "kernels from the cache")
    return Loaded(model, allocated)
