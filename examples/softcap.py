r"""An operator from scratch, in one file: the soft cap that Gemma 2 puts on its scores (arXiv:2408.00118).

    y = c * tanh(x / c)        dL/dx = dL/dy * (1 - tanh(x / c)^2)        x, y: any shape

Bound by bytes: 10 FLOPs an element, one read, one write. To check it: ``TRITON_INTERPRET=1 python examples/softcap.py``
"""

from __future__ import annotations

import torch
from torch import Tensor

from transect.costs.work import Cost
from transect.ops.lang.jit import in_triton, kernel, require, runs_triton, tl
from transect.ops.numerics import compute_dtype, sample
from transect.ops.registry import Op, register
from transect.ops.tools.accuracy import check


def reference(x: Tensor, cap: float) -> Tensor:
    return (cap * torch.tanh(x.to(compute_dtype(x.dtype)) / cap)).to(x.dtype)


@kernel
def _softcap_kernel(x_ptr, g_ptr, out_ptr, n, cap, BACKWARD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)  # the elements of this program
    x = tl.load(x_ptr + at, mask=at < n, other=0.0).to(tl.float32)
    z = tl.minimum(tl.abs(x / cap), 20.0)  # past 20 the tanh is 1, and exp must not overflow
    e = tl.exp(-2.0 * z)
    t = (1.0 - e) / (1.0 + e)
    out = tl.where(x < 0, -cap * t, cap * t)
    if BACKWARD:
        g = tl.load(g_ptr + at, mask=at < n, other=0.0).to(tl.float32)
        out = g * 4.0 * e / ((1.0 + e) * (1.0 + e))  # 1 - tanh^2, without the subtraction that cancels
    tl.store(out_ptr + at, out.to(out_ptr.dtype.element_ty), mask=at < n)


def triton_softcap(x: Tensor, cap: float, g: Tensor | None = None) -> Tensor:
    """``reference`` in Triton, or with g = dL/dy the gradient; copies strided inputs."""
    backward, x, g = g is not None, x.contiguous(), (x if g is None else g).contiguous()
    require("softcap", x, g)
    out = torch.empty_like(x)
    if x.numel():
        _softcap_kernel[(-(-x.numel() // 1024),)](x, g, out, x.numel(), cap, BACKWARD=backward, BLOCK=1024)
    return out


@torch.library.custom_op("transect_examples::softcap", mutates_args=())
def softcap(x: Tensor, cap: float) -> Tensor:
    """For autograd and ``torch.compile``: the kernel where it can run, else the reference."""
    return triton_softcap(x, cap) if runs_triton(x) else reference(x, cap).contiguous()


@torch.library.custom_op("transect_examples::softcap_backward", mutates_args=())
def softcap_backward(g: Tensor, x: Tensor, cap: float) -> Tensor:
    return triton_softcap(x, cap, g) if runs_triton(g, x) else (g * (1 - torch.tanh(x / cap) ** 2)).contiguous()


for operator in (softcap, softcap_backward):
    operator.register_fake(lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format))
softcap.register_autograd(
    lambda ctx, g: (softcap_backward(g, ctx.saved_tensors[0], ctx.cap), None),
    setup_context=lambda ctx, inputs, output: (ctx.save_for_backward(inputs[0]), setattr(ctx, "cap", inputs[1])),
)
TRITON = in_triton(triton_softcap, autograd=softcap)
OP = register(
    Op(
        name="softcap",
        reference=reference,
        cost=lambda x, cap: Cost(10 * x.numel(), x.nbytes, x.nbytes),
        implementations={"triton": TRITON},
        examples=lambda: [{"x": 40 * sample(*shape), "cap": 30.0} for shape in ((5000,), (3, 7, 5), (0,))],
        peers={"torch": lambda x, cap: cap * torch.tanh(x / cap)},
        differentiable=("x",),
    )
)
if __name__ == "__main__":
    for found in check(OP, TRITON, torch.float32):
        print(f"{found.quantity:24} {found.layout:10} {found.ratio:.2f}x torch's error")
        assert found.passed
