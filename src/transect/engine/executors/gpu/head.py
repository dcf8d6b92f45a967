"""An EAGLE-3 head on a GPU: its weights, its memory, its graphs (``head_runner.py``)."""

from __future__ import annotations

from torch import nn

from ....checkpoints.eagle import HeadSource, load_head, own_table
from ....checkpoints.resolve import ModelSource
from ....models.decoder import Decoder
from ....models.eagle import EagleHead
from ....parallel.mesh import Mesh
from ....text.grammar.constraint import MaskFiller
from ...kv_size import KVSize
from .capture import WARM_WIDTHS
from .head_runner import GPUHeadRunner
from .setup import Setup
from .startup_times import StartupTimes
from .step_sizes import row_buckets


def load_gpu_head(
    setup: Setup, source: HeadSource, target: ModelSource, model: Decoder, mesh: Mesh | None
) -> EagleHead:
    """Load a head beside its model. A rank that has a part of the model's table of tokens gets the whole table."""
    embed: nn.Module = model.embed
    if mesh is not None and mesh.parts.size > 1:
        embed = own_table(target, setup.device, setup.dtype)
    return load_head(source, target, embed, ops=setup.ops, device=setup.device, dtype=setup.dtype)


def head_runner(setup: Setup, head: EagleHead, cache: KVSize, times: StartupTimes) -> GPUHeadRunner:
    """Build the executor of a head over the blocks of its model's cache, and capture its graphs."""
    config = setup.config
    caches = head.new_kv_cache(cache.num_blocks + 1, config.block_size, setup.dtype)
    runner = GPUHeadRunner(
        head,
        *caches,
        **setup.limits | {"max_model_len": cache.max_model_len},
        graphs=config.cuda_graphs != "off",
        sample_on_device=config.gpu.device_sampling,
        fill_masks=MaskFiller(),
        **setup.tricks,
    )
    if config.cuda_graphs == "on":
        runner.warm(row_buckets(setup.limits["max_num_seqs"], setup.tricks["fine_rows"]), WARM_WIDTHS)
    runner.started()
    times.done("graphs of the head")
    return runner
