r"""The same lesson on the processor that you are sitting at, where the time is real. One core has *vector* units: one
instruction multiplies and adds 8 or 16 floats. A loop uses them only if the compiler can see neighbouring elements
side by side. The product from the book,

    for i, for j, for k:  c[i][j] += a[i][k] * b[k][j]

walks down a column of b in its inner loop, N floats apart. No vector load can fetch that, each step touches
another cache line, and the sum is one long chain in which every addition waits for the one before. Exchange two
loops:

    for i, for k, for j:  c[i][j] += a[i][k] * b[k][j]

Now the inner loop adds a number times a row of b to a row of c. Neighbours lie side by side, and no addition waits
for another: the compiler vectorizes it. Not one FLOP is different, and it runs many times faster.

The next step is tiling again, for registers: keep a tile of 4 rows by 32 columns of c in local variables over the
whole k loop, so that c is not read and written in each step. Then blocks that fit into the L1 and L2 caches. That
is how a BLAS library comes to 90% of the FLOPs that a core has. How far do you get? The floor is measured on this
machine, with all its threads; you have one.
"""

from ...record import Case, Rung, Slip, Speed
from .matmul_naive import PEER, pair, product_cost

SOLUTION = """// c [m, n] = a [m, k] times b [k, n], all row-major and without gaps
extern "C" void matmul(const float* a, const float* b, float* c, long m, long k, long n) {
    // --- hole ---
    constexpr long TILE = 32;
    for (long i0 = 0; i0 < m; i0 += 4) {
        long rows = m - i0 < 4 ? m - i0 : 4;
        for (long j0 = 0; j0 < n; j0 += TILE) {
            long columns = n - j0 < TILE ? n - j0 : TILE;
            float total[4][TILE] = {};
            if (rows == 4 && columns == TILE) {
                for (long p = 0; p < k; ++p)
                    for (long i = 0; i < 4; ++i)
                        for (long j = 0; j < TILE; ++j)
                            total[i][j] += a[(i0 + i) * k + p] * b[p * n + j0 + j];
            } else {
                for (long p = 0; p < k; ++p)
                    for (long i = 0; i < rows; ++i)
                        for (long j = 0; j < columns; ++j)
                            total[i][j] += a[(i0 + i) * k + p] * b[p * n + j0 + j];
            }
            for (long i = 0; i < rows; ++i)
                for (long j = 0; j < columns; ++j) c[(i0 + i) * n + j0 + j] = total[i][j];
        }
    }
    // --- end ---
}
"""


def _matmul(library, a, b):
    import ctypes

    import torch

    c = torch.full((a.shape[0], b.shape[1]), float("nan"))
    places = [ctypes.c_void_p(each.data_ptr()) for each in (a, b, c)]
    library.matmul(*places, *(ctypes.c_long(size) for size in (*a.shape, b.shape[1])))
    return c


RUNG = Rung(
    name="matmul_vectorized",
    title="Matrix product in C++: loops that the compiler can vectorize",
    road="kernels",
    place=6,
    kind="cpp",
    minutes=60,
    after=("matmul_naive", "python_to_cpp"),
    solution=SOLUTION,
    answers={"matmul": lambda a, b: a @ b},
    drives={"matmul": _matmul},
    tolerance=1e-6,
    cases=(
        Case("8 by 8", lambda rng: pair(rng, 8, 8, 8), "c[i n + j] is the sum over p of a[i k + p] b[p n + j]."),
        Case("8 by 32 by 64", lambda rng: pair(rng, 8, 32, 64),
             "The three sizes differ: rows of a are k apart, rows of b and c n."),
        Case("33 by 17 by 45", lambda rng: pair(rng, 33, 17, 45),
             "No size is a multiple of a tile: the edges need a smaller one."),
        Case("one row", lambda rng: pair(rng, 1, 40, 50), "A single row is an edge too."),
        Case("twice", lambda rng: pair(rng, 12, 12, 12), "c holds old numbers: begin every sum at 0."),
    ),
    slips=(Slip(lambda a, b: a @ b.T if b.shape[0] == b.shape[1] else b, "This is a times b transposed."),),
    speed=Speed(lambda rng: pair(rng, 256, 256, 256),
                "The inner loop must run along rows: exchange the loops over j and k, then keep a tile of c in "
                "registers.",
                product_cost, ratio=4.0, peer=PEER),
    hints=("Begin with i, k, j: set the row of c to 0, then add a[i][p] times row p of b to it.",
           "float total[4][32] as local variables stays in registers if all its loops have constant ends.",
           "Handle full tiles with constant ends, and the edges in a second copy of the loops."),
    differences=
        "ops/cpu/linear.h decodes packed weights in registers on the way, and cuts rows over a team of threads.",
    shipped="ops/cpu/build.py",
)  # fmt: skip
