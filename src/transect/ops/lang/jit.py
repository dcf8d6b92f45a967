"""What every Triton file of this folder starts from: the compiler if it is installed, and where its kernels run.

Triton is optional. Without it ``kernel`` leaves a function as it is, ``tl`` is None, and ``runs_triton`` is False, so
that an operator file still imports and its reference works. With ``TRITON_INTERPRET=1`` in the environment before
Triton is imported, kernels run on the CPU, one program after another, in numpy; that is how they are tested without a
GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor

from ..registry import Unavailable

triton: Any
tl: Any
try:
    import triton  # type: ignore[no-redef]
    import triton.language as tl  # type: ignore[no-redef]
except ImportError:
    triton = None
    tl = None

INTERPRETED: bool = triton is not None and bool(triton.knobs.runtime.interpret)
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TRITON_TARGETS = ("sm_80", "sm_90", "gfx942")


def kernel(function: Callable[..., Any]) -> Any:
    """``triton.jit`` where Triton is installed, else the function unchanged."""
    return function if triton is None else triton.jit(function)


def available(launcher: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    """What ``Implementation.load`` of a Triton launcher is.

    Raises (when called):
        Unavailable: Triton is missing, or there is neither a GPU nor the interpreter.
    """

    def load() -> Callable[..., Any]:
        if triton is None:
            raise Unavailable("Triton is not installed: pip install 'transect[gpu]'")
        if not INTERPRETED and not torch.cuda.is_available():
            raise Unavailable("Triton kernels need a GPU here, or TRITON_INTERPRET=1 in the environment")
        return launcher

    return load


def runs_triton(*tensors: Tensor) -> bool:
    """Whether a Triton kernel can take these tensors: on a GPU (or interpreted) and of at most 32 bits."""
    return triton is not None and all(
        (t.is_cuda or (INTERPRETED and t.device.type == "cpu")) and t.dtype in KERNEL_DTYPES for t in tensors
    )


def require(name: str, *tensors: Tensor) -> None:
    """Check what a launcher is about to hand to a kernel.

    Raises:
        ValueError: a dtype that no kernel computes in, or tensors on different devices.
    """
    for tensor in tensors:
        if tensor.dtype not in KERNEL_DTYPES:
            raise ValueError(
                f"{name}: the Triton kernel takes float32, bfloat16 or float16, not {tensor.dtype}; use the reference"
            )
        if tensor.device != tensors[0].device:
            raise ValueError(f"{name}: move all inputs to one device; got {tensors[0].device} and {tensor.device}")


def rows_of(x: Tensor) -> Tensor:
    """``[..., D]`` as ``[rows, D]`` with neighbouring elements side by side; copies only when the strides need it."""
    if x.dim() == 0:
        raise ValueError("a tensor of at least one dimension is needed")
    flat = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty((0, x.shape[-1]))
    return flat if flat.stride(-1) == 1 or flat.shape[-1] <= 1 else flat.contiguous()


def next_power_of_2(n: int) -> int:
    """The smallest power of two that is at least ``n``, and at least 1."""
    return 1 << max(0, n - 1).bit_length()


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU; 4 in the interpreter, where more would only be slower."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def has_dependent_launch(device: torch.device) -> bool:
    """Whether a kernel on this device can be launched while the one before it still runs (Hopper and later)."""
    return device.type == "cuda" and not torch.version.hip and torch.cuda.get_device_capability(device) >= (9, 0)
