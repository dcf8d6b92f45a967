r"""Adding up a vector looks easier than adding two, and it is harder. One program cannot read fast enough alone: a
GPU needs thousands of loads in flight. Many programs can, but all of them want to add to one number, and then they
wait for each other (*atomics*), in another order each time. Floating-point sums depend on the order, so two runs
differ.

The way that ships has two levels. A fixed number of programs P walk over the input in strides: program p takes the
blocks p, p + P, p + 2P, ... and keeps a whole tile of running sums in registers, one for each lane. At its end it
adds its tile up and writes *one* number to `part[p]`. Then a second kernel, a single program, adds the P numbers.
No program waits, and the order is the same in every run. How many programs? A GPU has over a hundred
multiprocessors and keeps several programs on each, so 1,024 fill it; here, in the interpreter, 4 are enough.

Why walk in strides of P blocks and not take one long piece each? Because then the programs read neighbouring blocks
at the same time, and the memory likes that.

Halves are summed in float32: with bfloat16's 8 bits, a sum of 256 does not change any more when 1 is added to it.
The same happens to float32 at 16 million, which is why lanes and levels also make the sum *more* exact than a loop.
"""

from ....costs.work import Cost
from ...record import Case, Live, Rung, Slip, Speed, ToCompile
from ...texts import excerpt
from ..inputs import normal

SOLUTION = f'''import torch
import triton
import triton.language as tl


{excerpt("ops/first/sum.py", "_partial_kernel", "_combine_kernel")}

def total(x):
    """x of any shape, contiguous -> the sum of its elements, a scalar tensor in x's dtype."""
    if not x.numel():
        return torch.zeros((), device=x.device, dtype=x.dtype)
    programs = min(1024, max(4, x.numel() // 16384))  # enough for a GPU, each with 16 blocks to walk over
    part = torch.empty(programs, device=x.device, dtype=torch.float32)
    out = torch.empty((), device=x.device, dtype=x.dtype)
    _partial_kernel[(programs,)](x, part, x.numel(), BLOCK=1024)
    _combine_kernel[(1,)](part, out, programs, BLOCK=triton.next_power_of_2(programs))
    return out
'''


def _add(rng, *shape):
    return [normal(rng, *shape) + 0.5]


RUNG = Rung(
    name="total",
    title="Sum of a vector: two levels, one order",
    road="kernels",
    place=2,
    kind="triton",
    tolerance=1e-6,
    scales={"total": lambda x: x.norm() * x.numel() ** 0.5},
    after=("vector_add",),
    solution=SOLUTION,
    holes=("_partial_kernel", "_combine_kernel", "total"),
    answers={"total": lambda x: x.sum()},
    cases=(
        Case("1,024 elements", lambda rng: _add(rng, 1024),
             "One block: load it, tl.sum(tile, 0) in float32, and store one number at part_ptr + program_id."),
        Case("9,000 elements", lambda rng: _add(rng, 9000),
             "Programs must walk: for start in range(program * BLOCK, n, programs * BLOCK), masked at the end with 0."),
        Case("20,480 elements", lambda rng: _add(rng, 20480),
             "Each program takes several blocks: add tiles in the loop, and sum over lanes once at the end."),
        Case("7 by 33", lambda rng: _add(rng, 7, 33), "Count with numel(): the tensor may have several dimensions."),
        Case("one element", lambda rng: _add(rng, 1),
             "Programs without a block must still write their part: 0, or the second level adds what was there "
             "before."),
        Case("no element", lambda rng: [normal(rng, 0)], "The sum of nothing is 0."),
        Case("bfloat16", lambda rng: [(normal(rng, 8000) + 1).bfloat16()],
             "Load with .to(tl.float32): 8 bits lose small numbers beside a large sum.", tolerance=0.008),
    ),
    slips=(Slip(lambda x: x.flatten()[:1024].sum(),
        "Only the first block is summed: walk with a loop, or start a program for each."),),
    speed=Speed(lambda rng: _add(rng, 20_000),
                "Each element is read once, and the parts are P numbers: nothing else needs memory.",
                lambda x: Cost(x.numel(), x.nbytes, x.element_size()), ratio=1.5,
                peer="def total(x):\n    return x.sum()\n",
                large=lambda rng: _add(rng, 1 << 26)),
    compiled=(ToCompile("_partial_kernel", {"x_ptr": "*fp32", "part_ptr": "*fp32", "n": "i32"}, {"BLOCK": 4096}, (
        "n",)),),
    hints=("total = tl.zeros([BLOCK], tl.float32) holds one running sum for each lane.",
           "for start in range(tl.program_id(0) * BLOCK, n, tl.num_programs(0) * BLOCK): add a masked tile.",
           "tl.load(..., mask=index < n, other=0.0): what the mask leaves out must be 0."),
    differences=
        "The shipped launcher starts eight programs for each multiprocessor and picks the block by measurement.",
    live=Live("ops", {"transect.ops.first.sum:_partial_kernel": None,
                      "transect.ops.first.sum:_combine_kernel": None}, ("sum",)),
    shipped="ops/first/sum.py",
)  # fmt: skip
