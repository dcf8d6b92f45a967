r"""Time for the first network that does something: 1,797 handwritten digits of 8 x 8 pixels, from scikit-learn (no
download), a small cousin of MNIST. You get the training images and labels, and return a class for each test image.
The labels of those stay with the grader, and so does the order of the pixels: it is shuffled in every check.

Everything is a matrix now. With B images in a batch, X `[B, 64]`:

    Z = X W1 + b1        H = relu(Z)        Y = H W2 + b2       `[B, 10]`

Y are *logits*. Softmax makes probabilities of them, p = exp(y) / sum exp(y), and the loss is the *cross-entropy*:
minus the log of the probability of the right class. Its gradient is the nicest formula of the field: dL/dY = (p -
one_hot) / B. Subtract the largest logit of each row before exp, so that nothing overflows.

From there the chain rule of the last rungs, with transposes where the shapes ask for them:

    dW2 = H^T dY     db2 = sum of rows of dY     dH = dY W2^T     dZ = dH where Z > 0     dW1 = X^T dZ     db1 = ...

Scale the pixels (0 to 16) to about 0 to 1. Begin with small random weights: `randn / sqrt(inputs)` keeps the size
of the numbers from layer to layer, and zeros would make all hidden units the same for ever. 64 hidden units,
batches of 50 and a rate of 0.5 reach 95% in a second. `loss.backward()` is not allowed: you know how to do it
yourself.
"""

from functools import cache

import torch

from ...record import Case, Rung, Speed

SOLUTION = '''import torch


def gradients(x, labels, w1, b1, w2, b2):
    """Mean cross-entropy and its gradients: (loss, dw1, db1, dw2, db2). x [B, I], labels [B], w1 [I, H], w2 [H, C]."""
    z = x @ w1 + b1
    h = z.clamp(min=0)
    y = h @ w2 + b2
    y = y - y.amax(1, keepdim=True)
    total = y.exp().sum(1, keepdim=True)
    rows = torch.arange(len(x))
    loss = (total.log().squeeze(1) - y[rows, labels]).mean()
    dy = y.exp() / total
    dy[rows, labels] -= 1
    dy = dy / len(x)
    dz = (dy @ w2.T) * (z > 0)
    return loss, x.T @ dz, dz.sum(0), h.T @ dy, dy.sum(0)


def train_and_predict(x, labels, x_test, seed):
    """Train on x [N, 64] (pixels 0 to 16) and labels [N]; return the class of each row of x_test."""
    generator = torch.Generator().manual_seed(seed)
    x, x_test = x / 16, x_test / 16
    w1 = torch.randn(64, 64, generator=generator) / 8
    w2 = torch.randn(64, 10, generator=generator) / 8
    b1, b2 = torch.zeros(64), torch.zeros(10)
    for _ in range(6):
        for batch in torch.randperm(len(x), generator=generator).split(50):
            _, *found = gradients(x[batch], labels[batch], w1, b1, w2, b2)
            for weight, gradient in zip((w1, b1, w2, b2), found):
                weight -= 0.5 * gradient
    return ((x_test @ w1 + b1).clamp(min=0) @ w2 + b2).argmax(1)
'''

TRAINED = 1400
ENOUGH = 0.9


@cache
def _images():
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise ValueError("the digits come with scikit-learn: pip install scikit-learn (or '.[learn]')") from None
    images, labels = load_digits(return_X_y=True)
    return torch.from_numpy(images).float(), torch.from_numpy(labels).long()


def _make(rng):
    images, labels = _images()
    order = torch.from_numpy(rng.permutation(len(images)))
    pixels = torch.from_numpy(rng.permutation(64))
    x, y = images[order][:, pixels], labels[order]
    return [x[:TRAINED].contiguous(), y[:TRAINED], x[TRAINED:].contiguous(), int(rng.integers(1 << 30))]


def _judge(arguments, got):
    """Find the right classes again from the images: shuffled pixels have the same values."""
    x_test = arguments[2]
    if not isinstance(got, torch.Tensor) or got.shape != (len(x_test),):
        return f"return one class for each of the {len(x_test)} test images"
    share = float((got.long() == _labels_of(x_test)).double().mean())
    return "" if share >= ENOUGH else f"{share:.1%} of the test images are right; {ENOUGH:.0%} are needed"


def _labels_of(x):
    images, labels = _images()
    known = {tuple(sorted(row.tolist())): int(label) for row, label in zip(images, labels, strict=True)}
    return torch.tensor([known[tuple(sorted(row.tolist()))] for row in x])


def _gradients(x, labels, w1, b1, w2, b2):
    weights = [each.clone().requires_grad_() for each in (w1, b1, w2, b2)]
    y = (x @ weights[0] + weights[1]).relu() @ weights[2] + weights[3]
    loss = torch.nn.functional.cross_entropy(y, labels)
    return [loss.detach(), *torch.autograd.grad(loss, weights)]


def _batch(rng, rows, scale=1.0):
    from ..inputs import normal

    labels = torch.from_numpy(rng.integers(0, 4, rows))
    x, w1, b1 = normal(rng, rows, 6), normal(rng, 6, 5), normal(rng, 5)
    w2, b2 = scale * normal(rng, 5, 4), normal(rng, 4)
    if rows == 1:  # the least likely class: of a sure one the loss and p - 1 are rounding errors
        labels = ((x @ w1 + b1).relu() @ w2 + b2).argmin(1)
    return [x, labels, w1, b1, w2, b2]


RUNG = Rung(
    name="digits",
    title="Handwritten digits, with gradients by hand",
    road="tensors",
    place=4,
    kind="torch",
    minutes=60,
    after=("autograd", "strides"),
    solution=SOLUTION,
    holes=("gradients", "train_and_predict"),
    answers={"gradients": _gradients, "train_and_predict": lambda *arguments: None},
    judges={"train_and_predict": _judge},
    forbids=("cross_entropy", "cross_entropy_loss", "log_softmax", "_log_softmax", "nll_loss", "nll_loss_forward",
             "requires_grad_", "backward"),
    tolerance=1e-5,
    cases=(
        Case("gradients, one image", lambda rng: _batch(rng, 1),
             "dL/dY is p with 1 taken from the right class; everything else follows by the chain rule."),
        Case("gradients, 7 images", lambda rng: _batch(rng, 7),
             "The loss is a mean over images: divide dY by their number, once."),
        Case("gradients, large logits", lambda rng: _batch(rng, 5, 100.0),
             "exp of a large logit overflows: subtract the largest of each row first, and take the loss as "
             "log(sum exp y) - y[label], because p may be 0 and its log infinite.", tolerance=1e-3),
        Case("400 test images", _make,
             "It does not learn enough: scale the pixels, begin with small random weights, and step against the "
             "gradient.",
             entry="train_and_predict"),
    ),
    speed=Speed(lambda rng: _batch(rng, 64),
                "The gradients of a whole batch are a few products: no loop over images, and nothing computed twice.",
                ratio=1.4),
    hints=("Write the forward pass and compare the loss first: the message says which entry differs.",
           "p = exp(y - max) / sum; dy = p; dy[rows, labels] -= 1; dy /= B.",
           "weight -= rate * gradient changes the tensor in place."),
    differences="ops/loss/linear_cross_entropy.py joins the last product and the loss: the logits of 128,000 tokens by "
    "128,000 words would need 33 GB, so they are made in tiles and never stored.",
    shipped="ops/loss/linear_cross_entropy.py",
)  # fmt: skip
