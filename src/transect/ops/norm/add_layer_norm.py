r"""Residual add and LayerNorm in one pass, as between the blocks of a decoder.

    s = x + residual            y = layer_norm(s) * w + b

Both are results: y goes into the next block, s on along the residual stream. Backward, with dL/dy and dL/ds given:

    dL/dx = dL/dresidual = dL/ds + (the gradient of ``layer_norm`` at s, of dL/dy)

and dL/dw, dL/db as there. Shapes: x and residual ``[..., D]`` of one dtype, weight and bias ``[D]``; y and s like x. s
is rounded to that dtype before the norm, as if it had been written and read again. Source: as ``layer_norm.py``.

Bound by bytes: two reads and two writes. Apart, the add would write s and the norm read it again: five for four.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..lang.jit import TRITON_TARGETS, available, runs_triton
from ..numerics import sample
from ..peers import compiled
from ..registry import Cost, Implementation, Op, register
from ..tuning import Config
from . import layer_norm, norms
from .norms import launch_backward, launch_forward


def reference(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """x, residual ``[..., D]``, weight and bias ``[D]`` -> (norm, sum)."""
    total = x + residual
    return layer_norm.reference(total, weight, bias, eps), total


def triton_add_layer_norm(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    eps: float,
    *,
    out: tuple[Tensor, Tensor] | None = None,
    dependent_launch: bool = False,
    config: Config | None = None,
) -> tuple[Tensor, Tensor]:
    """``reference`` in one launch. ``out``: where norm and sum go; ``(x, residual)`` updates the stream in place.

    ``dependent_launch``: begin while the kernel before still runs (dependent launch, Hopper). ValueError if x and
    residual differ in shape or dtype, or past ``norms.MAX_WIDTH``.
    """
    function = layer_norm.forward_kernel
    vectors = (weight, bias)
    return launch_forward(
        "add_layer_norm", function, x, residual, vectors, eps, out=out, dependent_launch=dependent_launch, config=config
    )


def triton_backward(
    grad: Tensor, grad_sum: Tensor, total: Tensor, weight: Tensor, eps: float, *, config: Config | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """(dL/dx, dL/dw, dL/db) from dL/dy, dL/ds and the sum s."""
    function = layer_norm.backward_kernel
    name = "add_layer_norm.backward"
    dx, dw, db = launch_backward(
        name, function, grad, total, grad_sum, weight, eps, vectors=2, tiles=True, config=config
    )
    return dx, dw, db


@torch.library.custom_op("transect::add_layer_norm", mutates_args=())
def add_layer_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The operator for autograd and ``torch.compile``: the Triton kernel where it can run, else the reference."""
    if runs_triton(x, residual, weight, bias):
        return triton_add_layer_norm(x, residual, weight, bias, eps)
    y, total = reference(x, residual, weight, bias, eps)
    return y.contiguous(), total.contiguous()


@torch.library.custom_op("transect::add_layer_norm_backward", mutates_args=())
def add_layer_norm_backward(
    grad: Tensor, grad_sum: Tensor, total: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Its gradients: (of x and of the residual, of the weight, of the bias)."""
    if runs_triton(grad, grad_sum, total, weight):
        return triton_backward(grad, grad_sum, total, weight, eps)
    dx, dw, db = layer_norm.reference_backward(grad, total, weight, eps)
    return dx + grad_sum, dw, db


@add_layer_norm.register_fake
def _(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    y = torch.empty(x.shape, device=x.device, dtype=x.dtype)
    return y, torch.empty_like(y)


@add_layer_norm_backward.register_fake
def _(grad: Tensor, grad_sum: Tensor, total: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    dx = torch.empty(total.shape, device=total.device, dtype=total.dtype)
    dw = torch.empty(weight.shape, device=total.device, dtype=weight.dtype)
    return dx, dw, torch.empty_like(dw)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1], inputs[2])
    ctx.eps = inputs[4]


def _backward(ctx: Any, grad: Tensor, grad_sum: Tensor) -> tuple[Any, ...]:
    dx, dw, db = add_layer_norm_backward(grad, grad_sum, *ctx.saved_tensors, ctx.eps)
    return dx, dx, dw, db, None


add_layer_norm.register_autograd(_backward, setup_context=_setup)


def cost(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Cost:
    """8 FLOPs an element: the add, and 7 of the norm."""
    return Cost(8 * x.numel(), 2 * x.nbytes + weight.nbytes + bias.nbytes, 2 * x.nbytes)


def _gradient_cost(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Cost:
    return Cost(11 * x.numel(), 3 * x.nbytes + weight.nbytes, x.nbytes + 2 * weight.nbytes)


def _examples() -> Sequence[dict[str, Any]]:
    return [
        {
            "x": 1 + sample(*shape),
            "residual": sample(*shape, seed=3),
            "weight": sample(shape[-1], seed=1),
            "bias": sample(shape[-1], seed=2),
            "eps": 1e-5,
        }
        for shape in ((1, 768), (7, 33), (3, 5, 2), (0, 8))
    ]


def _peer(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    total = x + residual
    return F.layer_norm(total, weight.shape, weight, bias, eps), total


register(
    Op(
        name="add_layer_norm",
        reference=reference,
        cost=cost,
        implementations={
            "torch": Implementation("torch", lambda: reference, ("any",), batch_invariant=True),
            "triton": Implementation(
                "triton",
                available(triton_add_layer_norm),
                TRITON_TARGETS,
                batch_invariant=True,
                autograd=lambda: add_layer_norm,
            ),
        },
        examples=_examples,
        peers={"torch": _peer, "torch.compile": compiled(_peer)},
        differentiable=("x", "residual", "weight", "bias"),
        gradient_cost=_gradient_cost,
        cases=partial(norms.cases, vectors=2, add=True),
        kernels=partial(
            norms.kernels, layer_norm.forward_kernel, layer_norm.backward_kernel, vectors=2, add=True, tiles=True
        ),
        knobs=norms.knobs("add_layer_norm", triton_add_layer_norm, triton_backward, tiles=True),
    )
)
