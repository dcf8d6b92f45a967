"""Where every Triton file begins: the compiler if it is installed, and where its kernels run.

Triton is optional, and every version from 3.6 on will do: torch 2.11 comes with 3.6, torch 2.13 with 3.7, torch 2.15
with 3.9. What differs between them is in this file and in ``gluon_language.py``. Without Triton ``kernel`` leaves a
function as it is, ``tl`` is None, and ``runs_triton`` is False. An operator file still imports then, and its reference
works. With ``TRITON_INTERPRET=1`` in the environment before Triton is imported, kernels run on the CPU, one program
after another, in numpy; that is how they are tested without a GPU.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...hardware.device import target_of
from ...hardware.targets import TARGETS, acted_target
from ..registry import Implementation, Unavailable

triton: Any
tl: Any
try:
    import triton  # type: ignore[no-redef]
    import triton.language as tl  # type: ignore[no-redef]
except ImportError:
    triton = None
    tl = None

if (
    triton is not None
    and hasattr(triton.knobs.language, "default_fp_fusion")
    and "TRITON_DEFAULT_FP_FUSION" not in os.environ
):
    # a * b + c is one instruction here. Triton up to 3.8 always fuses, 3.9 warns without the option, 3.10 requires it.
    triton.knobs.language.default_fp_fusion = True


def interpreter_refusal(triton_version: str, numpy_version: str) -> str:
    """Return the reason why these two versions cannot interpret a kernel, or ``""``: Triton 3.6 is incompatible with
    numpy 2.4 and later."""

    def numbers(version: str) -> tuple[int, ...]:
        return tuple(int(part) for part in version.split(".")[:2])

    if numbers(triton_version) >= (3, 7) or numbers(numpy_version) < (2, 4):
        return ""
    return (
        f"the interpreter of Triton {triton_version} does not work with numpy {numpy_version}: install numpy<2.4, or "
        "Triton 3.7 with the torch that brings it"
    )


MISSING = "Triton is not installed: pip install 'transect[gpu]'"
INTERPRETED: bool = triton is not None and bool(triton.knobs.runtime.interpret)
KERNEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
TRITON_TARGETS = tuple(TARGETS)


def follow_target() -> None:
    """Have Triton compile as for the target that this process's GPU acts as, and refuse kernels that need more shared
    memory than its blocks have; nothing if the GPU is used as it is. The last stage still makes code for the GPU."""
    acted = acted_target()
    if triton is None or acted is None or INTERPRETED:
        return
    arch = acted.name.replace("_", "")
    if triton.knobs.runtime.override_arch == arch:
        return
    triton.knobs.runtime.override_arch = arch
    before = triton.knobs.compilation.listener

    def heard(*, src: Any, metadata: dict[str, Any], **others: Any) -> None:
        if before is not None:
            before(src=src, metadata=metadata, **others)
        if metadata["shared"] > acted.block_bytes:
            raise triton.runtime.errors.OutOfResources(metadata["shared"], acted.block_bytes, "shared memory")

    triton.knobs.compilation.listener = heard


follow_target()


def kernel(function: Callable[..., Any]) -> Any:
    """Apply ``triton.jit`` where Triton is installed, else return the function unchanged."""
    return function if triton is None else triton.jit(function)


def kernel_of_numbers(*names: str) -> Callable[[Callable[..., Any]], Any]:
    """Return the same as ``kernel``, for one whose whole-number arguments ``names`` change with every launch: it is
    compiled once for all of their values, also for 1 and multiples of 16."""

    def made(function: Callable[..., Any]) -> Any:
        return function if triton is None else triton.jit(function, do_not_specialize=list(names))

    return made


@cache
def count_compilations() -> Callable[[], int]:
    """Begin to count kernels that Triton compiles in this process, or reads from its cache on disk: either keeps the
    caller of a kernel waiting. Returns what tells the count; it is one for the whole process."""
    count = 0
    if triton is None:
        return lambda: 0
    before = triton.knobs.compilation.listener

    def heard(**what: Any) -> None:
        nonlocal count
        count += 1
        if before is not None:
            before(**what)

    triton.knobs.compilation.listener = heard
    return lambda: count


def available(launcher: Callable[..., Any]) -> Callable[[], Callable[..., Any]]:
    """Return the ``Implementation.load`` of a Triton launcher.

    Raises (when called):
        Unavailable: Triton is missing, or there is neither a GPU nor the interpreter.
    """

    def load() -> Callable[..., Any]:
        if triton is None:
            raise Unavailable(MISSING)
        if not INTERPRETED and not torch.cuda.is_available():
            raise Unavailable("Triton kernels need a GPU here, or TRITON_INTERPRET=1 in the environment")
        if INTERPRETED and (reason := interpreter_refusal(triton.__version__, np.__version__)):
            raise Unavailable(reason)
        return launcher

    return load


def in_triton(
    launcher: Callable[..., Any], *, autograd: Callable[..., Any] | None = None, **facts: Any
) -> Implementation:
    """Describe an implementation by a Triton launcher, for all of Triton's targets.

    Args:
        autograd: the ``torch.library`` operator over the launcher; None if it has no gradient.
        facts: further fields of ``Implementation``.
    """
    loads_autograd = None if autograd is None else lambda: autograd
    return Implementation("triton", available(launcher), TRITON_TARGETS, autograd=loads_autograd, **facts)


def available_from(module: str, launcher: str) -> Callable[[], Callable[..., Any]]:
    """Return ``available`` of a launcher in a module of kernels, which is imported when it is loaded."""
    return lambda: available(getattr(import_module(module), launcher))()


def runs_triton(*tensors: Tensor) -> bool:
    """Return True if a Triton kernel can take these tensors: on a GPU (or interpreted) and of at most 32 bits."""
    return triton is not None and all(
        (t.is_cuda or (INTERPRETED and t.device.type == "cpu")) and t.dtype in KERNEL_DTYPES for t in tensors
    )


def require(name: str, *tensors: Tensor) -> None:
    """Check the tensors that a launcher is about to hand to a kernel.

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
    """View ``[..., D]`` as ``[rows, D]`` with contiguous rows; copied only if the strides need it."""
    if x.dim() == 0:
        raise ValueError("a tensor of at least one dimension is needed")
    flat = x.reshape(-1, x.shape[-1]) if x.numel() else x.new_empty((0, x.shape[-1]))
    return flat if flat.stride(-1) == 1 or flat.shape[-1] <= 1 else flat.contiguous()


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least ``n``, and at least 1."""
    return 1 << max(0, n - 1).bit_length()


@cache
def multiprocessors(device: torch.device) -> int:
    """Return the number of multiprocessors of a GPU; 4 in the interpreter, where more would only be slower."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


def has_dependent_launch(device: torch.device) -> bool:
    """Return True if a kernel can be launched while the one before it still runs (Hopper and later)."""
    return target_of(device).dependent_launch
