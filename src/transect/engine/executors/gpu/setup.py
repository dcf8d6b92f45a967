"""Decides the operators, limits and runner options of an engine on a GPU, before anything is loaded."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from ....checkpoints.kernel_choice import cache_dtype, kv_dtype
from ....costs.memory.serving import ServingPlan, smallest_layout
from ....costs.memory.streaming import StreamPlan
from ....costs.model import kv_bytes_per_token, weight_bytes
from ....costs.steps import launch_bound_tokens
from ....costs.storage import Layouts, Storage, storage_for, storage_held
from ....costs.units import GIB
from ....hardware.device import target_of
from ....hardware.targets import PROCESSOR, KernelTarget
from ....ops.attention.paged.cache_codes import refusal as cache_refusal
from ....ops.lang.jit import has_dependent_launch
from ....ops.linear.stream_products import StreamProducts
from ....ops.opset import OpSet, resolve_ops, with_dependent_launch
from ....ops.registry import get
from ....spec.layouts.ranks import RankLayout
from ....spec.layouts.shards import Shard
from ....spec.model import ModelConfig
from ....spec.numbers.registry import cache_bits
from ...config import EngineConfig
from ...offload import stream_plan
from .step_sizes import row_bucket

log = logging.getLogger(__name__)

WHOLE_PROMPTS = (1536, 96)
"""Fewest tokens, in total and per row, for a separate attention kernel of whole prompts: where the Hopper kernel pays
off (``ops/attention/packed/hopper.py``) with 16 heads and more."""

FILL_BYTES, FILL_TOKENS = 8 << 30, 256
"""Prompts are spread over decode steps (``scheduling/policies/filling.py``) for models with at least this many bytes of
weights, up to this many tokens (or max_num_seqs) a step. On an H200 a step of an 8B model takes, without attention, 5.0
ms for 128 tokens and 7.3 for 256; 128 tokens of a long prompt take 2.8. If the weights are read faster than attention
handles a few more queries, spreading gains nothing."""


@dataclass(frozen=True, slots=True)
class Setup:
    """The facts that all parts of the start-up need."""

    config: EngineConfig
    """Configuration, with CUDA graphs off if they cannot be used."""
    asked: str
    """Configuration as given, by which the compilers know the engine."""
    model: ModelConfig
    dtype: torch.dtype
    storage: Storage
    layouts: Layouts
    """Layouts of the matrices that stay packed as in the checkpoint."""
    device: torch.device
    ops: OpSet
    limits: dict[str, Any]
    """max_num_seqs, max_num_batched_tokens and max_model_len, by the names of ``GPURunner``'s arguments: a draft is a
    sequence there (``executors/drafted.py``)."""
    tricks: dict[str, Any]
    """Further options of ``GPURunner``, by argument name."""
    fill_tokens: int | None
    """Most tokens of a step with chunked prefill (``scheduling/policies/filling.py``), if prompts are spread over
    steps."""
    stream: StreamPlan | None
    """Layers that are kept in host memory or in a file."""
    others: int
    """Bytes of the GPU that were in use before."""
    allocated: int
    """Part of ``others`` that torch had allocated in this process, for another engine for example."""
    total: int
    """Bytes of the GPU's memory."""
    beside_per_token: float = 0.0
    """Bytes that a head that drafts keeps of a token."""

    @property
    def cache_dtype(self) -> torch.dtype:
        """Data type of the KV cache."""
        return cache_dtype(self.config.dtype, self.config.kv_cache_dtype)

    @property
    def kv_per_token(self) -> float:
        """Bytes of a token in the cache, and beside it."""
        return kv_bytes_per_token(self.model, self.storage) + self.beside_per_token

    @property
    def irregular(self) -> bool:
        """True if step sizes vary (requests come one by one, or prompts are spread over decode steps): every graph is
        captured at start-up."""
        return self.config.step_limit.seconds is not None or self.fill_tokens is not None


def set_up(
    config: EngineConfig,
    model: ModelConfig,
    device: torch.device,
    shard: Shard | None = None,
    *,
    ranks: int = 1,
    layouts: Layouts = (),
) -> Setup:
    """Decide the settings of an engine of ``config`` on ``device``. ``shard``: this rank's part of the model; ``model``
    has its sizes. ``ranks``: ranks on this host. ``layouts``: packing of the checkpoint's matrices.

    Raises:
        ValueError: the weights do not fit, here or in host memory, or a setting is at fault; the message says what to
            change.
    """
    check_cache(config, model, target_of(device))
    torch.cuda.init()
    allocated = torch.cuda.memory_allocated(device)
    dtype = kv_dtype(config.dtype)
    _, max_tokens = config.limits("cuda")
    torch.cuda.empty_cache()  # what this process holds and does not use
    free, total = torch.cuda.mem_get_info(device)
    _check_quantization(config, model)
    layouts = layouts if config.quantization is None and dtype != torch.float32 else ()
    by_row = model.moe is None and all(layout.batch_invariant for _, layout in layouts)
    if layouts and (config.cpu_offload_gb or (config.deterministic and not by_row)):
        why = "cpu_offload_gb" if config.cpu_offload_gb else "deterministic"
        log.warning("with %s the matrices that the checkpoint packs are dequantized when they are loaded", why)
        layouts = ()
    storage = storage_held(storage_for(dtype.itemsize, config.quantization), layouts)
    storage = replace(storage, kv=cache_bits(config.kv_cache_dtype, 8 * dtype.itemsize, model.head_dim))
    shapes = None if shard is None else shard.shapes()
    stream = stream_plan(config, model if shard is None else shard.model, storage, shapes, ranks=ranks)
    needed = weight_bytes(model, storage, shapes)
    whole = model if shard is None else shard.model
    least = partial(smallest_layout, whole, plan_of(config, whole, storage, dtype), storage)
    _check_weights(config, needed, 0 if stream is None else stream.saved, free, total, least)
    if stream is not None:
        storage = replace(storage, streamed=stream.bytes)
    longest = config.max_model_len or model.max_position
    ops = gpu_ops(device, deterministic=config.deterministic, dependent_launch=config.gpu.dependent_launch)
    asked, config = repr(config), without_graphs(config, ops, stream)
    return Setup(
        config=config,
        asked=asked,
        model=model,
        dtype=dtype,
        storage=storage,
        layouts=layouts,
        device=device,
        ops=ops,
        limits={
            "max_num_seqs": config.max_rows("cuda"),
            "max_num_batched_tokens": max_tokens,
            "max_model_len": longest,
        },
        tricks=runner_tricks(config, model, dtype, device, ops),
        fill_tokens=fill_tokens(config, model, storage),
        stream=stream,
        others=total - free,
        allocated=allocated,
        total=total,
    )


def plan_of(config: EngineConfig, model: ModelConfig, storage: Storage, dtype: torch.dtype) -> ServingPlan:
    """Plan the memory of a GPU for a whole model.

    Without ``max_model_len`` the planned context is one step's tokens: the engine takes what its cache holds.
    """
    max_seqs, max_tokens = config.limits("cuda")
    return ServingPlan(
        weights=int(weight_bytes(model, storage)),
        element=dtype.itemsize,
        kv_element=storage.kv / 8,
        max_num_seqs=max_seqs,
        max_num_batched_tokens=max_tokens,
        context=config.max_model_len or min(model.max_position, max_tokens),
        block_size=config.block_size,
        share=1.0,
    )


def check_cache(config: EngineConfig, model: ModelConfig, target: KernelTarget = PROCESSOR) -> None:
    """Refuse a cache that kernels cannot read.

    Raises:
        ValueError: heads whose size is not a multiple of 4, cached in int8; or fp8 on a GPU before Ada.
    """
    dtype = cache_dtype(config.dtype, config.kv_cache_dtype)
    if dtype == torch.float8_e4m3fn and target.nvidia and not target.fp8_products:
        raise ValueError(f"kernels for {target.name} do not read a KV cache in fp8: take kv_cache_dtype int8")
    reason = cache_refusal(dtype, model.head_dim)
    if reason is not None:
        raise ValueError(f"{reason}: leave kv_cache_dtype out, or take fp8")


def gpu_ops(device: torch.device, *, deterministic: bool = False, dependent_launch: bool = True) -> OpSet:
    """Return the operators of an engine on a GPU, with dependent launch if asked for and the GPU has it (Hopper). On
    NVIDIA's since Ampere norms may then be part of products."""
    ops = resolve_ops(device, ("triton", "torch"), batch_invariant=deterministic)
    if dependent_launch and not deterministic and target_of(device).capability >= (8, 0):
        ops = replace(ops, stream_products=StreamProducts(device))
    return with_dependent_launch(ops, dependent_launch and has_dependent_launch(device))


def by_torch(ops: OpSet) -> bool:
    """Return True if paged attention runs in torch, on a GPU that our kernels do not support."""
    return get("paged_attention").implementations[dict(ops.chosen)["paged_attention"]].backend == "torch"


def without_graphs(config: EngineConfig, ops: OpSet, stream: StreamPlan | None = None) -> EngineConfig:
    """Return the configuration, with CUDA graphs turned off where they cannot be used.

    Torch's paged attention reads lengths on the host. If layers stream, their copies continue from one step into the
    next, which the graph of one step cannot express, and launching kernels one by one takes less time than the copies.
    """
    if stream is not None and config.cuda_graphs != "off":
        log.info("CUDA graphs are off: %s", stream)
        config = replace(config, cuda_graphs="off")
    if not by_torch(ops):
        return config
    reasons = "; ".join(f"{label} {reason}" for name, label, reason in ops.passed_over if name == "paged_attention")
    log.warning("torch's operators run, without CUDA graphs, which is slower (paged attention: %s)", reasons)
    return replace(config, cuda_graphs="off")


def runner_tricks(
    config: EngineConfig, model: ModelConfig, dtype: torch.dtype, device: torch.device, ops: OpSet
) -> dict[str, Any]:
    """Return further options of ``GPURunner`` on this device, by argument name."""
    shares = config.shares_data and config.enable_expert_parallel
    hopper = dtype == torch.bfloat16 and target_of(device).hopper
    return {
        "whole_prompts": None if config.deterministic else WHOLE_PROMPTS,
        # Of a stage the last layer is not the model's, and ranks that share experts gather as many tokens in each.
        "prune_last_layer": config.layout.pipeline == 1 and not shares,
        # Without graphs, which torch's operators do not have, kernels that copy are for nothing; and a pass that
        # launches none (warm_kernels.py) still runs torch's, which read a step's lengths.
        "copy_kernels": not by_torch(ops),
        # ops/linear/few_rows takes any number of rows on Hopper.
        "fine_rows": hopper,
        "graph_tokens": 0 if config.cuda_graphs == "off" else launch_bound_tokens(model),
        # torch's operators take no tokens that belong to no row.
        "pad_tokens": 1 if by_torch(ops) else None,
    }


def fill_tokens(config: EngineConfig, model: ModelConfig, storage: Storage) -> int | None:
    """Return the number of tokens up to which steps are filled while sequences decode; None if filling is off or does
    not pay."""
    seqs, most = config.limits("cuda")
    tokens = row_bucket(max(seqs, FILL_TOKENS))
    if storage.streamed:  # a step of many tokens takes no longer then
        return None
    asked = config.step_limit.fill and config.batching == "continuous"
    asked = asked and config.layout.pipeline == 1  # stages have weights of different sizes
    return tokens if asked and tokens < most and weight_bytes(model, storage) >= FILL_BYTES else None


def _check_quantization(config: EngineConfig, model: ModelConfig) -> None:
    if config.quantization is not None and config.deterministic and model.moe is not None:
        raise ValueError(
            "products of experts in few bits on a GPU add up in another order for other numbers of rows: leave out "
            "either quantization or deterministic"
        )


def _check_weights(
    config: EngineConfig,
    whole: float,
    streamed: float,
    free: int,
    total: int,
    least: Callable[[int], RankLayout | None] = lambda budget: None,
) -> None:
    """Refuse weights that do not fit. ``least``: the smallest layout in which a model fits, given the usable bytes of a
    GPU."""
    usable = min(free, int(total * config.gpu_memory_utilization))
    needed = whole - streamed
    if needed > usable:
        advice = "take a smaller model" + ("" if config.dtype != "float32" else " or dtype='bfloat16'")
        more = math.ceil((whole - 0.75 * usable) / GIB)
        layout = least(usable)
        if layout is not None:
            advice += f", or spread it over {layout.size} GPUs (tensor_parallel_size={layout.tensor}"
            advice += f", pipeline_parallel_size={layout.pipeline})" if layout.pipeline > 1 else ")"
        advice += f", or let layers stream from host memory (cpu_offload_gb={more}), which is for large batches"
        raise ValueError(
            f"the weights take {needed / GIB:.1f} GiB and {usable / GIB:.1f} GiB of the GPU can be used "
            f"({free / GIB:.1f} GiB are free, gpu_memory_utilization is {config.gpu_memory_utilization}): {advice}"
        )
