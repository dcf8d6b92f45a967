r"""GELU is a soft relu: x times the probability P(x) that a standard normal variable lies below x.

    y = x P(x)        P(x) = (1 + erf(x / sqrt 2)) / 2        dy/dx = P(x) + x exp(-x^2 / 2) / sqrt(2 pi)

Two things to learn. The first is *recompute or keep*. The backward pass needs P(x), and the forward pass had it.
Keeping P for the backward pass would be a write now and a read later, 8 bytes an element; computing it again from
x costs some 20 FLOPs, and x must be read anyway. On a device that does 100 FLOPs in the time of one byte,
recompute.

The second is *special functions*. exp and erf are not single instructions. A GPU has an exp2 unit, at a quarter to
a sixteenth of the speed of multiplications, and erf is a polynomial or two. In float32 use `tl.erf`. For halves
the shipped kernel has a cheaper form whose error of 1.5e-7 is far below their rounding: precision is a choice,
made from the dtype of the result, and the tests say whether it is good enough.

Bytes bound it either way: 2.5 FLOPs for each byte of bfloat16.
"""

import math

import torch

from ....costs.work import Cost
from ...record import Case, Live, Rung, Slip, Speed, ToCompile
from ...texts import excerpt
from ..inputs import normal

SOLUTION = f'''import torch
import triton
import triton.language as tl


{excerpt("ops/activation/gelu.py", "_half_erfc", "_probability", "_forward_kernel", "_backward_kernel")}

def forward(x):
    """x, float32 and contiguous -> x P(x)."""
    y = torch.empty_like(x)
    n = x.numel()
    if n:
        _forward_kernel[(-(-n // 1024),)](x, y, n, TANH=False, EXACT=True, BLOCK=1024)
    return y


def backward(g, x):
    """dL/dx from the upstream gradient g = dL/dy and the input x."""
    dx = torch.empty_like(x)
    n = x.numel()
    if n:
        _backward_kernel[(-(-n // 1024),)](g, x, dx, n, TANH=False, EXACT=True, BLOCK=1024)
    return dx
'''


def _p(x):
    return 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def _bell(x):
    return torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


RUNG = Rung(
    name="gelu",
    title="GELU forward and backward: recompute or keep",
    road="kernels",
    place=8,
    kind="triton",
    minutes=45,
    after=("vector_add", "chain_rule"),
    solution=SOLUTION,
    holes=("_probability", "_forward_kernel", "_backward_kernel", "forward", "backward"),
    answers={"forward": lambda x: x * _p(x), "backward": lambda g, x: g * (_p(x) + x * _bell(x))},
    cases=(
        Case("forward, 1,024 elements", lambda rng: [normal(rng, 1024)], "y = x (1 + erf(x / sqrt 2)) / 2."),
        Case("forward, 33 by 77", lambda rng: [normal(rng, 33, 77)], "Mask the last tile, and count with numel()."),
        Case("forward, large numbers", lambda rng: [20 * normal(rng, 500)],
             "Far below 0 the result is 0, and far above it is x: nothing may overflow on the way."),
        Case("backward, 1,024 elements", lambda rng: [normal(rng, 1024), normal(rng, 1024)],
             "dy/dx = P(x) + x exp(-x^2 / 2) / sqrt(2 pi), times g.", entry="backward"),
        Case("backward, 33 by 77", lambda rng: [normal(rng, 33, 77), 3 * normal(rng, 33, 77)],
             "Mask the last tile in the gradient too.", entry="backward"),
    ),
    slips=(
        Slip(lambda x: x * torch.sigmoid(1.702 * x), "This is the sigmoid form, an approximation: use erf."),
        Slip(lambda x: x * 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
             "This is the tanh form of GPT-2: this rung wants the exact one, with erf."),
        Slip(lambda g, x: g * _p(x),
             "x P(x) is a product: the derivative of P counts too, x exp(-x^2 / 2) / sqrt(2 pi).",
             "backward"),
        Slip(lambda g, x: _p(x) + x * _bell(x), "The upstream gradient g is missing.", "backward"),
    ),
    speed=Speed(lambda rng: [normal(rng, 10_000), normal(rng, 10_000)],
                "The gradient needs g and x, and writes dx: read each once, and recompute P.",
                lambda g, x: Cost(20 * x.numel(), g.nbytes + x.nbytes, x.nbytes), entry="backward", ratio=1.3,
                peer="import torch\n\n\ndef backward(g, x):\n    return torch.ops.aten.gelu_backward(g, x)\n",
                large=lambda rng: [normal(rng, 1 << 25), normal(rng, 1 << 25)]),
    compiled=(ToCompile("_forward_kernel", {"x_ptr": "*fp32", "y_ptr": "*fp32", "n": "i32"},
                       {"TANH": False, "EXACT": True, "BLOCK": 1024}, ("n",)),),
    hints=("Begin with the kernel of vector_add, and one input.",
           "P = 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))",
           "slope = P + x * 0.3989422804014327 * tl.exp(-0.5 * x * x); dx = g * slope"),
    differences=
        "The shipped file adds the tanh form, the cheaper erfc for halves, a CUDA C++ version, and torch.library "
    "registration of the gradient.",
    live=Live("ops", {"transect.ops.activation.gelu:_forward_kernel": None,
                      "transect.ops.activation.gelu:_backward_kernel": None}, ("gelu",)),
    shipped="ops/activation/gelu.py",
)  # fmt: skip
