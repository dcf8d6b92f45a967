r"""Gradient descent takes one step size for all weights. But slopes of different weights differ a thousandfold, and
each mini-batch says something else. *Adam* keeps two running means for each weight: m of the gradient (which way,
on the whole) and v of its square (how large, on the whole). It steps by m / sqrt(v): about the same size for every
weight, smaller where the batches disagree.

    m <- b1 m + (1 - b1) g         v <- b2 v + (1 - b2) g²
    w <- (1 - lr decay) w - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

Both means begin at 0 and are too small at first. Dividing by 1 - b^t mends exactly that (*bias correction*, t
counts from 1). *W* is for weight decay: shrink each weight a little, apart from the gradient. Adding decay * w to
the gradient instead (Adam with L2) is not the same, because m / sqrt(v) scales it away. eps stands outside of the
root.

Count the bytes, for this operator is nothing else. In float32 it reads w, g, m, v and writes w, m, v: 28 bytes a
weight, for 15 FLOPs. An 8-billion model moves 224 GB in each step: 70 ms on an H100, if it is *one* pass. Written
as ten torch operators it is some three times that, and the grader counts. In place operators (`lerp_`, `mul_`,
`addcmul_`, `addcdiv_`) help. And the states are memory: m and v in float32 are twice the weights. Two rungs from
here you cut them in pieces.
"""

from ....costs.work import Cost
from ...record import Case, Live, Rung, Slip, Speed
from ..inputs import normal

SOLUTION = '''import math

import torch


@torch.no_grad()
def step(w, g, m, v, t, lr, b1, b2, eps, decay):
    """One AdamW step, in place on w, m and v; t counts from 1. Returns (w, m, v)."""
    w.mul_(1 - lr * decay)
    m.lerp_(g, 1 - b1)
    v.mul_(b2).addcmul_(g, g, value=1 - b2)
    denominator = v.sqrt().div_(math.sqrt(1 - b2**t)).add_(eps)
    w.addcdiv_(m, denominator, value=-lr / (1 - b1**t))
    return w, m, v
'''


def _drive(module, w, gradients, first, lr, b1, b2, eps, decay):
    import torch

    w, m, v = w.clone(), torch.zeros_like(w), torch.zeros_like(w)
    for t, g in enumerate(gradients, start=first):
        w, m, v = module.step(w, g, m, v, t, lr, b1, b2, eps, decay)
    return w, m, v


def _answer(w, gradients, first, lr, b1, b2, eps, decay, form="adamw"):
    m, v = w * 0, w * 0
    for t, g in enumerate(gradients, start=first):
        g = g + decay * w if form == "l2" else g
        m, v = b1 * m + (1 - b1) * g, b2 * v + (1 - b2) * g * g
        if form == "raw":
            mean, square = m, v
        else:
            mean, square = m / (1 - b1**t), v / (1 - b2**t)
        update = mean / (square + eps).sqrt() if form == "inside" else mean / (square.sqrt() + eps)
        w = (w if form == "l2" else w * (1 - lr * decay)) - lr * update
    return w, m, v


def _make(rng, size, steps, first=1, eps=1e-8, decay=0.1, scale=1.0):
    return [normal(rng, size), [scale * normal(rng, size) for _ in range(steps)], first, 0.01, 0.9, 0.999, eps, decay]


def _live(mine, shipped):
    """Update float32 weights by the student's step; the shipped update takes the rest."""
    import torch

    @torch.no_grad()
    def adamw_update(optimizer, name, weight, gradient, m, v, factor, scale=None, decay=None):
        if weight.dtype != torch.float32:
            shipped(optimizer, name, weight, gradient, m, v, factor, scale, decay)
            return
        config, decay = optimizer.config, optimizer.decay(name) if decay is None else decay
        numbers = config.learning_rate * factor, config.beta1, config.beta2, config.eps, decay
        new = mine.step(weight, optimizer.widened(gradient, scale), m, v, optimizer.steps, *numbers)
        for old, made in zip((weight, m, v), new, strict=True):
            if made is not old:
                old.copy_(made)

    return adamw_update


def _cost(w, gradients, *rest):
    return Cost(15 * w.numel(), 4 * w.nbytes, 3 * w.nbytes) * len(gradients)


def _slip(form, teaches):
    return Slip(lambda *arguments: _answer(*arguments, form=form), teaches)


RUNG = Rung(
    name="adamw",
    title="AdamW in as few passes as you can",
    road="training",
    place=1,
    kind="torch",
    minutes=40,
    after=("digits",),
    solution=SOLUTION,
    holes=("step",),
    answers={"train": _answer},
    drives={"train": _drive},
    forbids=("_fused_adamw_", "_foreach_add_", "_fused_adam_"),
    tolerance=1e-5,
    cases=(
        Case("the first step", lambda rng: _make(rng, 50, 1, decay=0.0),
             "At t = 1 the corrected m is g and the corrected v is g squared: the step is lr in the direction of "
             "the sign."),
        Case("ten steps", lambda rng: _make(rng, 50, 10, decay=0.0),
             "m and v are running means; t grows by 1 in each step."),
        Case("with decay", lambda rng: _make(rng, 50, 5),
             "Shrink the weight by 1 - lr * decay, apart from the gradient."),
        Case("a large eps", lambda rng: _make(rng, 50, 3, eps=0.5), "eps is added to the root, not under it."),
        Case("step 1,000", lambda rng: _make(rng, 50, 2, first=1000), "Corrections use t as it is given."),
        Case("tiny gradients", lambda rng: _make(rng, 50, 3, scale=1e-4), "g squared is 1e-8: add eps after the root."),
    ),
    slips=(
        _slip("raw", "Bias correction is missing: divide m by 1 - b1^t and v by 1 - b2^t."),
        _slip("l2", "The decay is added to the gradient: that is Adam with L2. AdamW shrinks the weight itself."),
        _slip("inside", "eps stands under the root: add it after the root."),
    ),
    speed=Speed(lambda rng: _make(rng, 20_000, 2),
                "Too many passes over memory: work in place, and join steps with lerp_, addcmul_ and addcdiv_.",
                _cost, ratio=1.35),
    hints=("m.lerp_(g, 1 - b1) is m + (1 - b1)(g - m), in one pass.",
           "v.mul_(b2).addcmul_(g, g, value=1 - b2)",
           "Put both corrections into numbers: sqrt(1 - b2^t) under the root's result, 1 - b1^t into the step."),
    differences=
        "On a GPU the shipped step is one kernel over all parameters (ops/optim/adamw.py), 28 bytes a weight; in "
        "bfloat16 "
    "it rounds by chance, so that small updates are not lost.",
    live=Live("train", {"transect.train.optim.adamw:adamw_update": _live}),
    shipped="train/optim/adamw.py",
)  # fmt: skip
