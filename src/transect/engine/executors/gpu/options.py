"""Switches of a GPU engine's optimizations, for devices or drivers on which one of them fails or loses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar

from ....hardware.targets import OLDER_TARGETS
from ....spec.settings import About, changed_fields, check_values

OLDER = About(choices=lambda: OLDER_TARGETS)


@dataclass(frozen=True, slots=True, kw_only=True)
class GPUOptions:
    """Optimizations of a GPU engine. Outputs do not depend on them, up to rounding.

    Attributes:
        fused_operators: Run several operators in one kernel.
        dependent_launch: Start a kernel while the previous one ends (Hopper).
        device_sampling: Draw tokens on the GPU.
        peer_sums: Add up over GPUs by our own kernels where those are faster than NCCL.
        target: Choose, cut and compile kernels as for an older kind of GPU: ``sm_80``, ``sm_86`` or ``sm_89``. The
            kernels of such a card can so be measured on a newer one. It holds for the whole process.

    Raises:
        ValueError: a switch is neither True nor False, or no GPU can act as ``target``.
    """

    GROUPS: ClassVar[Mapping[str, str]] = {"fused_operators": "GPU"}

    fused_operators: bool = True
    dependent_launch: bool = True
    device_sampling: bool = True
    peer_sums: bool = True
    target: Annotated[str | None, OLDER] = None

    def __post_init__(self) -> None:
        check_values(self)
        if self.target not in (None, *OLDER_TARGETS):
            raise ValueError(f"target must be one of {', '.join(OLDER_TARGETS)}, not {self.target!r}")

    def __str__(self) -> str:
        """List the switches that differ from their defaults."""
        return ", ".join(changed_fields(self))
