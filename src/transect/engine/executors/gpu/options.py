"""Switches of a GPU engine's optimizations, for devices or drivers on which one of them fails or loses."""

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
        dependent_launch: Start a kernel while the previous one ends (Hopper).
        device_sampling: Draw tokens on the GPU.
        peer_sums: Add up over GPUs by our own kernels where those are faster than NCCL.

    Raises:
        ValueError: a switch is neither True nor False.
    """

    GROUPS: ClassVar[Mapping[str, str]] = {"fused_operators": "GPU"}

    fused_operators: bool = True
    dependent_launch: bool = True
    device_sampling: bool = True
    peer_sums: bool = True

    def __post_init__(self) -> None:
        check_values(self)

    def __str__(self) -> str:
        """List the switches that differ from their defaults."""
        return ", ".join(changed_fields(self))
