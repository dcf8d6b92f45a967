r"""Read less. A program that computes a *tile* of C, 32 rows by 32 columns, needs 32 rows of A and 32 columns of B. In
each step along k it loads a tile of A (32 by 16) and a tile of B (16 by 32), and multiplies them: 2 * 32 * 32 * 16
FLOPs for 1,024 numbers. Each number that was loaded is used 32 times instead of once. That is the whole idea of
tiling: the traffic of a product is divided by the side of the tile.

How large should tiles be? The FLOPs for each byte must reach what the device needs: an H100 does 989 TFLOP/s in
bfloat16 with tensor cores and reads 3.35 TB/s, so it wants 295 FLOPs for each byte that comes from memory. A tile
of T by T does T / 2 FLOPs for each byte of bfloat16 inputs: so T must be hundreds, or the caches must help.
Registers and shared memory limit T: a 128 by 128 tile of float32 sums is 64 KB, all of the registers of 128
threads.

`tl.dot(a, b, acc)` multiplies tiles. On a GPU it becomes tensor-core instructions. Both sides must be at least 16
in each dimension. Mask rows, columns and steps that are outside with 0: a zero adds nothing to a sum.

For float32 inputs tl.dot rounds to tf32 (10 bits) on a GPU unless you say `input_precision="ieee"`. The grader
wants float32.
"""

from ...record import Rung, Speed, ToCompile
from .matmul_naive import ARGUMENTS, CASES, PEER, SLIPS, pair, product_cost

SOLUTION = '''import torch
import triton
import triton.language as tl


@triton.jit
def _matmul_kernel(a_ptr, b_ptr, c_ptr, M, N, K, TILE: tl.constexpr, STEP: tl.constexpr):
    """Program (i, j): the tile of c from row i * TILE and column j * TILE on; a [M, K], b [K, N], contiguous."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)[:, None]
    column = tl.program_id(1) * TILE + tl.arange(0, TILE)[None, :]
    total = tl.zeros([TILE, TILE], tl.float32)
    for start in range(0, K, STEP):
        across = start + tl.arange(0, STEP)[None, :]
        down = start + tl.arange(0, STEP)[:, None]
        a = tl.load(a_ptr + row * K + across, mask=(row < M) & (across < K), other=0.0)
        b = tl.load(b_ptr + down * N + column, mask=(down < K) & (column < N), other=0.0)
        total = tl.dot(a, b, total, input_precision="ieee")
    tl.store(c_ptr + row * N + column, total, mask=(row < M) & (column < N))


def matmul(a, b):
    """a [M, K], b [K, N], float32 and contiguous -> [M, N]."""
    (M, K), N = a.shape, b.shape[1]
    c = torch.empty(M, N, device=a.device, dtype=a.dtype)
    if c.numel():
        _matmul_kernel[(-(-M // 32), -(-N // 32))](a, b, c, M, N, K, TILE=32, STEP=16)
    return c
'''

RUNG = Rung(
    name="matmul_tiled",
    title="Matrix product in tiles: each number used 32 times",
    road="kernels",
    place=5,
    kind="triton",
    minutes=60,
    after=("matmul_naive",),
    solution=SOLUTION,
    holes=("_matmul_kernel", "matmul"),
    answers={"matmul": lambda a, b: a @ b},
    cases=CASES,
    slips=SLIPS,
    speed=Speed(lambda rng: pair(rng, 64, 64, 64),
                "The kernel reads its inputs more often than once for each tile: use tiles of 32 by 32 at least, "
                "and load "
                "each tile of A and B once for each step.", product_cost, ratio=1.7, peer=PEER,
                large=lambda rng: pair(rng, 2048, 2048, 2048)),
    compiled=(ToCompile("_matmul_kernel", ARGUMENTS, {"TILE": 32, "STEP": 16}, ("M", "N", "K")),),
    hints=("Make row [TILE, 1] and column [1, TILE] with [:, None] and [None, :]; their sum is a tile of addresses.",
           "Step through k: a [TILE, STEP] from a_ptr + row * K + k, b [STEP, TILE] from b_ptr + k * N + column.",
           "total = tl.dot(a, b, total, input_precision=\"ieee\")"),
    differences="The shipped product (ops/linear/many_rows/) has tiles of 128 by 256, loads the next tiles while it "
    "multiplies, walks over tiles in an order that keeps them in the L2 cache, and has measured choices for each "
    "shape.",
    shipped="ops/linear/many_rows/triton.py",
)  # fmt: skip
