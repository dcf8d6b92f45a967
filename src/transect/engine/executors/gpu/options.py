"""Switches of what makes the GPU engine fast, to see what each is worth (``benchmarks/engine_ablation.py``)."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUOptions:
    """Switches of the GPU optimizations; outputs do not depend on them, up to rounding.

    Attributes:
        prefill_graphs: also capture steps with prefill chunks, of few enough tokens that launching their kernels one by
            one would take longer than computing them.
        fused_operators: several operators in one kernel.
        dependent_launch: kernels start while the one before ends (Hopper).
        device_sampling: tokens are drawn on the GPU.
        prompt_attention: prompts that a step holds from their first token on attend to keys that are not in the cache's
            pages (not where ``EngineConfig.deterministic``).
        prune_last_layer: the last layer is computed in full only for tokens that something is drawn from.
        chained_blocks: a step of one request on a model held in blocks of a GGUF file multiplies in whole numbers, the
            four products between two attentions in one launch (Hopper, not where ``EngineConfig.deterministic``).
        streamed_sinks: decode rows of heads of 64 with sinks (gpt-oss) attend by the kernel that streams the cache on
            Hopper, not by Triton.
        copy_kernels: a step's inputs and results are copied by kernels of its graph, not by the copy engine before and
            after it.
        peer_sums: GPUs add up by kernels of our own where those are quicker than NCCL.
        pushed_products: products of up to 8 rows that end in such a sum give their results to the other GPUs themselves
            (tried in one run, so only where it is asked for).

    Raises:
        ValueError: a switch is neither True nor False.
    """

    prefill_graphs: bool = True
    fused_operators: bool = True
    dependent_launch: bool = True
    device_sampling: bool = True
    prompt_attention: bool = True
    prune_last_layer: bool = True
    chained_blocks: bool = True
    streamed_sinks: bool = True
    copy_kernels: bool = True
    peer_sums: bool = True
    pushed_products: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            if not isinstance(value := getattr(self, field.name), bool):
                raise ValueError(f"{field.name} must be True or False, not {value!r}")

    def __str__(self) -> str:
        """The switches that are not as they are by default."""
        changed = (field for field in dataclasses.fields(self) if getattr(self, field.name) != field.default)
        return ", ".join(f"{field.name}={getattr(self, field.name)}" for field in changed)
