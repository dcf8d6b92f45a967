r"""Deep networks drift: numbers grow or shrink from layer to layer. A *norm* brings each token's vector back to size
one before it goes into a layer. RMSNorm divides by the root of the mean square, and scales each element by a
learned weight:

    r = 1 / sqrt(mean(x^2) + eps)        y = x r w

A row (one token, 4,096 numbers) fits into the registers of one program: load it once, sum its squares, scale,
store. The mean is over the real columns, not over the padded tile. Sums are in float32, also for halves.

The backward pass is where people go wrong, because r depends on every x of the row. With x' = x r and h = g w:

    dL/dx = r (h - x' mean(h x'))          dL/dw = sum over rows of g x'

Read the first one: the gradient loses its part along x'. Of course, as making x longer does not change y. dL/dw is
a sum over rows, and the rows belong to different programs. Adding to one place with atomics would give another
order, and so other bits, in each run. Let each of P programs take the rows p, p + P, ..., keep its share of dw in
registers, and write it as one row of a `[P, D]` matrix; sum that matrix at the end (here torch may do it).
"""

import torch

from ....costs.work import Cost
from ...record import Case, Live, Rung, Slip, Speed, ToCompile
from ..inputs import normal

SOLUTION = '''import torch
import triton
import triton.language as tl


@triton.jit
def _forward_kernel(x_ptr, w_ptr, y_ptr, n_cols, eps, BLOCK: tl.constexpr):
    """One row a program; BLOCK is at least n_cols."""
    row = tl.program_id(0).to(tl.int64) * n_cols
    column = tl.arange(0, BLOCK)
    inside = column < n_cols
    x = tl.load(x_ptr + row + column, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(w_ptr + column, mask=inside, other=0.0).to(tl.float32)
    r = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / n_cols + eps)
    tl.store(y_ptr + row + column, (x * r * w).to(y_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(g_ptr, x_ptr, w_ptr, dx_ptr, dw_ptr, n_rows, n_cols, eps, BLOCK: tl.constexpr):
    """Program p takes rows p, p + P, ...; it writes their dx, and its share of dw into row p of dw_ptr [P, n_cols]."""
    column = tl.arange(0, BLOCK)
    inside = column < n_cols
    w = tl.load(w_ptr + column, mask=inside, other=0.0).to(tl.float32)
    dw = tl.zeros([BLOCK], tl.float32)
    for row in range(tl.program_id(0), n_rows, tl.num_programs(0)):
        x = tl.load(x_ptr + row * n_cols + column, mask=inside, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + row * n_cols + column, mask=inside, other=0.0).to(tl.float32)
        r = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / n_cols + eps)
        x = x * r
        dw += g * x
        h = g * w
        dx = r * (h - x * (tl.sum(h * x, 0) / n_cols))
        tl.store(dx_ptr + row * n_cols + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)
    tl.store(dw_ptr + tl.program_id(0) * n_cols + column, dw, mask=inside)


def forward(x, w, eps):
    """x [rows, D], w [D], contiguous -> x / rms(x) * w."""
    y = torch.empty_like(x)
    if x.numel():
        _forward_kernel[(x.shape[0],)](x, w, y, x.shape[1], eps, BLOCK=triton.next_power_of_2(x.shape[1]))
    return y


def backward(g, x, w, eps):
    """(dL/dx, dL/dw) for the upstream gradient g like x."""
    rows, width = x.shape
    dx = torch.empty_like(x)
    programs = min(512, max(4, rows // 16))
    dw = torch.zeros(programs, width, device=x.device, dtype=torch.float32)
    if x.numel():
        block = triton.next_power_of_2(width)
        _backward_kernel[(programs,)](g, x, w, dx, dw, rows, width, eps, BLOCK=block)
    return dx, dw.sum(0).to(w.dtype)
'''


def _forward(x, w, eps):
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * w


def _backward(g, x, w, eps):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    return torch.autograd.grad(_forward(x, w, eps), (x, w), g)


def _layer_norm(x, w, eps):
    return (x - x.mean(-1, keepdim=True)) * torch.rsqrt(x.var(-1, keepdim=True, correction=0) + eps) * w


def _without_mean(g, x, w, eps):
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)
    return g * w * r, (g * x * r).sum(0)


def _live(mine, shipped):
    from ...live import Launches

    def launch(grid, x, residual, w, y, total, rows, width, x_stride, r_stride, y_stride, eps, ADD, BLOCK, **options):
        if ADD or x_stride != width or y_stride != width:
            rest = rows, width, x_stride, r_stride, y_stride, eps
            return shipped[grid](x, residual, w, y, total, *rest, ADD=ADD, BLOCK=BLOCK, **options)
        return mine._forward_kernel[(rows,)](x, w, y, width, eps, BLOCK=BLOCK)

    return Launches(launch)


def _make(rng, rows, width, scale=1.0):
    return [scale * normal(rng, rows, width), normal(rng, width) + 1, 1e-5]


def _gradient(rng, rows, width):
    return [normal(rng, rows, width), *_make(rng, rows, width)]


RUNG = Rung(
    name="rms_norm",
    title="RMSNorm and its gradient, a row in registers",
    road="kernels",
    place=9,
    kind="triton",
    minutes=60,
    after=("gelu", "total"),
    solution=SOLUTION,
    holes=("_forward_kernel", "_backward_kernel", "forward"),
    answers={"forward": _forward, "backward": _backward},
    cases=(
        Case("forward, 4 rows of 64", lambda rng: _make(rng, 4, 64),
             "y = x w / sqrt(mean(x^2) + eps), for each row by itself."),
        Case("forward, rows of 77", lambda rng: _make(rng, 5, 77),
             "The mean is over the 77 real columns, not over the 128 of the tile; masked ones count as 0."),
        Case("forward, tiny numbers", lambda rng: _make(rng, 3, 50, 1e-4),
             "eps belongs inside the root, added to the mean: it decides where x is tiny."),
        Case("backward, one row", lambda rng: _gradient(rng, 1, 64),
             "r depends on every x of the row: subtract x' mean(h x') from h.", entry="backward"),
        Case("backward, 13 rows of 77", lambda rng: _gradient(rng, 13, 77),
             "dw is the sum over all rows: each program walks over rows p, p + P, ... and keeps its share.", entry=
                 "backward"),
    ),
    slips=(
        Slip(_layer_norm, "This is LayerNorm: RMSNorm does not subtract the mean."),
        Slip(lambda x, w, eps: _forward(x, torch.ones_like(w), eps), "The weight is missing: y = x r w."),
        Slip(lambda x, w, eps: x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps) * w,
             "This divides by the root of the sum of squares: take the mean."),
        Slip(_without_mean, "The gradient treats r as a constant, but r depends on x: subtract x' mean(h x').",
             "backward"),
    ),
    speed=Speed(lambda rng: _gradient(rng, 24, 512),
                "Read g and x of each row once; both sums and both results come from the same two tiles.",
                lambda g, x, w, eps: Cost(10 * x.numel(), g.nbytes + x.nbytes + w.nbytes, x.nbytes + w.nbytes),
                entry="backward", ratio=1.4,
                large=lambda rng: _gradient(rng, 8192, 4096)),
    permits=("sum",),
    forbids=("rms_norm", "layer_norm", "native_layer_norm"),
    compiled=(ToCompile("_forward_kernel", {"x_ptr": "*fp32", "w_ptr": "*fp32", "y_ptr": "*fp32", "n_cols": "i32",
                                           "eps": "fp32"},
                       {"BLOCK": 4096}, ("n_cols",)),),
    hints=("Divide the sum of squares by n_cols; the masked lanes are 0 and add nothing.",
           "In the gradient scale x by r once (x' = x r), and use x' in both formulas.",
           "for row in range(tl.program_id(0), n_rows, tl.num_programs(0)): dw stays a tile until the end."),
    differences=
        "The shipped kernel can add the residual stream on the way (add_rms_norm), which saves a read and a write, "
    "takes several short rows in a program, and lets the next kernel begin early on Hopper.",
    live=Live("ops", {"transect.ops.norm.rms_norm:forward_kernel": _live}, ("rms_norm",)),
    shipped="ops/norm/rms_norm.py",
)  # fmt: skip
