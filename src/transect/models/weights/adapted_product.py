r"""A frozen linear layer with its adapter as one operator, in float32 on the CPU.

    h = x A^T        y = x W^T + s h B^T (+ bias)

With g = dL/dy, and W frozen:

    dh = s g B       dx = g W + dh A       dA = dh^T x       dB = s g^T h

y and dx are one pass over the result each: the small product is added while the large one is still in registers. Where
x needs no gradient, as below the first adapter of a model, dx is not computed.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ...ops.cpu.training import Kernels, kernels
from ...ops.registry import Unavailable

log = logging.getLogger(__name__)


def cpu_kernels(weight: Tensor) -> Kernels | None:
    """Return the C++ kernels, on torch's number of threads, for a model with such weights; None where they do not apply
    or, as is then logged, cannot be built."""
    if weight.device.type != "cpu" or weight.dtype != torch.float32:
        return None
    try:
        return kernels(torch.get_num_threads())
    except Unavailable as reason:
        log.warning("adapters run in torch: %s", reason)
        return None


@contextmanager
def calling_thread_alone() -> Iterator[None]:
    """Run torch's operators on one thread inside the block.

    With adapters they are small additions between the C++ kernels. Torch's other threads would keep spinning after each
    addition, on the cores that the kernels' threads need.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def adapted_product(native: Kernels, x_TI: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
    """Multiply x ``[T, I]`` by a frozen weight ``[O, I]`` with a ``[r, I]`` and b ``[O, r]`` beside it -> ``[T, O]``;
    float32."""
    y: Tensor = _AdaptedProduct.apply(native, x_TI, weight, a, b, scale)
    return y


class _AdaptedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, native: Kernels, x: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float) -> Tensor:
        h = native.products([(x, a.mT, 1.0)])
        ctx.native, ctx.scale = native, scale
        ctx.save_for_backward(x, h, weight, a, b)
        return native.products([(x, weight.mT, 1.0), (h, b.mT, scale)])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, h, weight, a, b = ctx.saved_tensors
        native, scale = ctx.native, ctx.scale
        dh = native.products([(g, b, scale)])
        dx = native.products([(g, weight, 1.0), (dh, a, 1.0)]) if ctx.needs_input_grad[1] else None
        da = native.products([(dh.mT, x, 1.0)])
        db = native.products([(h.mT, g, scale)]).mT
        return None, dx, None, da, db, None
