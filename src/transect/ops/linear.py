r"""Linear: a matrix product, and a bias if there is one.

    Y = X W^T + b

Backward, with G = dL/dY:

    dL/dX = G W        dL/dW = G^T X        dL/db = sum over rows of G

Shapes: x ``[T, I]``, weight ``[O, I]``, bias ``[O]`` or None, result ``[T, O]``, all of one dtype.

What bounds it depends on the rows: 2 T I O FLOPs against I O weights, so for few tokens (decode) T FLOPs per byte in
bfloat16: bound by reading the weights; for many (prefill, training) by arithmetic. They cross at T = FLOP rate over
bandwidth: about 300 on a data-centre GPU, a few tens on a CPU.

``fixed_rows`` multiplies blocks of 16 rows, the last padded with zeros, as one batched product: a library picks its
kernel, and with that the order of its sums, by the number of rows, so a token alone and a token in a batch would
otherwise differ in the last bits. That neither the number of blocks nor a row's place in its block matters is up to the
library; a test checks it (MKL keeps it where ``I`` is a multiple of 4, as in every model). In float32 (576 x 1536, two
cores) one row costs 4x, as much as 16; 512 rows cost the same. Meant for inference: its gradient is right but wasteful.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .jit import TRITON_TARGETS, available
from .numerics import sample
from .registry import Cost, Implementation, Op, register

ROWS = 16
"""Block of ``fixed_rows``."""


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x ``[T, I]``, weight ``[O, I]``, bias ``[O]`` -> ``[T, O]``."""
    y = x @ weight.T
    return y if bias is None else y + bias


def fixed_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """As ``reference``; a row's result does not depend on how many rows there are, nor on what they hold."""
    tokens, inputs = x.shape
    n = -(-tokens // ROWS)
    blocks = F.pad(x, (0, 0, 0, n * ROWS - tokens)).view(n, ROWS, inputs)
    y = torch.bmm(blocks, weight.T.expand(n, -1, -1)).flatten(0, 1)[:tokens]
    return y if bias is None else y + bias


def cost(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Cost:
    """A product and a sum for each weight and row; the bias is one sum for each output."""
    tokens, outputs = x.shape[0], weight.shape[0]
    flops = 2 * tokens * weight.numel() + (0 if bias is None else tokens * outputs)
    read = x.nbytes + weight.nbytes + (0 if bias is None else bias.nbytes)
    return Cost(flops, read, tokens * outputs * x.element_size())


def _examples() -> Sequence[dict[str, Any]]:
    return [
        {"x": sample(1, 576), "weight": sample(192, 576, seed=1), "bias": None},
        {"x": sample(17, 33), "weight": sample(5, 33, seed=1), "bias": sample(5, seed=2)},
        {"x": sample(3, 1), "weight": sample(7, 1, seed=1), "bias": sample(7, seed=2)},
    ]


def _triton() -> Callable[..., Tensor]:
    """The kernels of ``small_matmul.py`` up to their number of rows, those of ``matmul.py`` above."""
    from . import matmul, small_matmul

    few = available(small_matmul.launcher())()

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """As ``reference``, on the GPU."""
        return few(x, weight, bias) if x.shape[0] <= small_matmul.MOST_ROWS else matmul.matmul(x, weight, bias)

    return linear


def _triton_autograd() -> Callable[..., Tensor]:
    from . import matmul

    return available(matmul.linear_autograd)()


register(
    Op(
        name="linear",
        reference=reference,
        cost=cost,
        implementations={
            "torch": Implementation("torch", lambda: F.linear, ("any",)),
            "torch_fixed_rows": Implementation("torch", lambda: fixed_rows, ("any",), batch_invariant=True),
            "triton": Implementation("triton", _triton, TRITON_TARGETS, autograd=_triton_autograd),
        },
        examples=_examples,
        peers={"torch": F.linear},
        differentiable=("x", "weight", "bias"),
    )
)
