r"""XOR, the smallest problem that one layer cannot solve, by a two-layer network written three ways.

    x        y          A line cannot part the ones from the zeros: whatever it gives to (0, 1) and (1, 0) together, it
    0 0      0          gives to (0, 0) and (1, 1) together, since both pairs have the same sum. A layer in between with
    0 1      1          a curved function bends the plane first.
    1 0      1
    1 1      0

Forward, for the four rows at once (X ``[4, 2]``, Y ``[4, 2]`` one-hot, H hidden units):

    A = X W1^T + b1          W1 [H, 2]
    S = gelu(A)
    Z = S W2^T + b2          W2 [2, H]
    P = softmax(Z)           a probability for 0 and for 1, row by row
    D = P - Y
    L = sum(D * D) / 4

Backward: the chain rule, from the loss to the weights. Write dT for dL/dT, which has the shape of T. Each line uses
only the line before it and what the forward pass kept:

    dP  = 2 D / 4
    dZ  = P * (dP - rowsum(dP * P))                  softmax: every output of a row depends on all its inputs
    dW2 = dZ^T S        db2 = colsum(dZ)
    dS  = dZ W2                                      what was multiplied by W2 on the way up, is so on the way down
    dA  = dS * (N(A) + A n(A))                       gelu(a) = a N(a), N and n the normal distribution and density
    dW1 = dA^T X        db1 = colsum(dA)

Then every weight moves against its gradient: W <- W - r dW.

The three ways: *by hand*, the formulas above as code; *operators*, the forward pass written with this project's
operators, whose gradients are registered with torch (``matmul.py``, ``gelu.py``, ``softmax.py``, ``dot.py`` under
``ops/``); *autograd*, with torch's own. All in float64 (in which our operators run their references), from
the same weights. They must agree to the last digit printed, in every step.

    python examples/xor.py
"""

import argparse
import math
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F
from curve import show
from torch import Tensor

from transect.ops.activation.gelu import gelu
from transect.ops.first.dot import dot
from transect.ops.first.softmax import softmax
from transect.ops.first.vector_add import vector_add
from transect.ops.linear.many_rows.matmul import linear_autograd as linear

ROWS = torch.tensor([[0, 0], [0, 1], [1, 0], [1, 1]], dtype=torch.float64)
ANSWERS = F.one_hot(torch.tensor([0, 1, 1, 0])).double()
Weights = tuple[Tensor, Tensor, Tensor, Tensor]


def initial(hidden: int = 8, seed: int = 1) -> Weights:
    """W1, b1, W2, b2."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    return (
        normal(hidden, 2),
        torch.zeros(hidden).double(),
        normal(2, hidden) / math.sqrt(hidden),
        torch.zeros(2).double(),
    )


def task(weights: Tensor) -> tuple[Tensor, Tensor]:
    """X and Y, on the device of the weights."""
    return ROWS.to(weights.device), ANSWERS.to(weights.device)


def by_hand(w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> tuple[Tensor, Weights]:
    """Loss and gradients, the formulas above line by line."""
    X, Y = task(w1)
    a = X @ w1.T + b1
    normal = (1 + torch.erf(a / math.sqrt(2))) / 2
    s = a * normal
    z = s @ w2.T + b2
    e = (z - z.amax(1, keepdim=True)).exp()
    p = e / e.sum(1, keepdim=True)
    d = p - Y
    loss = (d * d).sum() / 4

    dp = 2 * d / 4
    dz = p * (dp - (dp * p).sum(1, keepdim=True))
    dw2, db2 = dz.T @ s, dz.sum(0)
    ds = dz @ w2
    da = ds * (normal + a * (-a * a / 2).exp() / math.sqrt(2 * math.pi))
    dw1, db1 = da.T @ X, da.sum(0)
    return loss, (dw1, db1, dw2, db2)


def with_operators(w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """The loss, by operators of ``transect.ops``."""
    X, Y = task(w1)
    p = softmax(linear(gelu(linear(X, w1, b1), False), w2, b2))
    d = vector_add(p, -Y)
    return dot(d, d) / 4


def with_torch(w1: Tensor, b1: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    """The loss, by torch."""
    X, Y = task(w1)
    p = F.linear(F.gelu(F.linear(X, w1, b1)), w2, b2).softmax(1)
    return F.mse_loss(p, Y, reduction="sum") / 4


def by_autograd(forward: Callable[..., Tensor]) -> Callable[..., tuple[Tensor, Weights]]:
    """Loss and gradients of ``forward`` by walking its graph backward."""

    def run(*weights: Tensor) -> tuple[Tensor, Weights]:
        leaves = [weight.detach().requires_grad_() for weight in weights]
        loss = forward(*leaves)
        loss.backward()
        return loss.detach(), tuple(leaf.grad for leaf in leaves)

    return run


WAYS = {"by hand": by_hand, "operators": by_autograd(with_operators), "autograd": by_autograd(with_torch)}


def loss() -> Tensor:
    """The loss by our operators, for ``transect explain backward examples/xor.py``."""
    return with_operators(*(weight.requires_grad_() for weight in initial()))


def main() -> None:
    parser = argparse.ArgumentParser(description="XOR by a two-layer network, three ways.")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rate", type=float, default=1.0, help="learning rate")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--plot", type=Path, help="draw the curve into this file")
    options = parser.parse_args()
    torch.set_num_threads(1)  # for matrices of a few numbers, more would only be slower

    every = max(1, options.steps // 8)
    weights = dict.fromkeys(WAYS, tuple(weight.to(options.device) for weight in initial()))
    losses: dict[str, list[float]] = {name: [] for name in WAYS}
    print("  step  " + "".join(f"{name:>20}" for name in WAYS))
    for step in range(1, options.steps + 1):
        for name, way in WAYS.items():
            loss, gradients = way(*weights[name])
            weights[name] = tuple(w - options.rate * g for w, g in zip(weights[name], gradients, strict=True))
            losses[name].append(float(loss))
        printed = [f"{losses[name][-1]:.12f}" for name in WAYS]
        if step == 1 or step % every == 0:
            print(f"{step:6}  " + "".join(f"{text:>20}" for text in printed))
        apart = max(abs(losses[name][-1] - losses["by hand"][-1]) for name in WAYS)
        assert apart < 1e-12, f"step {step}: the three ways differ by {apart}"
    for name in WAYS:
        for ours, other in zip(weights[name], weights["autograd"], strict=True):
            torch.testing.assert_close(ours, other, rtol=1e-10, atol=1e-10)
    w1, b1, w2, b2 = weights["operators"]
    answers = softmax(linear(gelu(linear(task(w1)[0], w1, b1), False), w2, b2))[:, 1]
    for (left, right), answer in zip(ROWS.int().tolist(), answers.tolist(), strict=True):
        print(f"{left} xor {right}: 1 with probability {answer:.4f}")
    print("the three ways agree in every loss to 12 decimals, and in every weight at the end to 10")
    show({"loss": losses["operators"]}, options.plot)


if __name__ == "__main__":
    main()
