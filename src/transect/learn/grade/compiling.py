"""Compiles a student's kernel ahead of time: registers, spills and the widths of its memory accesses, without a GPU."""

from __future__ import annotations

from typing import Any

from ...ops.registry import Kernel
from ...ops.tools.compile import compile_kernel


def compiled(function: Any, name: str, target: str, **declared: Any) -> dict[str, Any]:
    """Return registers of a thread, bytes of its stack, shared memory, occupancy and accesses by width.

    Raises:
        Unavailable: Triton is missing.
    """
    made = compile_kernel(Kernel(name, function, **declared), target, sass=False)
    return {
        "kernel": name,
        "target": target,
        "registers": made.registers,
        "spilled_bytes": made.spilled_bytes,
        "shared_bytes": made.shared_bytes,
        "occupancy": made.occupancy,
        "loads": {str(width): count for width, count in made.access_bytes["load"].items()},
        "stores": {str(width): count for width, count in made.access_bytes["store"].items()},
    }
