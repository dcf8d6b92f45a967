r"""Python takes some 50 nanoseconds for one addition, and a core could do a hundred of them in that time. So the inner
loops of every library are written in C++, and Python only says what to do. The bridge is thin: Python knows the
address of a tensor's memory (`x.data_ptr()`) and the number of elements, and calls a compiled function with both.

    extern "C" void silu_forward(const float* x, float* y, long n)

`extern "C"` keeps the name as it is (C++ would decorate it), so that Python finds it in the library. There is no
tensor on the other side, no shape and no bounds check: a wrong index writes into somebody else's memory.
torch.utils.cpp_extension does the same with a tensor class around the pointers; a compile takes a minute instead
of a second, so here we take the plain way, as `ops/cpu/` of this package does.

Write SiLU, the bend of most language models, and its gradient *by hand*:

    s(x) = 1 / (1 + exp(-x))     y = x s(x)     dy/dx = s(x) (1 + x (1 - s(x)))

The backward function gets the upstream gradient g and the x of the forward pass, and writes dx = g dy/dx. It
recomputes s(x) instead of reading it: an exp is cheaper than another pass through memory.

The time is real here, so the floor is too: two reads and a write for each element against the bandwidth of this
machine's memory, which one core alone cannot reach.
"""

from ....costs.work import Cost
from ...record import Case, Rung, Slip, Speed
from ..inputs import normal

SOLUTION = """#include <cmath>

// y[i] = x[i] * sigmoid(x[i]) for i < n
extern "C" void silu_forward(const float* x, float* y, long n) {
    // --- hole ---
    for (long i = 0; i < n; ++i) {
        y[i] = x[i] / (1.0f + std::exp(-x[i]));
    }
    // --- end ---
}

// dx[i] = g[i] * dy/dx at x[i]
extern "C" void silu_backward(const float* g, const float* x, float* dx, long n) {
    // --- hole ---
    for (long i = 0; i < n; ++i) {
        float s = 1.0f / (1.0f + std::exp(-x[i]));
        dx[i] = g[i] * s * (1.0f + x[i] * (1.0f - s));
    }
    // --- end ---
}
"""


def _forward(library, x):
    import ctypes

    import torch

    y = torch.full_like(x, float("nan"))
    library.silu_forward(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_long(x.numel()))
    return y


def _backward(library, g, x):
    import ctypes

    import torch

    dx = torch.full_like(x, float("nan"))
    places = [ctypes.c_void_p(each.data_ptr()) for each in (g, x, dx)]
    library.silu_backward(*places, ctypes.c_long(x.numel()))
    return dx


def _slope(x):
    s = x.sigmoid()
    return s * (1 + x * (1 - s))


RUNG = Rung(
    name="python_to_cpp",
    title="From Python to C++, with one gradient by hand",
    road="tensors",
    place=3,
    kind="cpp",
    minutes=40,
    after=("strides", "chain_rule"),
    solution=SOLUTION,
    answers={"forward": lambda x: x * x.sigmoid(), "backward": lambda g, x: g * _slope(x)},
    drives={"forward": _forward, "backward": _backward},
    tolerance=1e-6,
    cases=(
        Case("forward, 8 elements", lambda rng: [normal(rng, 8)],
             "y = x / (1 + exp(-x)) for every i from 0 to n - 1: mind the sign in exp, and the last element."),
        Case("forward, 1,001 elements", lambda rng: [normal(rng, 1001)],
             "Write every element: i runs from 0 to n - 1."),
        Case("forward, large numbers", lambda rng: [60 * normal(rng, 64)],
             "exp(x) overflows for large x, and infinity / infinity is NaN: divide by 1 + exp(-x) instead."),
        Case("backward, 8 elements", lambda rng: [normal(rng, 8), normal(rng, 8)],
             "dy/dx = s (1 + x (1 - s)), times the upstream gradient g.", entry="backward"),
        Case("backward, 1,001 elements", lambda rng: [normal(rng, 1001), 5 * normal(rng, 1001)],
             "Recompute s from x; y is not given.", entry="backward"),
    ),
    slips=(
        Slip(lambda x: x.sigmoid(), "This is the sigmoid alone: SiLU multiplies it with x."),
        Slip(lambda g, x: _slope(x), "The upstream gradient is missing: dx = g dy/dx.", "backward"),
        Slip(lambda g, x: g * x.sigmoid(), "x s(x) is a product: the derivative of s counts too.", "backward"),
    ),
    speed=Speed(lambda rng: [normal(rng, 1 << 19), normal(rng, 1 << 19)],
                "One pass, in order, with one exp of a float for each element: a second pass fetches everything again.",
                lambda g, x: Cost(8 * x.numel(), 2 * x.nbytes, x.nbytes), entry="backward", ratio=1.5,
                peer="import torch\n\n\ndef backward(g, x):\n    return torch.ops.aten.silu_backward(g, x)\n"),
    hints=("for (long i = 0; i < n; ++i) y[i] = ...;",
           "std::exp of a float is float; exp of a double is slower.",
           "float s = 1.0f / (1.0f + std::exp(-x[i])); then dx[i] = g[i] * s * (1.0f + x[i] * (1.0f - s));"),
    differences=
        "ops/cpu/ computes exp itself, sixteen floats in a vector register (a polynomial), and cuts the work over "
    "a team of threads. That is how it comes near the bandwidth of memory.",
    shipped="ops/cpu/build.py",
)  # fmt: skip
