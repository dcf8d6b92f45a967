"""The kernels of ``adamw.h`` as Python functions on tensors in host memory, and the same in torch.

``HostKernels`` runs the C++ library; ``TorchKernels`` stands in for it where there is no compiler. Both know what an
optimizer in host memory needs: to take a gradient in, and to make a step on a stretch of numbers.
"""

from __future__ import annotations

import math
from ctypes import Structure, byref, c_double, c_float, c_int, c_int64, c_void_p
from dataclasses import dataclass

import torch
from torch import Tensor

from .library import Library


@dataclass(frozen=True, slots=True)
class HostStep:
    """The numbers of one AdamW step, as ``Step`` in ``ops/optim/adamw.py`` has them. ``scale`` is the gradient's."""

    rate: float
    beta1: float
    beta2: float
    eps: float
    correction1: float
    correction2: float
    scale: float = 1.0


class _Step(Structure):
    _fields_ = tuple((name, c_float) for name in ("keep", "rate", "beta1", "beta2", "root", "eps", "scale"))


class HostKernels:
    """AdamW and the taking in of gradients on the team of ``library``, which one thread uses at a time."""

    def __init__(self, library: Library) -> None:
        self.library = library
        c, p, n = library._c, c_void_p, c_int64
        c.transect_adamw.restype, c.transect_adamw.argtypes = None, [p, n, p, c_int, p, p, p, p, c_int, p]
        c.transect_take_in.restype, c.transect_take_in.argtypes = c_double, [p, n, p, c_int, p, c_int, c_int]

    def __str__(self) -> str:
        return f"the C++ kernels ({self.library.isa}, {self.library.threads} threads)"

    def step(
        self, gradient: Tensor, weight: Tensor, m: Tensor, v: Tensor, out: Tensor | None, step: HostStep, decay: float
    ) -> None:
        """Do one step, in place.

        Args:
            gradient: float32 or bfloat16, as many numbers as ``weight``.
            weight, m, v: float32.
            out: gets the new weight, float32 or bfloat16.

        Raises:
            ValueError: other dtypes or sizes, or tensors that are not contiguous in host memory.
        """
        _check(weight, m, v, dtypes=(torch.float32,))
        _check(gradient, *(() if out is None else (out,)), size=weight.numel())
        numbers = _Step(
            1 - step.rate * decay, step.rate / step.correction1, step.beta1, step.beta2, 1 / step.correction2, step.eps,
            step.scale,
        )  # fmt: skip
        pointers = (weight.data_ptr(), m.data_ptr(), v.data_ptr(), None if out is None else out.data_ptr())
        self.library._c.transect_adamw(
            self.library._pool, weight.numel(), gradient.data_ptr(), int(gradient.dtype == torch.bfloat16), *pointers,
            int(out is not None and out.dtype == torch.bfloat16), byref(numbers),
        )  # fmt: skip

    def take_in(self, source: Tensor, into: Tensor, add: bool) -> float:
        """Replace ``into`` by ``source``, or with ``add`` by their sum; float32 or bfloat16.

        Returns:
            The sum of the squares of these numbers before they are rounded, the same to the bit for any team.

        Raises:
            ValueError: as in ``step``.
        """
        _check(into)
        _check(source, size=into.numel())
        kinds = int(source.dtype == torch.bfloat16), int(into.dtype == torch.bfloat16)
        found: float = self.library._c.transect_take_in(
            self.library._pool, into.numel(), source.data_ptr(), kinds[0], into.data_ptr(), kinds[1], int(add)
        )
        return found


class TorchKernels:
    """The same by torch's operators: several passes over memory in place of one."""

    def __str__(self) -> str:
        return "torch's operators"

    def step(
        self, gradient: Tensor, weight: Tensor, m: Tensor, v: Tensor, out: Tensor | None, step: HostStep, decay: float
    ) -> None:
        """Do one step, in place; see ``HostKernels``."""
        g = gradient.float() * step.scale
        m.lerp_(g, 1 - step.beta1)
        v.mul_(step.beta2).addcmul_(g, g, value=1 - step.beta2)
        below = v.sqrt().div_(step.correction2).add_(step.eps)
        weight.mul_(1 - step.rate * decay).addcdiv_(m, below, value=-step.rate / step.correction1)
        if out is not None:
            out.copy_(weight)

    def take_in(self, source: Tensor, into: Tensor, add: bool) -> float:
        """Copy or add ``source`` to ``into``; see ``HostKernels``."""
        into.add_(source) if add else into.copy_(source)
        return float(into.double().square().sum()) if into.numel() else 0.0


def _check(*tensors: Tensor, size: int | None = None, dtypes: tuple[torch.dtype, ...] = ()) -> None:
    size = tensors[0].numel() if size is None else size
    for tensor in tensors:
        if tensor.dtype not in (dtypes or (torch.float32, torch.bfloat16)):
            raise ValueError(
                f"AdamW in host memory takes float32 states and gradients in float32 or bfloat16, not {tensor.dtype}"
            )
        if tensor.numel() != size or not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise ValueError(f"AdamW in host memory takes contiguous tensors of one size on the CPU, {size} numbers")


def host_kernels(threads: int) -> HostKernels | TorchKernels:
    """Return kernels with their own team of threads; torch's where the library cannot be built."""
    from ..registry import Unavailable

    try:
        return HostKernels(Library(threads))
    except Unavailable:
        return TorchKernels()


def corrections(beta1: float, beta2: float, steps: int) -> tuple[float, float]:
    """Return AdamW's bias corrections at step ``steps``, by which the moments are divided."""
    return 1 - beta1**steps, math.sqrt(1 - beta2**steps)
