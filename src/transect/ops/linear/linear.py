r"""Linear: a matrix product with an optional bias.

    Y = X W^T + b

Backward, with G = dL/dY:

    dL/dX = G W        dL/dW = G^T X        dL/db = sum over rows of G

Shapes: x ``[T, I]``, weight ``[O, I]``, bias ``[O]`` or None, result ``[T, O]``, all of one dtype.

Bound by reading the weights for few tokens (decode), and by arithmetic for many (prefill, training): 2 T I O FLOPs
against I O weights are T FLOPs per byte in bfloat16. The two cross at T = FLOP rate over bandwidth: about 300 on a
data-centre GPU, a few tens on a CPU.

``fixed_rows`` gives a token the same bits alone and in a batch. A library picks its kernel, and with it the order of
its sums, by the number of rows. So ``fixed_rows`` multiplies blocks of 16 rows (the last one padded with zeros) as one
batched product. It relies on the library that neither the number of blocks nor the place of a row in its block matters;
a test checks it (MKL keeps it where ``I`` is a multiple of 4, as in every model). One row then costs as much as 16. It
is meant for inference: its gradient is right but wasteful.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...costs.work import Cost
from ..lang.jit import TRITON_TARGETS, available, runs_triton
from ..numerics import sample
from ..registry import Implementation, Op, in_torch, register

ROWS = 16
"""Rows in a block of ``fixed_rows``."""


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Multiply x ``[T, I]``, weight ``[O, I]``, bias ``[O]`` -> ``[T, O]``."""
    y = x @ weight.T
    return y if bias is None else y + bias


def fixed_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``reference``, where a row's result depends neither on the number of rows nor on the other rows'
    values."""
    if len(weight) == 1:  # a product by a vector sums in an order that depends on the row's place
        return fixed_rows(x, weight.expand(2, -1), bias)[:, :1]
    tokens, inputs = x.shape
    n = -(-tokens // ROWS)
    blocks = F.pad(x, (0, 0, 0, n * ROWS - tokens)).view(n, ROWS, inputs)
    y = torch.bmm(blocks, weight.T.expand(n, -1, -1)).flatten(0, 1)[:tokens]
    return y if bias is None else y + bias


def cost(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Cost:
    """Count a product and a sum for each weight and row; the bias is one sum for each output."""
    tokens, outputs = x.shape[0], weight.shape[0]
    flops = 2 * tokens * weight.numel() + (0 if bias is None else tokens * outputs)
    read = x.nbytes + weight.nbytes + (0 if bias is None else bias.nbytes)
    return Cost(flops, read, tokens * outputs * x.element_size())


def _examples() -> Sequence[dict[str, Any]]:
    return [
        {"x": sample(1, 288), "weight": sample(96, 288, seed=1), "bias": None},
        {"x": sample(17, 33), "weight": sample(5, 33, seed=1), "bias": sample(5, seed=2)},
        {"x": sample(3, 1), "weight": sample(7, 1, seed=1), "bias": sample(7, seed=2)},
    ]


def _triton() -> Callable[..., Tensor]:
    """Load the kernels of ``few_rows/small_matmul.py`` for few rows; for more those of ``many_rows/matmul.py``, or
    cuBLAS where it is faster."""
    from .few_rows import small_matmul
    from .many_rows import matmul
    from .many_rows.tiling import cublas_is_quicker

    few = available(small_matmul.best_launcher())()

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, dependent_launch: bool = False) -> Tensor:
        """Compute ``reference`` on the GPU. ``dependent_launch``: the weight may be read while the previous kernel
        still runs."""
        if x.shape[0] <= small_matmul.MOST_ROWS:
            return few(x, weight, bias, dependent_launch=dependent_launch)
        if cublas_is_quicker(x, weight):
            return F.linear(x, weight, bias)
        return matmul.matmul(x, weight, bias)

    return linear


def invariant_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, parts: int | None = None) -> Tensor:
    """Compute ``reference`` on any device; a row's result does not depend on the number of rows. ``parts``: of
    ``fixed_order.product``."""
    if not runs_triton(x):
        return fixed_rows(x, weight, bias)
    from . import fixed_order

    return fixed_order.product(x, weight, bias, parts=parts)


def _triton_fixed() -> Callable[..., Tensor]:
    """Load the products in a fixed order of sums, for many and for few rows."""
    from .few_rows.invariant import InvariantRows

    return available(InvariantRows().linear)()


def _triton_autograd() -> Callable[..., Tensor]:
    from .many_rows import matmul

    return available(matmul.linear_autograd)()


register(
    Op(
        name="linear",
        reference=reference,
        cost=cost,
        implementations={
            "torch": Implementation("torch", lambda: F.linear, ("any",)),
            "torch_fixed_rows": in_torch(fixed_rows, batch_invariant=True),
            "triton": Implementation("triton", _triton, TRITON_TARGETS, autograd=_triton_autograd),
            "triton_fixed_rows": Implementation("triton", _triton_fixed, TRITON_TARGETS, batch_invariant=True),
        },
        examples=_examples,
        peers={"torch": F.linear},
        differentiable=("x", "weight", "bias"),
        measured_as=("matmul", "small_matmul"),
        error_ratio=4.0,
        error_note="float32 on a GPU is summed along K one product after another, which cuBLAS does in parts",
    )
)
