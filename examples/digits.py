r"""Handwritten digits (8 x 8 pixels, bundled with scikit-learn), a small network, and the loss of language models.

    h = gelu(x W1^T + b1)        z = h W2^T        x 64 pixels, 128 hidden units, z one number for each digit

The network should give the right digit a high probability. Softmax makes probabilities of the ten numbers, and the loss
of a picture with digit t is how surprised the network is by it, the cross entropy:

    p_v = exp(z_v) / sum_u exp(z_u)        L = -log p_t = log sum_u exp(z_u) - z_t

Its gradient is as simple as can be, what was said minus what is true:

    dL/dz_v = p_v - [v = t]

A language model has this very loss, with the next token for t and a vocabulary in place of ten digits. So here runs the
operator that trains it, ``ops/loss/linear_cross_entropy_torch.py``, which has the last matrix product inside. A random
guess costs log 10 = 2.303 nats.

Each step takes 64 pictures at random in place of all 1400. That gradient is noisy, its mean is the true one, and it
costs a twentieth. AdamW divides each weight's step by how large its gradient has been, so one rate suits all of them.

    python examples/digits.py
"""

import argparse
import math
from collections.abc import Mapping
from pathlib import Path

import torch
from curve import show
from torch import Tensor, nn

from transect.ops.activation.gelu import gelu
from transect.ops.linear.many_rows.matmul import linear_autograd as linear
from transect.ops.loss.linear_cross_entropy_torch import linear_cross_entropy
from transect.train.config import OptimizerConfig
from transect.train.optim import build as build_optimizer

HIDDEN, BATCH = 128, 64
Data = tuple[Tensor, Tensor]


def data(seed: int = 0) -> tuple[Data, Data]:
    """(pictures ``[N, 64]`` from 0 to 1, digits ``[N]``) to train on, and 397 of them to test with."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise SystemExit("the digits come with scikit-learn: pip install scikit-learn") from None
    pictures, digits = load_digits(return_X_y=True)
    order = torch.randperm(len(digits), generator=torch.Generator().manual_seed(seed))
    x, y = torch.tensor(pictures, dtype=torch.float32)[order] / 16, torch.tensor(digits)[order]
    return (x[:1400], y[:1400]), (x[1400:], y[1400:])


def initial(seed: int = 0) -> dict[str, nn.Parameter]:
    """Weights that keep numbers at about the size they come in with: variance 1 over the number of inputs."""
    generator = torch.Generator().manual_seed(seed)
    w1 = torch.randn(HIDDEN, 64, generator=generator) / math.sqrt(64)
    w2 = torch.randn(10, HIDDEN, generator=generator) / math.sqrt(HIDDEN)
    return {name: nn.Parameter(t) for name, t in (("w1", w1), ("b1", torch.zeros(HIDDEN)), ("w2", w2))}


def hidden(x: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    return gelu(linear(x, weights["w1"], weights["b1"]), False)


def loss_of(x: Tensor, y: Tensor, weights: Mapping[str, Tensor]) -> Tensor:
    """Mean loss of pictures x ``[N, 64]`` with digits y ``[N]``."""
    return linear_cross_entropy(hidden(x, weights), weights["w2"], y)


def accuracy(x: Tensor, y: Tensor, weights: Mapping[str, Tensor]) -> float:
    with torch.no_grad():
        return float((linear(hidden(x, weights), weights["w2"]).argmax(1) == y).float().mean())


def loss() -> Tensor:
    """The loss of one batch, for ``transect explain backward examples/digits.py``."""
    (x, y), _ = data()
    return loss_of(x[:BATCH].clone(), y[:BATCH], initial())  # a view would keep all of x in memory


def main() -> None:
    parser = argparse.ArgumentParser(description="Learn to read digits.")
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--rate", type=float, default=1e-2, help="learning rate")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--plot", type=Path, help="draw the curve into this file")
    options = parser.parse_args()
    torch.set_num_threads(1)

    device = torch.device(options.device)
    (x, y), test = ((pictures.to(device), digits.to(device)) for pictures, digits in data())
    weights = {name: nn.Parameter(weight.detach().to(device)) for name, weight in initial().items()}
    optimizer = build_optimizer(OptimizerConfig(learning_rate=options.rate, weight_decay=0.01), weights)
    generator = torch.Generator().manual_seed(0)
    print(f"before: {accuracy(*test, weights):.1%} of the test pictures are read right")
    losses = []
    for step in range(options.steps):
        picked = torch.randint(len(y), (BATCH,), generator=generator).to(device)
        loss = loss_of(x[picked], y[picked], weights)
        loss.backward()
        optimizer.step(1 - step / options.steps)  # the rate falls to 0, which averages the noise away
        optimizer.zero_grad()
        losses.append(loss.item())
    print(
        f"after {options.steps} steps: {accuracy(x, y, weights):.1%} of the training pictures, and of those never seen:"
    )
    print(f"test accuracy {accuracy(*test, weights):.2%}")
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}; a guess at random costs {math.log(10):.3f}")
    show({"loss": losses}, options.plot)


if __name__ == "__main__":
    main()
