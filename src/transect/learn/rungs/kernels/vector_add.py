r"""A GPU does not loop over a vector. It starts many *programs* of one kernel, and each takes a piece.

Program p owns the elements `p * BLOCK` to `(p + 1) * BLOCK - 1`. It makes their indices with `tl.arange`, loads
two *tiles* (blocks of values that live in the registers of its threads), adds them, and stores one tile. The grid
says how many programs run: enough to cover n elements, so `ceil(n / BLOCK)`.

The last program is the one that beginners forget. When n is not a multiple of BLOCK, some of its indices lie past
the end of the vector. A *mask* (`index < n`) says which elements of a tile are real. A load without the mask reads
memory that belongs to somebody else, and a store without it writes there.

Nothing here is hard to compute: one addition for 12 bytes of float32 (two reads, one write). An H100 moves 3.35
TB/s and could do 67 trillion additions a second, so the additions take less than 1% of the time. Such a kernel is
*bound by bytes*, and the only way to be slow is to move more bytes than needed, or to move them in pieces that the
memory does not like: memory is read in sectors of 32 bytes, so neighbouring threads should read neighbouring
elements (*coalescing*).

`transect trace vector_add` shows which program touches which element. Without a GPU, Triton's interpreter runs the
programs one after another on the CPU. It is slow and exact, and the grader counts the bytes of the sectors that your
kernel touches.
"""

from ....costs.work import Cost
from ...record import Case, Live, Rung, Slip, Speed, ToCompile
from ...texts import excerpt
from ..inputs import normal

SOLUTION = f'''import torch
import triton
import triton.language as tl


{excerpt("ops/first/vector_add.py", "_add_kernel")}

def add(x, y):
    """x, y: tensors of one shape and dtype, contiguous -> their sum."""
    z = torch.empty_like(x)
    n = x.numel()
    if n:
        _add_kernel[(-(-n // 1024),)](x, y, z, n, BLOCK=1024)
    return z
'''

RUNG = Rung(
    name="vector_add",
    title="Vector add: a grid of programs, a tile each",
    road="kernels",
    place=1,
    kind="triton",
    after=("strides",),
    solution=SOLUTION,
    holes=("_add_kernel", "add"),
    answers={"add": lambda x, y: x + y},
    cases=(
        Case(
            "1,024 elements",
            lambda rng: [normal(rng, 1024), normal(rng, 1024)],
            "Load x and y at the same index, add them, and store the sum at that index.",
        ),
        Case(
            "4,096 elements",
            lambda rng: [normal(rng, 4096), normal(rng, 4096)],
            "Each program must have its own piece: begin at tl.program_id(0) * BLOCK, and start enough programs.",
        ),
        Case(
            "5,000 elements",
            lambda rng: [normal(rng, 5000), normal(rng, 5000)],
            "5,000 is no multiple of the block: round the number of programs up, and mask the last tile's load "
            "and store.",
        ),
        Case(
            "one element",
            lambda rng: [normal(rng, 1), normal(rng, 1)],
            "A vector shorter than a block needs the mask too.",
        ),
        Case(
            "three dimensions",
            lambda rng: [normal(rng, 3, 5, 7), normal(rng, 3, 5, 7)],
            "Count elements with numel(), not with the length of the first dimension.",
        ),
        Case(
            "no element",
            lambda rng: [normal(rng, 0), normal(rng, 0)],
            "An empty vector has an empty grid: return before the launch.",
        ),
    ),
    slips=(
        Slip(lambda x, y: x * y, "This is the product of x and y; the rung asks for the sum."),
        Slip(lambda x, y: x + x, "Both tiles come from x: load the second one from y_ptr."),
    ),
    speed=Speed(
        lambda rng: [normal(rng, 20_000), normal(rng, 20_000)],
        "The kernel touches more memory than 12 bytes an element: each element is read by exactly one program, and "
        "neighbouring lanes read neighbouring elements.",
        lambda x, y: Cost(x.numel(), x.nbytes + y.nbytes, x.nbytes),
        ratio=1.5,
        peer="def add(x, y):\n    return x + y\n",
        large=lambda rng: [normal(rng, 1 << 25), normal(rng, 1 << 25)],
    ),
    compiled=(
        ToCompile(
            "_add_kernel", {"x_ptr": "*fp32", "y_ptr": "*fp32", "z_ptr": "*fp32", "n": "i32"}, {"BLOCK": 1024}, ("n",)
        ),
    ),
    hints=(
        "index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK) are the elements of one program.",
        "tl.load(x_ptr + index, mask=index < n) reads a tile; tl.store takes the same mask.",
        "The grid is a tuple: _add_kernel[(-(-n // 1024),)](x, y, z, n, BLOCK=1024).",
    ),
    differences="The shipped launcher picks block and warps by size (measured choices), takes float32, bfloat16 and "
    "float16 and adds in float32, and is registered with torch.library, so that autograd and torch.compile know it.",
    live=Live("ops", {"transect.ops.first.vector_add:_add_kernel": None}, ("vector_add",)),
    shipped="ops/first/vector_add.py",
)
