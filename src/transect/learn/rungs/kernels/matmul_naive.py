r"""A matrix product is M N dot products of length K: C[i, j] = sum over k of A[i, k] B[k, j]. That is 2 M N K FLOPs,
and only M K + K N + M N numbers. For square matrices the FLOPs grow with the cube and the bytes with the square:
at 4,096 there are over 600 FLOPs for each byte of float32. So a product *can* be bound by arithmetic, the only
operator so far.

Can be. Write it first as it stands in the book: program (i, j) computes row i times one tile of columns. It walks
over k, loads one number of A and a tile of a row of B, and adds their product to a running tile. Every program
reads all of the columns of B that it needs, and so does the program of the next row. B is read M times. The caches
save part of it, but the traffic is that of a kernel bound by bytes, on an operator that need not be.

Measure it, keep the number, and beat it on the next rung.
"""

from ....costs.work import Cost
from ...record import Case, Rung, Slip, Speed, ToCompile
from ..inputs import normal

SOLUTION = '''import torch
import triton
import triton.language as tl


@triton.jit
def _matmul_kernel(a_ptr, b_ptr, c_ptr, N, K, BLOCK: tl.constexpr):
    """Program (i, j): row i of a [M, K] times BLOCK columns of b [K, N] from j * BLOCK on; all are contiguous."""
    i = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < N
    total = tl.zeros([BLOCK], tl.float32)
    for k in range(0, K):
        a = tl.load(a_ptr + i * K + k)
        total += a * tl.load(b_ptr + k * N + column, mask=inside, other=0.0)
    tl.store(c_ptr + i * N + column, total, mask=inside)


def matmul(a, b):
    """a [M, K], b [K, N], float32 and contiguous -> [M, N]."""
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty(M, N, device=a.device, dtype=a.dtype)
    if c.numel():
        _matmul_kernel[(M, -(-N // 32))](a, b, c, N, K, BLOCK=32)
    return c
'''


def pair(rng, m, k, n):
    """Generate two matrices to multiply, ``[m, k]`` and ``[k, n]``."""
    return [normal(rng, m, k), normal(rng, k, n)]


def product_cost(a, b):
    """Count each matrix as read once, and the result as written once."""
    return Cost(2 * a.shape[0] * a.shape[1] * b.shape[1], a.nbytes + b.nbytes, 4 * a.shape[0] * b.shape[1])


CASES = (
    Case("16 by 16", lambda rng: pair(rng, 16, 16, 16), "C[i, j] is the dot product of row i of A and column j of B."),
    Case("8 by 32 by 64", lambda rng: pair(rng, 8, 32, 64),
         "Rows of A are K apart, rows of B and C are N apart: the three sizes differ here."),
    Case("33 by 5 by 45", lambda rng: pair(rng, 33, 5, 45),
         "No size is a multiple of the tile: mask rows, columns and steps, with 0 for what is outside."),
    Case("one row", lambda rng: pair(rng, 1, 20, 50), "A single row (a decode step!) needs the mask of rows."),
    Case("inner size 1", lambda rng: pair(rng, 10, 1, 20), "K = 1 is an outer product: one step of the loop."),
    Case("no row", lambda rng: pair(rng, 0, 8, 8), "An empty result has an empty grid: return before the launch."),
)  # fmt: skip
SLIPS = (
    Slip(lambda a, b: a @ b.T if b.shape[0] == b.shape[1] else a @ b * 2,
         "This is A times B transposed: step through B with k * N + column."),
)  # fmt: skip
ARGUMENTS = {"a_ptr": "*fp32", "b_ptr": "*fp32", "c_ptr": "*fp32", "M": "i32", "N": "i32", "K": "i32"}
PEER = "def matmul(a, b):\n    return a @ b\n"

RUNG = Rung(
    name="matmul_naive",
    title="Matrix product, as it stands in the book",
    road="kernels",
    place=4,
    kind="triton",
    minutes=40,
    after=("dot",),
    solution=SOLUTION,
    holes=("_matmul_kernel", "matmul"),
    answers={"matmul": lambda a, b: a @ b},
    cases=CASES,
    slips=SLIPS,
    speed=Speed(lambda rng: pair(rng, 16, 16, 64),
                "Load each tile of B once for each row: the number of A is the same for all lanes, and "
                "neighbouring lanes "
                "take neighbouring columns.", product_cost, peer=PEER,
                large=lambda rng: pair(rng, 1024, 1024, 1024)),
    compiled=(ToCompile("_matmul_kernel", {k: v for k, v in ARGUMENTS.items() if k != "M"}, {"BLOCK": 32},
                        ("N", "K")),),
    hints=("tl.load(a_ptr + i * K + k) loads one number; it multiplies a whole tile.",
           "column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), masked by column < N.",
           "The grid has two axes: (M, ceil(N / BLOCK))."),
    differences="The shipped ladder has this rung in CUDA C++ (ops/first/matmul.cu) and measures it: docs/understand/"
    "matmul-ladder.md.",
    shipped="ops/first/matmul_ladder.py",
)  # fmt: skip
