"""Engines on a GPU for tests: a small model, its runner, random limits."""

from __future__ import annotations

import random
from typing import Any

import torch

from transect.checkpoints.load import allocated
from transect.engine.executors.gpu.runner import GPURunner
from transect.engine.executors.gpu.setup import gpu_ops
from transect.engine.scheduling.scheduler_config import SchedulerConfig
from transect.models.decoder import Decoder
from transect.models.fused_stack import FusedStack
from transect.spec.model import ModelConfig

VOCAB, BLOCK = 61, 16
TINY = ModelConfig(
    architecture="qwen3",
    vocab_size=VOCAB,
    dim=64,
    n_layers=2,
    n_heads=4,
    n_kv_heads=2,
    head_dim=32,
    ffn_dim=96,
    max_position=128,
    qk_norm=True,
)


def gpu_model(
    config: ModelConfig,
    dtype: torch.dtype,
    *,
    deterministic: bool = False,
    state: dict[str, Any] | None = None,
    std: float = 0.3,
) -> Decoder:
    """A model on the GPU, with random weights or those of ``state``."""
    ops = gpu_ops(torch.device("cuda"), deterministic=deterministic)
    model = allocated(Decoder(config, "meta", dtype, ops=ops), "cuda")
    if state is None:
        model.init_weights(std, torch.Generator("cuda").manual_seed(0))
    else:
        model.load_state_dict(state)
    model.stack = FusedStack(model, max_positions=config.max_position)
    return model


def runner_for(model: Decoder, config: SchedulerConfig, *, graphs: bool = True) -> GPURunner:
    """A runner on caches of zeros; graphs are captured when they are first needed."""
    caches = model.new_kv_cache(config.num_blocks + 1, config.block_size, model.norm.weight.dtype)
    for cache in caches:
        cache.zero_()
    return GPURunner(
        model,
        *caches,
        max_num_seqs=config.max_rows,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=config.max_model_len,
        graphs=graphs,
    )


def scheduler_config(rng: random.Random) -> SchedulerConfig:
    """Few sequences and so few blocks that some are preempted."""
    seqs = rng.choice([3, 5, 9])
    return SchedulerConfig(
        num_blocks=rng.choice([8, 12, 24]),
        block_size=BLOCK,
        max_num_seqs=seqs,
        max_num_batched_tokens=rng.choice([seqs, 16, 64]),
        max_model_len=100,
        enable_prefix_caching=rng.random() < 0.7,
        seed=1,
    )
