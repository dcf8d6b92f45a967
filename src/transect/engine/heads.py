"""An EAGLE-3 head on a CPU, beside the engine's model; ``executors/gpu/head.py`` is that on a GPU."""

from __future__ import annotations

from functools import partial

import torch

from ..checkpoints.eagle import HeadSource, load_head, own_table
from ..checkpoints.kernel_choice import kernels, kv_dtype
from ..checkpoints.resolve import ModelSource
from ..models.decoder import Decoder
from ..models.weights.packed import Packed
from ..models.weights.weight import Kinds
from ..ops.opset import resolve_ops
from ..parallel.mesh import Mesh
from ..text.grammar.constraint import MaskFiller
from .config import EngineConfig
from .executors.head_runner import HeadRunner
from .executors.runner import Runner
from .kv_size import KVSize


def head_on_cpu(
    config: EngineConfig,
    source: HeadSource,
    target: ModelSource,
    runner: Runner,
    size: KVSize,
    threads: int,
    mesh: Mesh | None,
) -> HeadRunner:
    """Load a draft head with as many KV blocks as its model, and make the model keep the hidden states that the head
    reads.

    Args:
        runner: runs the model.
        size: its KV cache.
        threads: of the C++ products.
    """
    model, dtype = runner.model, kv_dtype(config.dtype)
    kinds: Kinds | None = None
    library, _ = (
        kernels(
            source.head.model,
            dtype=config.dtype,
            native=None if config.native else config.native,
            threads=threads,
            block_size=config.block_size,
        )
        if is_native(model)
        else (None, "")
    )
    ops = resolve_ops("cpu", batch_invariant=config.deterministic or dtype == torch.float32)
    computed = dtype
    if library is not None:
        packed = partial(Packed, library=library, half=config.dtype != "float32")
        kinds, computed = lambda name: packed, torch.float32
    whole = mesh is None or mesh.parts.size == 1
    embed = model.embed if whole else own_table(target, "cpu", computed)
    head = load_head(source, target, embed, ops=ops, device="cpu", dtype=computed, kinds=kinds)
    head.features.allocate(size.num_blocks, config.block_size, head.config.dim, computed, torch.device("cpu"))
    model.taps = head.features
    caches = head.new_kv_cache(size.num_blocks, config.block_size, dtype)
    return HeadRunner(head, *caches, fill_masks=MaskFiller())  # type: ignore[arg-type]


def is_native(model: Decoder) -> bool:
    """Return True if a model computes with the C++ products."""
    return any(isinstance(weight.unadapted()[0], Packed) for _, weight in model.weights())
