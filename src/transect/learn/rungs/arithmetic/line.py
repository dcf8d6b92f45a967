r"""All of deep learning is this: guess numbers, measure how wrong they are, and move them a little in the direction
that makes the error smaller. With a line there are two numbers, `a` and `b`, and you can see everything.

The error of one point is `e = a x + b - y`. The *loss* is the mean of `e²` over all points. How does the loss change
when `a` grows a little? Each `e²` changes by `2 e` times the change of `e`, and `e` changes by `x`. So

    dL/da = mean of 2 e x          dL/db = mean of 2 e

These two numbers are the *gradient*. It points uphill, so a step of *gradient descent* goes the other way:

    a <- a - rate * dL/da          b <- b - rate * dL/db

Both new values come from the old ones: compute the whole gradient first, then move. If `rate` is too large the
steps jump over the valley and the loss explodes; if it is too small you wait for ever. Every optimizer later on
this ladder is a cleverer choice of this step, and every kernel is a faster way to the same sums.

Count the work: for n points a step takes about 6 n multiplications and additions, and reads 2 n numbers. One pass
over the data is enough for both sums, and the grader counts the lines of Python that you run.
"""

from ...record import Case, Rung, Slip, Speed
from ..inputs import floats

SOLUTION = '''def gradient(a, b, xs, ys):
    """Slope of the mean squared error of y = a x + b: (dL/da, dL/db), for lists of numbers xs and ys."""
    da = db = 0.0
    for x, y in zip(xs, ys):
        error = a * x + b - y
        da += 2 * error * x
        db += 2 * error
    return da / len(xs), db / len(xs)


def fit(xs, ys, steps, rate):
    """Gradient descent from a = b = 0: returns (a, b) after so many steps."""
    a = b = 0.0
    for _ in range(steps):
        da, db = gradient(a, b, xs, ys)
        a, b = a - rate * da, b - rate * db
    return a, b
'''


def _gradient(a, b, xs, ys):
    errors = [a * x + b - y for x, y in zip(xs, ys, strict=True)]
    return (sum(2 * e * x for e, x in zip(errors, xs, strict=True)) / len(xs), sum(2 * e for e in errors) / len(xs))


def _fit(xs, ys, steps, rate):
    a = b = 0.0
    for _ in range(steps):
        da, db = _gradient(a, b, xs, ys)
        a, b = a - rate * da, b - rate * db
    return a, b


def _one_by_one(xs, ys, steps, rate):
    a = b = 0.0
    for _ in range(steps):
        a -= rate * _gradient(a, b, xs, ys)[0]
        b -= rate * _gradient(a, b, xs, ys)[1]
    return a, b


def _points(rng, count):
    return [floats(rng, count), floats(rng, count)]


RUNG = Rung(
    name="line",
    title="Fit a line by walking downhill",
    road="arithmetic",
    place=1,
    kind="python",
    minutes=20,
    solution=SOLUTION,
    holes=("gradient", "fit"),
    answers={"gradient": _gradient, "fit": _fit},
    tolerance=1e-9,
    cases=(
        Case("gradient, one point", lambda rng: [*floats(rng, 2), *_points(rng, 1)],
             "For one point: e = a x + b - y, dL/da = 2 e x and dL/db = 2 e. Check each sign with small numbers."),
        Case("gradient, 7 points", lambda rng: [*floats(rng, 2), *_points(rng, 7)],
             "The loss is a mean: divide the sums by the number of points, or the step grows with the data."),
        Case("one step", lambda rng: [*_points(rng, 5), 1, 0.1],
             "Step against the gradient, and begin at a = b = 0.", entry="fit"),
        Case("40 steps", lambda rng: [*_points(rng, 9), 40, 0.05],
             "Use the old a and b for both gradients: compute both, then move both.", entry="fit"),
        Case("no step", lambda rng: [*_points(rng, 3), 0, 0.1], "No step leaves a = b = 0.", entry="fit"),
    ),
    slips=(
        Slip(lambda a, b, xs, ys: tuple(-g for g in _gradient(a, b, xs, ys)),
             "The sign is turned: the error is prediction minus target, and the gradient points uphill."),
        Slip(lambda a, b, xs, ys: tuple(g / 2 for g in _gradient(a, b, xs, ys)),
             "The factor 2 of the square's derivative is missing: d(e^2) = 2 e de."),
        Slip(_one_by_one, "Use the old a and b for both gradients: compute both, then move both.", "fit"),
    ),
    speed=Speed(lambda rng: [*_points(rng, 200), 20, 0.05],
                "One pass over the points is enough for both sums: e is the same in both.", entry="fit", ratio=1.5),
    hints=("Write e = a * x + b - y once, and use it for both sums.",
           "Divide by len(xs) after the loop.",
           "a, b = a - rate * da, b - rate * db moves both at the same time."),
    differences=
        "This is torch.optim.SGD without momentum. On a GPU the loop over the points is a kernel (`dot` and `sum` "
    "of this ladder), and the gradient comes from `loss.backward()`, which you build three rungs from here.",
)  # fmt: skip
