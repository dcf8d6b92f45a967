r"""Now let the network find its weights itself. For that you need the slope of the output with respect to each weight,
and the chain rule is all there is to it: *the slope through a chain of steps is the product of the slopes of the
steps*.

Go through the network backwards, with `g` = dL/dy given to you:

    y = W2 h + b2          dL/db2 = g          dL/dW2[j] = g h[j]         dL/dh[j] = g W2[j]
    h = relu(z)            dL/dz[j] = dL/dh[j] where z[j] > 0, else 0
    z = W1 x + b1          dL/db1[j] = dL/dz[j]     dL/dW1[j][i] = dL/dz[j] x[i]
                           dL/dx[i] = sum over j of dL/dz[j] W1[j][i]

Read the lines once more and see the pattern, for it never changes: something *multiplied* gets the other factor
times g. What was *added* gets g as it is. What was *used in several places* gets the sum of what comes from each
place: x goes into every hidden unit, so its slope is a sum.

Also look at what you need: h and z (or only which z were positive) and x. The forward pass made them, so somebody
must *keep* them until the backward pass comes. That memory (activations) is what limits training, not the weights.
And the backward pass has two products for each one of the forward pass, so it costs twice as much.
"""

import torch

from ...record import Case, Rung, Slip, Speed
from .xor import network

SOLUTION = '''def backward(x, w1, b1, w2, b2, g):
    """Slopes of L for y = w2 relu(w1 x + b1) + b2 and g = dL/dy: (dx, dw1, db1, dw2, db2), in the shapes of their
    arguments."""
    dx = [0.0] * len(x)
    dw1, db1, dw2 = [], [], []
    for row, bias, weight in zip(w1, b1, w2):
        z = bias
        for factor, value in zip(row, x):
            z += factor * value
        dz = g * weight if z > 0 else 0.0
        dw2.append(g * max(z, 0.0))
        db1.append(dz)
        dw1.append([dz * value for value in x])
        for i, factor in enumerate(row):
            dx[i] += dz * factor
    return dx, dw1, db1, dw2, g
'''


def _backward(x, w1, b1, w2, b2, g):
    values = [torch.tensor(each, dtype=torch.float64, requires_grad=True) for each in (x, w1, b1, w2, b2)]
    tx, tw1, tb1, tw2, tb2 = values
    y = tw2 @ torch.relu(tw1 @ tx + tb1) + tb2
    return [each.tolist() for each in torch.autograd.grad(y, values, torch.tensor(g, dtype=torch.float64))]


def _without_bend(x, w1, b1, w2, b2, g):
    dz = [g * w for w in w2]
    hidden = [max(b + sum(w * v for w, v in zip(row, x, strict=True)), 0.0) for row, b in zip(w1, b1, strict=True)]
    dx = [sum(d * row[i] for d, row in zip(dz, w1, strict=True)) for i in range(len(x))]
    return dx, [[d * v for v in x] for d in dz], dz, [g * h for h in hidden], g


def _make(rng, inputs, hidden):
    return [*network(rng, inputs, hidden), float(rng.standard_normal())]


RUNG = Rung(
    name="chain_rule",
    title="The chain rule, backwards through two layers",
    road="arithmetic",
    place=3,
    kind="python",
    minutes=30,
    after=("xor",),
    solution=SOLUTION,
    holes=("backward",),
    answers={"backward": _backward},
    tolerance=1e-9,
    cases=(
        Case("one unit, open", lambda rng: [[2.0], [[1.5]], [0.5], [3.0], 1.0, 1.0],
             "With one unit and z > 0 every slope is a product of two numbers: write the chain out."),
        Case("one unit, closed", lambda rng: [[2.0], [[-1.5]], [0.5], [3.0], 1.0, 1.0],
             "Where z <= 0 the bend is flat: nothing flows through it, to w1, b1 or x."),
        Case("upstream slope", lambda rng: [[2.0], [[1.5]], [0.5], [3.0], 1.0, -0.7],
             "Every slope is multiplied by g, that of b2 too."),
        Case("4 inputs, 6 hidden units", lambda rng: _make(rng, 4, 6),
             "x feeds every hidden unit: its slope is the sum of what comes back from each."),
    ),
    slips=(Slip(_without_bend, "The bend is forgotten on the way back: where z <= 0 the slope is 0."),),
    speed=Speed(lambda rng: _make(rng, 20, 40),
        "Compute each z once: the forward pass is not needed again for every slope.",
                ratio=1.5),
    hints=("Recompute z for each hidden unit first, then walk back through the formulas of the page.",
           "dz = g * w2[j] if z > 0 else 0.0",
           "dx[i] += dz * w1[j][i] inside the loop over hidden units."),
    differences=
        "torch writes one such backward function for each operator and lets autograd chain them. Transect does the "
    "same in every operator file: math forward and backward stand in its docstring, the kernel in its code.",
    shipped="ops/activation/gelu.py",
)  # fmt: skip
