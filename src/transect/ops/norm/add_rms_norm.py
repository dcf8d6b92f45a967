r"""Residual add and RMSNorm in one pass, as between the blocks of a decoder.

    s = x + residual            y = rms_norm(s) * w

Both are results: y goes into the next block, s continues along the residual stream. Backward, with dL/dy and dL/ds
given:

    dL/dx = dL/dresidual = dL/ds + (the gradient of ``rms_norm`` at s, of dL/dy)

and dL/dw as there.

Shapes: x and residual ``[..., D]`` of one dtype, weight ``[D]``; y and s like x. s is rounded to that dtype before the
norm, as if it had been written and read again.
Source: see ``rms_norm.py``.

Bound by bytes: two reads and two writes. Apart, the add would write s and the norm read it again: five for four.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...costs.work import Cost
from ..lang.jit import in_triton, runs_triton
from ..numerics import sample
from ..peers import compiled
from ..registry import Op, in_torch, register
from ..tuning import Config
from . import norms, rms_norm
from .norms import launch_backward, launch_forward


def reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Compute (norm, sum) of x, residual ``[..., D]``, weight ``[D]``."""
    total = x + residual
    return rms_norm.reference(total, weight, eps), total


def triton_add_rms_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    *,
    out: tuple[Tensor, Tensor] | None = None,
    dependent_launch: bool = False,
    own_tuning: bool = True,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute ``reference`` in one launch. ``out``: the tensors to write norm and sum to; ``(x, residual)`` updates the
    stream in place. The rows of a norm that is a matrix may have any stride.

    ``dependent_launch``: begin while the kernel before still runs (Hopper). ``own_tuning``: see ``tuning.choices``.
    ValueError if x and residual differ in shape or dtype, or past ``norms.MAX_WIDTH``.
    """
    return launch_forward(
        "add_rms_norm",
        rms_norm.forward_kernel,
        x,
        residual,
        (weight,),
        eps,
        out=out,
        dependent_launch=dependent_launch,
        own_tuning=own_tuning,
        config=config,
    )


def triton_backward(
    grad: Tensor,
    grad_sum: Tensor,
    total: Tensor,
    weight: Tensor,
    eps: float,
    *,
    out: Tensor | None = None,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute (dL/dx, dL/dw) from dL/dy, dL/ds and the sum s. ``out``: the tensor to write dL/dx to; the rows of a
    matrix may have any stride."""
    function = rms_norm.backward_kernel
    name = "add_rms_norm.backward"
    dx, dw = launch_backward(name, function, grad, total, grad_sum, weight, eps, vectors=1, out=out, config=config)
    return dx, dw


@torch.library.custom_op("transect::add_rms_norm", mutates_args=())
def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Run the operator for autograd and ``torch.compile``: the Triton kernel where it can run, else the
    reference."""
    if runs_triton(x, residual, weight):
        return triton_add_rms_norm(x, residual, weight, eps)
    y, total = reference(x, residual, weight, eps)
    return y.contiguous(), total.contiguous()


@torch.library.custom_op("transect::add_rms_norm_backward", mutates_args=())
def add_rms_norm_backward(
    grad: Tensor, grad_sum: Tensor, total: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Compute the operator's gradients: (of x and of the residual, of the weight)."""
    if runs_triton(grad, grad_sum, total, weight):
        return triton_backward(grad, grad_sum, total, weight, eps)
    dx, dw = rms_norm.reference_backward(grad, total, weight, eps)
    return dx + grad_sum, dw


@add_rms_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    return y, torch.empty_like(y)


@add_rms_norm_backward.register_fake
def _(grad: Tensor, grad_sum: Tensor, total: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dx = torch.empty(total.shape, device=total.device, dtype=total.dtype)
    return dx, torch.empty(weight.shape, device=total.device, dtype=weight.dtype)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], inputs[2])
    ctx.eps = inputs[3]


def _backward(ctx: Any, grad: Tensor, grad_sum: Tensor) -> tuple[Any, ...]:
    dx, dw = add_rms_norm_backward(grad, grad_sum, *ctx.saved_tensors, ctx.eps)
    return dx, dx, dw, None


add_rms_norm.register_autograd(_backward, setup_context=_setup)


def cost(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Cost:
    """Count 5 FLOPs an element: the add, and 4 of the norm."""
    return Cost(5 * x.numel(), 2 * x.nbytes + weight.nbytes, 2 * x.nbytes)


def _gradient_cost(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> Cost:
    return Cost(11 * x.numel(), 3 * x.nbytes + weight.nbytes, x.nbytes + weight.nbytes)


def _examples() -> Sequence[dict[str, Any]]:
    return [
        {"x": sample(*shape), "residual": sample(*shape, seed=2), "weight": sample(shape[-1], seed=1), "eps": 1e-5}
        for shape in ((1, 576), (7, 33), (3, 5, 1), (0, 8))
    ]


def _peer(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.rms_norm(total, weight.shape, weight, eps), total


register(
    Op(
        name="add_rms_norm",
        reference=reference,
        cost=cost,
        implementations={
            "torch": in_torch(reference, batch_invariant=True),
            "triton": in_triton(triton_add_rms_norm, batch_invariant=True, autograd=add_rms_norm),
        },
        examples=_examples,
        peers={"torch": _peer, "torch.compile": compiled(_peer)},
        differentiable=("x", "residual", "weight"),
        gradient_cost=_gradient_cost,
        cases=partial(norms.cases, vectors=1, add=True),
        kernels=partial(norms.kernels, rms_norm.forward_kernel, rms_norm.backward_kernel, vectors=1, add=True),
        knobs=lambda: norms.knobs("add_rms_norm", triton_add_rms_norm, triton_backward),
    )
)
