r"""A line can separate points above it from points below it. XOR cannot be done that way: of (0,0), (0,1), (1,0),
(1,1) it wants the two in the middle, and no line has them alone on one side. Minsky and Papert showed that in
1969, and the field stopped for ten years.

The way out is a second layer with a bend between the two:

    h = relu(W1 x + b1)        relu(z) = max(z, 0)
    y = W2 h + b2

Without the bend the two layers would be one: `W2 (W1 x)` is again a matrix times x. With it, each entry of h is a
bent line, and y adds bent lines up. Two of them are enough for XOR. Think of s = x1 + x2, which is 0, 1 or 2. You
want 0, 1, 0. What does `relu(s)` give at these three? What does `relu(s - 1)` give? Which sum of the two is 0, 1,
0?

Write the forward pass for any sizes with plain lists (`W1[i][j]` is the weight from input j to hidden unit i), and
then the weights for XOR, found with pencil and paper. Every transformer has this layer in it, thousands wide, and
most of its FLOPs are there.
"""

from ...record import Case, Rung, Slip, Speed
from ..inputs import floats

SOLUTION = '''def forward(x, w1, b1, w2, b2):
    """x: list of inputs. w1[i][j]: input j to hidden unit i; b1[i] is added there. w2[j]: hidden unit j to the output;
    b2, a number, is added there. Returns a number."""
    hidden = []
    for row, bias in zip(w1, b1):
        z = bias
        for weight, value in zip(row, x):
            z += weight * value
        hidden.append(max(z, 0.0))
    y = b2
    for weight, value in zip(w2, hidden):
        y += weight * value
    return y


def xor_weights():
    """(w1, b1, w2, b2) of a network with two hidden units whose output is x1 XOR x2."""
    return [[1.0, 1.0], [1.0, 1.0]], [0.0, -1.0], [1.0, -2.0], 0.0
'''


def _forward(x, w1, b1, w2, b2):
    hidden = [max(b + sum(w * v for w, v in zip(row, x, strict=True)), 0.0) for row, b in zip(w1, b1, strict=True)]
    return b2 + sum(w * h for w, h in zip(w2, hidden, strict=True))


def _linear(x, w1, b1, w2, b2):
    hidden = [b + sum(w * v for w, v in zip(row, x, strict=True)) for row, b in zip(w1, b1, strict=True)]
    return b2 + sum(w * h for w, h in zip(w2, hidden, strict=True))


def _judge(arguments, got):
    try:
        w1, b1, w2, b2 = got
        if len(w1) != 2 or len(b1) != 2 or len(w2) != 2:
            return "use exactly two hidden units"
        for x1 in (0.0, 1.0):
            for x2 in (0.0, 1.0):
                y, want = _forward([x1, x2], w1, b1, w2, b2), float(x1 != x2)
                if abs(y - want) > 1e-6:
                    return f"for ({x1:.0f}, {x2:.0f}) the network says {y:.3g}; XOR is {want:.0f}"
    except (TypeError, ValueError):
        return "return (w1, b1, w2, b2): two lists of two numbers, two numbers, two numbers, one number"
    return ""


def network(rng, inputs, hidden):
    """Generate random arguments of ``forward``."""
    return [floats(rng, inputs), [floats(rng, inputs) for _ in range(hidden)], floats(rng, hidden), floats(rng, hidden),
            float(rng.standard_normal())]  # fmt: skip


RUNG = Rung(
    name="xor",
    title="XOR with two bent lines, weights by hand",
    road="arithmetic",
    place=2,
    kind="python",
    minutes=25,
    after=("line",),
    solution=SOLUTION,
    holes=("forward", "xor_weights"),
    answers={"forward": _forward, "xor_weights": lambda: None},
    judges={"xor_weights": _judge},
    tolerance=1e-9,
    cases=(
        Case("one input, one hidden unit", lambda rng: [[1.0], [[2.0]], [0.5], [3.0], 1.0],
             "y = W2 relu(W1 x + b1) + b2: check each of the four parts with these small numbers."),
        Case("3 inputs, 5 hidden units", lambda rng: network(rng, 3, 5),
             "Each hidden unit has its own row of w1, its own bias, and its own bend."),
        Case("8 inputs, 16 hidden units", lambda rng: network(rng, 8, 16), "The bend is max(z, 0), after the bias."),
        Case("weights for XOR", lambda rng: [],
             "With s = x1 + x2: relu(s) is 0, 1, 2 and relu(s - 1) is 0, 0, 1. Add them so that 0, 1, 0 comes out.",
             entry="xor_weights"),
    ),
    slips=(Slip(_linear, "The bend is missing: without relu two layers are one, and a line cannot do XOR."),),
    speed=Speed(lambda rng: network(rng, 20, 40),
                "Compute each hidden unit once, and not once for each use.", ratio=1.5),
    hints=("Write z = bias + the sum of weight times input for each row, then max(z, 0.0).",
           "The output has no bend.",
           "One hidden unit counts how many inputs are 1; the other is there to subtract when both are."),
    differences=
        "The package's layer is models/mlp.py: gate and up products with SwiGLU in place of relu, for all tokens "
    "of a step at once, over weights of any number format.",
    shipped="models/mlp.py",
)  # fmt: skip
