r"""Softmax turns any numbers into probabilities: y[i] = exp(x[i]) / sum of exp(x[j]). Taken literally it overflows,
because exp(89) is infinite in float32. Subtract the largest number m of the row first; top and bottom get the same
factor exp(-m), so nothing else changes, and every exp is at most 1.

So there seem to be three passes over the row: one for m, one for the sum, one for the result. For a row that fits
into the registers of a program they are one: load it, and compute everything from the tile. A row of 128,000
logits does not fit, and three passes are three times the bytes.

*Online softmax* does the first two in one. Walk over the row in blocks, keep the largest number so far, m, and the
sum so far, l, taken with that m. When a block brings a larger number m', the old sum was taken with the wrong m.
Mend it with one factor:

    l <- l * exp(m - m') + sum of exp(x - m')

That is exact, not an approximation. Hold on to this line: FlashAttention is nothing but this line with a matrix
product beside it. At the start m is -infinity and l is 0; take care that -infinity minus -infinity does not make
NaN.
"""

from ....costs.work import Cost
from ...record import Case, Live, Rung, Slip, Speed, ToCompile
from ..inputs import normal

SOLUTION = '''import torch
import triton
import triton.language as tl


@triton.jit
def _softmax_kernel(x_ptr, y_ptr, n_cols, BLOCK: tl.constexpr):
    """One row a program: a pass in blocks for maximum and sum together, and a pass for the result."""
    row = tl.program_id(0).to(tl.int64) * n_cols
    m = -float("inf")
    l = 0.0
    for start in range(0, n_cols, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + column, mask=column < n_cols, other=-float("inf"))
        higher = tl.maximum(m, tl.max(x, 0))
        l = l * tl.exp(m - higher) + tl.sum(tl.exp(x - higher), 0)
        m = higher
    for start in range(0, n_cols, BLOCK):
        column = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row + column, mask=column < n_cols, other=-float("inf"))
        tl.store(y_ptr + row + column, tl.exp(x - m) / l, mask=column < n_cols)


def softmax(x):
    """x [rows, columns], float32 and contiguous -> softmax over each row."""
    y = torch.empty_like(x)
    if x.numel():
        _softmax_kernel[(x.shape[0],)](x, y, x.shape[1], BLOCK=256)
    return y
'''


def _live(mine, shipped):
    from ...live import Launches

    def launch(grid, x, y, rows, width, *strides, **options):
        if str(x.dtype) != "torch.float32" or strides != (width, width):
            return shipped[grid](x, y, rows, width, *strides, **options)
        return mine._softmax_kernel[(rows,)](x, y, width, BLOCK=256)

    return Launches(launch)


RUNG = Rung(
    name="softmax",
    title="Softmax online: maximum and sum in one pass",
    road="kernels",
    place=7,
    kind="triton",
    minutes=50,
    after=("total",),
    solution=SOLUTION,
    holes=("_softmax_kernel", "softmax"),
    answers={"softmax": lambda x: x.softmax(-1)},
    cases=(
        Case("4 rows of 64", lambda rng: [normal(rng, 4, 64)],
             "exp(x) over the sum of exp(x), for each row by itself."),
        Case("rows of 77", lambda rng: [normal(rng, 3, 77)],
             "What the mask leaves out must count as exp = 0: load -infinity there, not 0."),
        Case("rows of 1,000", lambda rng: [normal(rng, 3, 1000)],
             "A row longer than a block: the old sum must be mended when the maximum grows."),
        Case("large numbers", lambda rng: [100 * normal(rng, 2, 300) + 50],
             "exp overflows above 88: subtract the largest number of the row first."),
        Case("the maximum comes last", lambda rng: [normal(rng, 1, 600).sort(-1).values * 30],
             "Each block may bring a new maximum: l <- l * exp(m - m') + ..., with the old m in the factor."),
        Case("one column", lambda rng: [normal(rng, 5, 1)], "A row of one number gives 1."),
    ),
    slips=(
        Slip(lambda x: x.exp() / x.exp().sum(), "The sum runs over the whole matrix: each row has its own."),
        Slip(lambda x: x.log_softmax(-1), "This is the logarithm of the answer."),
    ),
    speed=Speed(lambda rng: [normal(rng, 4, 2000)],
                "The row is read more than twice: find maximum and sum in one pass, with the online rule.",
                lambda x: Cost(5 * x.numel(), x.nbytes, x.nbytes), ratio=1.25, peer=
                    "def softmax(x):\n    return x.softmax(-1)\n",
                large=lambda rng: [normal(rng, 4096, 8192)]),
    compiled=(ToCompile("_softmax_kernel", {"x_ptr": "*fp32", "y_ptr": "*fp32", "n_cols": "i32"}, {"BLOCK": 1024}, (
        "n_cols",)),),
    hints=("m and l are one number each; tl.max(x, 0) and tl.sum(..., 0) reduce a tile to a number.",
           "higher = tl.maximum(m, tl.max(x, 0)); then l = l * tl.exp(m - higher) + tl.sum(tl.exp(x - higher), 0).",
           "The second loop loads the row again and stores tl.exp(x - m) / l."),
    differences=
        "The shipped kernel keeps a row of up to 32,768 elements in registers and reads it once. Longer rows are "
    "split between programs that tell each other their m and l.",
    live=Live("ops", {"transect.ops.first.softmax:rows_kernel": _live}, ("softmax",)),
    shipped="ops/first/softmax_kernels.py",
)  # fmt: skip
