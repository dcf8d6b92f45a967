"""Switches of the GPU engine's optimizations, to measure the gain of each (``benchmarks/engine/ablation.py``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from ....spec.settings import changed_fields, check_values


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUOptions:
    """Optimizations of a GPU engine. Outputs do not depend on them, up to rounding.

    Attributes:
        fused_operators: Run several operators in one kernel.
        dependent_launch: Start a kernel while the one before ends (Hopper).
        device_sampling: Draw tokens on the GPU.
        prefill_graphs: Capture steps with prefill chunks too, if they have so few tokens that launching their kernels
            one by one would take longer than computing them.
        prompt_attention: Prompts that a step holds from their first token on attend to keys outside of the cache's
            pages, unless ``EngineConfig.deterministic``.
        prune_last_layer: Compute the last layer in full only for tokens that something is drawn from.
        chained_blocks: On a model in blocks of a GGUF file, multiply in whole numbers in steps of one request, the four
            products between two attentions in one launch (Hopper, unless ``EngineConfig.deterministic``).
        streamed_sinks: Use the kernel that streams the cache on Hopper, not Triton's, for decode rows of heads of 64
            with sinks (gpt-oss).
        copy_kernels: Copy a step's inputs and results by kernels of its graph, not by the copy engine.
        peer_sums: Add up over GPUs by our own kernels where those are faster than NCCL.
        pushed_products: Products of up to 8 rows that end in such a sum write their results to the other GPUs
            themselves (off, because it was measured in one run only).

    Raises:
        ValueError: a switch is neither True nor False.
    """

    GROUPS: ClassVar[Mapping[str, str]] = {"fused_operators": "GPU"}

    fused_operators: bool = True
    dependent_launch: bool = True
    device_sampling: bool = True
    prefill_graphs: bool = True
    prompt_attention: bool = True
    prune_last_layer: bool = True
    chained_blocks: bool = True
    streamed_sinks: bool = True
    copy_kernels: bool = True
    peer_sums: bool = True
    pushed_products: bool = False

    def __post_init__(self) -> None:
        check_values(self)

    def __str__(self) -> str:
        """List the switches that differ from their defaults."""
        return ", ".join(changed_fields(self))
