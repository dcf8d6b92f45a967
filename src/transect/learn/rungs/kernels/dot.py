r"""The dot product is the interview question of this field, because everything is in it: s = sum of x[i] y[i].

It is `vector_add` and `total` in one: load two tiles, multiply them, keep running sums. Do not write the products to
memory and sum them in a second pass: that would be 3 passes more over the data. *Fusing* steps so that values stay in
registers is most of what makes kernels fast, and it works because such code is bound by bytes: 2 FLOPs for 8 bytes.

Two words for the interview. *Coalescing*: the 32 threads of a warp read together; if they read 32 neighbouring
floats, the memory hands out 4 full sectors of 32 bytes. If they read every eighth float, it hands out 32 sectors
and you use an eighth of each. *Divergence*: the threads of a warp share one program counter. If some take a branch
and others do not, the warp walks through both sides, with part of its threads asleep. Masks in place of branches
keep warps together, and so a kernel computes on masked lanes too and throws the result away.

The gradient is a kernel of its own: dL/dx = g y and dL/dy = g x, with the upstream slope g a single number in device
memory. Read both tiles once and write both gradients. If you call two kernels, you read everything twice.
"""

from ....costs.work import Cost
from ...record import Case, Rung, Slip, Speed, ToCompile
from ...texts import excerpt
from ..inputs import normal, strided

SOLUTION = f'''import torch
import triton
import triton.language as tl


{excerpt("ops/first/dot.py", "_partial_kernel")}

{excerpt("ops/first/sum.py", "_combine_kernel")}

def dot(x, y):
    """x, y of one shape and dtype, with any strides -> their dot product, a scalar tensor."""
    x, y = x.contiguous(), y.contiguous()
    if not x.numel():
        return torch.zeros((), device=x.device, dtype=x.dtype)
    programs = min(1024, max(4, x.numel() // 16384))
    part = torch.empty(programs, device=x.device, dtype=torch.float32)
    out = torch.empty((), device=x.device, dtype=x.dtype)
    _partial_kernel[(programs,)](x, y, part, x.numel(), BLOCK=1024)
    _combine_kernel[(1,)](part, out, programs, BLOCK=triton.next_power_of_2(programs))
    return out


{excerpt("ops/first/dot.py", "_backward_kernel")}

def backward(g, x, y):
    """(dL/dx, dL/dy) for the upstream slope g, a scalar tensor."""
    x, y = x.contiguous(), y.contiguous()
    dx, dy = torch.empty_like(x), torch.empty_like(y)
    if x.numel():
        _backward_kernel[(-(-x.numel() // 1024),)](g, x, y, dx, dy, x.numel(), BLOCK=1024)
    return dx, dy
'''


def _pair(rng, *shape):
    return [normal(rng, *shape) + 0.2, normal(rng, *shape) + 0.2]


RUNG = Rung(
    name="dot",
    title="Dot product: fused, coalesced, with its gradient",
    road="kernels",
    place=3,
    kind="triton",
    tolerance=1e-6,
    scales={"dot": lambda x, y: x.norm() * y.norm()},
    after=("total",),
    solution=SOLUTION,
    holes=("_partial_kernel", "dot", "_backward_kernel", "backward"),
    answers={"dot": lambda x, y: (x * y).sum(), "backward": lambda g, x, y: (g * y, g * x)},
    cases=(
        Case("1,024 equal elements", lambda rng: [each.new_full((1024,), float(each[0])) for each in _pair(rng, 1024)],
             "Multiply two tiles, and keep a running sum for each lane, in float32."),
        Case("1,024 elements", lambda rng: _pair(rng, 1024),
             "Each lane has its own product: load both tiles at one index."),
        Case("5,000 elements", lambda rng: _pair(rng, 5000),
             "Mask both loads with other=0.0: lanes past the end must add nothing."),
        Case("columns apart", lambda rng: [strided(rng, 60, 9), strided(rng, 60, 9)],
             "The elements are not neighbours in memory: make the tensors contiguous, or use their strides."),
        Case("no element", lambda rng: _pair(rng, 0), "The product of nothing with nothing is 0."),
        Case("gradient, 1,024 elements", lambda rng: [normal(rng), *_pair(rng, 1024)],
             "dL/dx = g y and dL/dy = g x.", entry="backward"),
        Case("gradient, 3,001 elements", lambda rng: [normal(rng), *_pair(rng, 3001)],
             "The last tile's loads and stores need the mask in the gradient too.", entry="backward"),
    ),
    slips=(
        Slip(lambda g, x, y: (g * x, g * y), "The two are exchanged: the gradient of x is g times the other one, y.",
             "backward"),
        Slip(lambda g, x, y: (y, x), "The upstream slope g is missing: load it once, and multiply.", "backward"),
    ),
    speed=Speed(lambda rng: [normal(rng), *_pair(rng, 10_000)],
                "One kernel makes both gradients: read the tiles of x and y once, and write both results.",
                lambda g, x, y: Cost(2 * x.numel(), x.nbytes + y.nbytes, x.nbytes + y.nbytes),
                entry="backward", ratio=1.3,
                peer="def backward(g, x, y):\n    return g * y, g * x\n",
                large=lambda rng: [normal(rng), *_pair(rng, 1 << 25)]),
    compiled=(
        ToCompile("_partial_kernel", {"x_ptr": "*fp32", "y_ptr": "*fp32", "part_ptr": "*fp32", "n": "i32"},
                 {"BLOCK": 4096}, ("n",)),
    ),
    hints=("Begin with the kernel of the rung `total`, and load two tiles.",
           "total += x * y inside the loop; tl.sum(total, 0) at the end.",
           "g = tl.load(g_ptr) is one number for all lanes."),
    differences="The shipped gradient is registered with torch.library, so loss.backward() finds it.",
    shipped="ops/first/dot.py",
)  # fmt: skip
