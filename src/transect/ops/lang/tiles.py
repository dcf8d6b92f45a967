"""Share parts of kernels on tiles: descriptors, and a product of two tiles that also works in the interpreter.

The interpreter holds bfloat16 as bit patterns and would multiply these, so it gets float32.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .jit import INTERPRETED, kernel, tl

INTERPRETS = tl.constexpr(INTERPRETED) if tl is not None else INTERPRETED
"""A compile-time constant inside kernels."""


@kernel
def after_previous(DEPENDENT_LAUNCH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel begin, then wait for the previous one, if DEPENDENT_LAUNCH: this launch began while the
    previous kernel still ran (Hopper). The interpreter does neither: DEPENDENT_LAUNCH is False there."""
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@kernel
def let_next_begin(DEPENDENT_LAUNCH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Let the next kernel begin, the first half of ``after_previous``. Between the halves, read only data that the
    previous kernel does not write."""
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_launch_dependents()


@kernel
def wait_for_previous(DEPENDENT_LAUNCH: tl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for the previous kernel, the second half of ``after_previous``."""
    if DEPENDENT_LAUNCH:
        tl.extra.cuda.gdc_wait()


@kernel
def also(mask, condition):  # type: ignore[no-untyped-def]
    """Return ``mask`` where a condition of the whole program holds too, and False elsewhere.

    The interpreter of Triton 3.9 forgets that such a condition is a boolean and refuses the mask, so there the mask is
    made one again. Compiled code is that of ``&``.
    """
    both = mask & condition
    if INTERPRETS:
        both = both != 0
    return both


@kernel
def dot(a, b, acc):  # type: ignore[no-untyped-def]
    """Compute ``acc + a @ b`` in float32; products of float32 inputs are not rounded to tf32."""
    if INTERPRETS:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
    return tl.dot(a, b, acc, input_precision="ieee")


def fits_descriptor(*matrices: Tensor) -> bool:
    """Return True if descriptors can address each matrix.

    One dimension must have stride 1; the other's stride and the address must be multiples of 16 bytes.
    """
    return all(
        min(t.stride()) == 1
        and max(t.stride()) * t.element_size() % 16 == 0
        and max(t.stride()) >= t.shape[t.stride().index(1)]
        and t.data_ptr() % 16 == 0
        and t.numel() > 0
        for t in matrices
    )


def describe(matrix: Tensor, rows: int, columns: int, *, transposed: bool = False) -> Any:
    """Return a descriptor for bulk copies of ``rows`` x ``columns`` tiles; of the transpose where that is what memory
    holds."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    if transposed:
        return TensorDescriptor.from_tensor(matrix.T, [columns, rows])
    return TensorDescriptor.from_tensor(matrix, [rows, columns])
