"""The registry's kernels as parameters of tests."""

from __future__ import annotations

import pytest

from transect.ops.registry import Implementation, Op, all_ops


def needs_nvidia(implementation: Implementation) -> bool:
    """Whether it runs neither in Triton's interpreter nor on other GPUs: CUDA C++, and what is written for Hopper."""
    return "gfx942" not in implementation.targets


def kernel_entries() -> list[tuple[Op, Implementation, str]]:
    """Every operator with each of its Triton and CUDA implementations, and the name of both."""
    return [
        (op, made, f"{op.name}-{label}")
        for op in all_ops()
        for label, made in op.implementations.items()
        if made.backend in ("triton", "cuda")
    ]


def marks(implementation: Implementation) -> list[pytest.MarkDecorator]:
    """``gpu`` for what runs on a GPU alone."""
    return [pytest.mark.gpu] if needs_nvidia(implementation) else []
