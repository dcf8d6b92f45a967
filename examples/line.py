r"""The smallest thing that learns: a line through points, by gradient descent, with nothing but Python.

    prediction  p_i = w x_i + b
    loss        L = 1/n sum_i e_i^2,    e_i = p_i - y_i

Which way is down? Change w a little and every p_i changes by x_i times that, b a little and every p_i changes by just
that. By the chain rule

    dL/dw = 2/n sum_i e_i x_i           dL/db = 2/n sum_i e_i

and a step goes against the gradient: w <- w - r dL/dw, b <- b - r dL/db, with learning rate r. That is all of training;
a language model has more numbers than two, and a longer chain.

How large may r be? Along a direction in which the loss bends with curvature c, a step multiplies the distance from the
lowest point by 1 - r c, so it shrinks while r < 2 / c. The curvatures here are the eigenvalues of the matrix of second
derivatives, 2/n [[sum x^2, sum x], [sum x, n]]. Take ``--rate`` above the printed limit and watch the loss grow.

    python examples/line.py
"""

import argparse
import math
import random
from pathlib import Path

from curve import show

TRUE_W, TRUE_B = 0.7, -1.3


def points(n: int = 50, seed: int = 0) -> tuple[list[float], list[float]]:
    """Points near the line y = 0.7 x - 1.3."""
    draw = random.Random(seed)
    xs = [draw.uniform(-2, 4) for _ in range(n)]
    return xs, [TRUE_W * x + TRUE_B + draw.gauss(0, 0.3) for x in xs]


def loss_of(w: float, b: float, xs: list[float], ys: list[float]) -> float:
    return sum((w * x + b - y) ** 2 for x, y in zip(xs, ys, strict=True)) / len(xs)


def gradient(w: float, b: float, xs: list[float], ys: list[float]) -> tuple[float, float]:
    """(dL/dw, dL/db), the two formulas above."""
    errors = [w * x + b - y for x, y in zip(xs, ys, strict=True)]
    return 2 / len(xs) * sum(e * x for e, x in zip(errors, xs, strict=True)), 2 / len(xs) * sum(errors)


def largest_rate(xs: list[float]) -> float:
    """2 over the largest curvature."""
    mean, square = sum(xs) / len(xs), sum(x * x for x in xs) / len(xs)
    curvature = (square + 1) + math.sqrt((square - 1) ** 2 + 4 * mean**2)  # of [[2 square, 2 mean], [2 mean, 2]]
    return 2 / curvature


def least_squares(xs: list[float], ys: list[float]) -> tuple[float, float]:
    """The lowest point in closed form: where both derivatives are 0."""
    mx, my = sum(xs) / len(xs), sum(ys) / len(ys)
    w = sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / sum((x - mx) ** 2 for x in xs)
    return w, my - w * mx


def loss():
    """The same loss in torch, for ``transect explain backward examples/line.py``."""
    import torch

    xs, ys = (torch.tensor(values, dtype=torch.float64) for values in points())
    w, b = (torch.zeros((), dtype=torch.float64, requires_grad=True) for _ in range(2))
    return (w * xs + b - ys).square().mean()


def main() -> None:
    parser = argparse.ArgumentParser(description="Fit a line by gradient descent.")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate")
    parser.add_argument("--plot", type=Path, help="draw the curve into this file")
    options = parser.parse_args()

    xs, ys = points()
    w, b = 0.0, 0.0
    tiny = 1e-6
    slope = (loss_of(w + tiny, b, xs, ys) - loss_of(w - tiny, b, xs, ys)) / (2 * tiny)
    print(f"dL/dw at the start: {gradient(w, b, xs, ys)[0]:.6f} by the formula, {slope:.6f} by trying")
    losses = []
    for _ in range(options.steps):
        losses.append(loss_of(w, b, xs, ys))
        if losses[-1] > 1e6 * losses[0]:
            break  # each step overshoots by more than the one before
        dw, db = gradient(w, b, xs, ys)
        w, b = w - options.rate * dw, b - options.rate * db
    best_w, best_b = least_squares(xs, ys)
    print(f"rate {options.rate}, of at most {largest_rate(xs):.3f}")
    print(f"after {len(losses)} steps y = {w:.6f} x + {b:.6f}; least squares says {best_w:.6f} x + {best_b:.6f}")
    print(f"loss {losses[0]:.4f} -> {loss_of(w, b, xs, ys):.4f}; the noise alone makes {0.3**2:.4f} on average")
    show({"loss": losses}, options.plot)


if __name__ == "__main__":
    main()
