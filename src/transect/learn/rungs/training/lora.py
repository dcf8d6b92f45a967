r"""Fine-tuning all of an 8-billion model needs 16 bytes a weight: weight, gradient and AdamW's two states. That is 128
GB for a task that may need a few thousand examples. *LoRA*: leave W as it is, and learn a small correction beside
it:

    y = W x + s B A x        A [r, I]  B [O, r]  r = 8 or 16      s = alpha / r

B starts at 0, so training begins at exactly the old model. For a 4,096 by 4,096 matrix and r = 16 there are 131,072
numbers to learn in place of 16.8 million, less than 1%. Gradients and states exist for those only.

The order of the products is everything. `(B A) x` makes a 4,096 by 4,096 matrix first, as large as W. `B (A x)`
never does: A x has r numbers a token. The same holds backwards. With g = dL/dy and h = x A^T (rows are tokens):

    dB = s g^T h        dh = s g B        dA = dh^T x        dx = g W + dh A

W has no gradient, but x has one, through W too: the layers below have adapters of their own.

After training, W' = W + s B A can be *merged* for serving: nothing is slower than before. Or leave it beside the
weights, and serve a hundred adapters over one model.
"""

from ....costs.work import Cost
from ...record import Case, Live, Rung, Slip, Speed
from ..inputs import normal

SOLUTION = '''import torch


def forward(x, w, a, b, s):
    """x [T, I], w [O, I], a [r, I], b [O, r] -> x w^T + s x a^T b^T [T, O]."""
    return torch.addmm(x @ w.T, x @ a.T, b.T, alpha=s)


def backward(g, x, w, a, b, s):
    """(dx, da, db) for the upstream gradient g [T, O]; w is frozen."""
    h = x @ a.T
    dh = (g @ b).mul_(s)
    db = (g.T @ h).mul_(s)
    return torch.addmm(g @ w, dh, a), dh.T @ x, db


def merged(w, a, b, s):
    """The plain matrix [O, I] that computes the same."""
    return torch.addmm(w, b, a, alpha=s)
'''


def _live(mine, shipped):
    """Compute the product of a frozen matrix in float32 with its adapter, and its gradients by the student's code."""
    import torch

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w, a, b, s):
            ctx.save_for_backward(x, w, a, b)
            ctx.s = s
            return mine.forward(x, w, a, b, s)

        @staticmethod
        def backward(ctx, g):
            dx, da, db = mine.backward(g, *ctx.saved_tensors, ctx.s)
            return dx, None, da, db, None

    return lambda native, x, weight, a, b, scale: Product.apply(x, weight, a, b, scale)


def _forward(x, w, a, b, s):
    return x @ w.T + s * (x @ a.T) @ b.T


def _backward(g, x, w, a, b, s):
    dh = s * (g @ b)
    return g @ w + dh @ a, dh.T @ x, s * (g.T @ (x @ a.T))


def _make(rng, tokens, inputs, outputs, rank):
    return [normal(rng, tokens, inputs), normal(rng, outputs, inputs), normal(rng, rank, inputs),
            normal(rng, outputs, rank), 0.5]  # fmt: skip


def _gradient(rng, tokens, inputs, outputs, rank):
    return [normal(rng, tokens, outputs), *_make(rng, tokens, inputs, outputs, rank)]


def _cost(g, x, w, a, b, s):
    adapter = a.numel() + b.numel()
    flops = 2 * x.shape[0] * (w.numel() + 3 * adapter)
    return Cost(flops, g.nbytes + x.nbytes + w.nbytes + 4 * adapter, x.nbytes + 4 * adapter)


RUNG = Rung(
    name="lora",
    title="LoRA: a small correction beside a frozen matrix",
    road="training",
    place=2,
    kind="torch",
    minutes=40,
    after=("adamw",),
    solution=SOLUTION,
    holes=("forward", "backward", "merged"),
    answers={"forward": _forward, "backward": _backward, "merged": lambda w, a, b, s: w + s * b @ a},
    cases=(
        Case("forward, 1 token", lambda rng: _make(rng, 1, 8, 6, 2), "y = x W^T + s (x A^T) B^T: rows are tokens."),
        Case("forward, 5 tokens", lambda rng: _make(rng, 5, 16, 12, 4),
             "Every token by itself; shapes are [T, I] and [T, O]."),
        Case("merged", lambda rng: _make(rng, 1, 16, 12, 4)[1:], "W' = W + s B A, in this order.", entry="merged"),
        Case("backward, 1 token", lambda rng: _gradient(rng, 1, 8, 6, 2),
             "dB = s g^T h and dA = dh^T x with dh = s g B.", entry=
             "backward"),
        Case("backward, 7 tokens", lambda rng: _gradient(rng, 7, 16, 12, 4),
             "dx has two parts: through W, and through the adapter.", entry="backward"),
    ),
    slips=(
        Slip(lambda x, w, a, b, s: x @ w.T + (x @ a.T) @ b.T, "The scale s = alpha / r is missing."),
        Slip(lambda x, w, a, b, s: s * (x @ w.T + (x @ a.T) @ b.T), "The scale belongs to the adapter, not to W."),
        Slip(lambda g, x, w, a, b, s: (g @ w, *_backward(g, x, w, a, b, s)[1:]),
             "dx lacks the part through the adapter: dh A.",
             "backward"),
        Slip(lambda g, x, w, a, b, s: (s * (g @ b) @ a, *_backward(g, x, w, a, b, s)[1:]),
             "dx lacks the part through W: frozen, but not opaque.",
             "backward"),
    ),
    speed=Speed(lambda rng: _gradient(rng, 16, 256, 256, 8),
                "A matrix as large as W is made: multiply with A first and B second, so that only r numbers a "
                "token lie between.",
                _cost, entry="backward", ratio=1.25),
    hints=("h = x @ a.T has r columns; everything of the adapter goes through it.",
           "dh = s * g @ b; then da = dh.T @ x and dx = g @ w + dh @ a.",
           "db = s * g.T @ h"),
    differences=
        "models/weights/adapted.py does it beside a weight of any kind (packed in 4 bits: QLoRA), with dropout "
        "and DoRA.",
    live=Live("train", {"transect.models.weights.adapted_product:adapted_product": _live}, (), {"task": "lora"}),
    shipped="models/weights/adapted.py",
)  # fmt: skip
