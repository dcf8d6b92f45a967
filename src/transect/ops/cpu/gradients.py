"""The C++ kernels of training as differentiable operators: the ``cpu`` implementations of the registry.

Each loader binds the team of ``torch.get_num_threads()`` threads at the time it is called, and returns a callable with
the arguments of the operator's ``reference``. The kernels compute in float32; for other dtypes the callable runs what
the operator runs in torch. No second derivatives.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from ..registry import Implementation
from .training import Kernels, kernels

Plain = Callable[..., Any]


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, native: Kernels, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x = x.contiguous()
        y, r = native.rms_norm(x, weight, eps)
        ctx.native = native
        ctx.save_for_backward(x, weight, r)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        x, weight, r = ctx.saved_tensors
        grad = grad.contiguous()
        dx = ctx.native.rms_norm_backward(grad, x, weight, r) if ctx.needs_input_grad[1] else None
        dw = None
        if ctx.needs_input_grad[2]:
            dw = (grad * x).view(-1, x.shape[-1]).mul_(r[:, None]).sum(0)
        return None, dx, dw, None


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, native: Kernels, gate: Tensor, up: Tensor) -> Tensor:
        gate, up = gate.contiguous(), up.contiguous()
        ctx.native = native
        ctx.save_for_backward(gate, up)
        return native.swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        return None, *ctx.native.swiglu_backward(grad.contiguous(), *ctx.saved_tensors)


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, native: Kernels, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        ctx.native = native
        ctx.save_for_backward(cos, sin)
        return native.rotate(q, cos, sin, 1.0), native.rotate(k, cos, sin, 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dq: Tensor, dk: Tensor) -> tuple[Any, ...]:
        cos, sin = ctx.saved_tensors
        return None, ctx.native.rotate(dq, cos, sin, -1.0), ctx.native.rotate(dk, cos, sin, -1.0), None, None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, native: Kernels, q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, window: int | None
    ) -> Tensor:
        out, lse = native.attention(q, k, v, cu_seqlens, scale, window)
        ctx.native, ctx.scale, ctx.window = native, scale, window
        ctx.save_for_backward(out, lse, q, k, v, cu_seqlens)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        gradients = ctx.native.attention_backward(grad, *ctx.saved_tensors, ctx.scale, ctx.window)
        return None, *gradients, None, None, None


def _differentiable(function: type[torch.autograd.Function], plain: Plain, floats: int) -> Plain:
    """Return ``function`` where the first ``floats`` arguments are float32, else ``plain``."""
    native = kernels(torch.get_num_threads())

    def call(*values: Any) -> Any:
        if any(value.dtype != torch.float32 for value in values[:floats]):
            return plain(*values)
        return function.apply(native, *values)

    return call


def implementation(differentiable: Callable[[Plain], Plain], plain: Plain) -> Implementation:
    """Return the entry of one of the operators below in the registry; ``plain`` is what the operator runs in torch."""
    load = functools.partial(differentiable, plain)
    return Implementation("cpu", load, ("cpu",), autograd=load, dtypes=("float32",))


def rms_norm(plain: Plain) -> Plain:
    """Wrap ``(x, weight, eps)``; the weight's gradient, if wanted, is torch's."""
    chosen = _differentiable(_RMSNorm, plain, 2)
    return lambda x, weight, eps: chosen(x, weight, eps)


def swiglu(plain: Plain) -> Plain:
    """Wrap ``(gate, up)``."""
    chosen = _differentiable(_SwiGLU, plain, 2)
    return lambda gate, up: chosen(gate, up)


def rotary(plain: Plain) -> Plain:
    """Wrap ``(q, k, cos, sin)``."""
    chosen = _differentiable(_Rotary, plain, 4)
    return lambda q, k, cos, sin: chosen(q, k, cos, sin)


def attention(plain: Plain) -> Plain:
    """Wrap ``(q, k, v, cu_seqlens, scale, window)``."""
    chosen = _differentiable(_Attention, plain, 3)
    return lambda q, k, v, cu_seqlens, scale, window=None: chosen(q, k, v, cu_seqlens, scale, window)
