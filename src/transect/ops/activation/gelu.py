r"""GELU: an element times the probability that a standard normal variable lies below it.

    y = x * P(x)        P(x) = (1 + erf(x / sqrt 2)) / 2
    tanh form:          P(x) = (1 + tanh(u)) / 2,   u = sqrt(2 / pi) * (x + 0.044715 x^3)

Backward:

    dy/dx = P(x) + x * exp(-x^2 / 2) / sqrt(2 pi)
    tanh form:  dy/dx = P(x) + x / 2 * (1 - tanh(u)^2) * sqrt(2 / pi) * (1 + 3 * 0.044715 x^2)

Shapes: x and the result ``[..., F]``. float32 inside for half inputs, rounded once at the end.
Source: Hendrycks & Gimpel 2016, arXiv:1606.08415. GPT-2 uses the tanh form.

Bound by bytes: about 10 FLOPs an element against one read and one write, so 10 / (2 * 2) = 2.5 FLOPs per byte in
bfloat16.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...costs.work import Cost
from .. import shapes
from ..lang import cuda
from ..lang.jit import in_triton, kernel, require, runs_triton, tl
from ..numerics import compute_dtype, sample
from ..peers import compiled
from ..registry import Case, Kernel, Knobs, Op, in_torch, register
from ..tuning import Config, choose, flat_rule


def reference(x: Tensor, tanh: bool) -> Tensor:
    """Compute GELU of x ``[..., F]`` -> ``[..., F]`` in x's dtype; ``tanh`` selects the tanh form."""
    wide = x.to(compute_dtype(x.dtype))
    if tanh:
        p = 0.5 * (1 + torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3)))
    else:
        p = 0.5 * (1 + torch.erf(wide / math.sqrt(2)))
    return (wide * p).to(x.dtype)


@kernel
def _half_erfc(z):
    """Compute erfc(z) / 2 for z >= 0 (Abramowitz & Stegun 7.1.26, error below 1.5e-7): one division, one exp."""
    t = 1.0 / (1.0 + 0.3275911 * z)
    p = t * (0.127414796 + t * (-0.142248368 + t * (0.7107068705 + t * (-0.7265760135 + t * 0.5307027145))))
    return p * tl.exp2(-1.4426950408889634 * z * z)


@kernel
def _probability(x, TANH: tl.constexpr, EXACT: tl.constexpr):
    """Compute P(x). Half types use the cheap erfc, whose error is far below their rounding; float32 uses the exact
    erf."""
    if TANH:
        return 1.0 / (1.0 + tl.exp2(-2.302208198 * (x + 0.044715 * x * x * x)))
    elif EXACT:
        return 0.5 * (1.0 + tl.erf(x * 0.7071067811865476))
    else:
        tail = _half_erfc(tl.abs(x) * 0.7071067811865476)
        return tl.where(x < 0, tail, 1.0 - tail)


@kernel
def _forward_kernel(x_ptr, y_ptr, n, TANH: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + index, mask=index < n, other=0.0).to(tl.float32)
    y = x * _probability(x, TANH, EXACT)
    tl.store(y_ptr + index, y.to(y_ptr.dtype.element_ty), mask=index < n)


@kernel
def _backward_kernel(g_ptr, x_ptr, dx_ptr, n, TANH: tl.constexpr, EXACT: tl.constexpr, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(g_ptr + index, mask=index < n, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + index, mask=index < n, other=0.0).to(tl.float32)
    p = _probability(x, TANH, EXACT)
    if TANH:  # (1 - tanh(u)^2) / 2 = 2 p (1 - p)
        rest = _probability(-x, TANH, EXACT) if EXACT else 1.0 - p
        slope = 2.0 * p * rest * x * (0.7978845608028654 + 0.1070322243 * x * x)
    else:
        slope = x * 0.3989422804014327 * tl.exp2(-0.7213475204444817 * x * x)
    tl.store(dx_ptr + index, (g * (p + slope)).to(dx_ptr.dtype.element_ty), mask=index < n)


def triton_gelu(x: Tensor, tanh: bool, *, config: Config | None = None) -> Tensor:
    """Compute ``reference`` in Triton; an input that is not contiguous is copied."""
    require("gelu", x)
    x = x.contiguous()
    y = torch.empty_like(x)
    n = x.numel()
    if n:
        knobs = config or choose("gelu", n, x.device, flat_rule)
        grid = (-(-n // knobs["block"]),)
        exact = x.dtype == torch.float32
        _forward_kernel[grid](x, y, n, TANH=tanh, EXACT=exact, BLOCK=knobs["block"], num_warps=knobs["warps"])
    return y


def triton_backward(grad: Tensor, x: Tensor, tanh: bool, *, config: Config | None = None) -> Tensor:
    """Compute dL/dx in Triton."""
    require("gelu backward", grad, x)
    grad, x = grad.contiguous(), x.contiguous()
    dx = torch.empty_like(x)
    n = x.numel()
    if n:
        knobs = config or choose("gelu.backward", n, x.device, flat_rule)
        grid = (-(-n // knobs["block"]),)
        exact = x.dtype == torch.float32
        _backward_kernel[grid](grad, x, dx, n, TANH=tanh, EXACT=exact, BLOCK=knobs["block"], num_warps=knobs["warps"])
    return dx


def reference_backward(grad: Tensor, x: Tensor, tanh: bool) -> Tensor:
    """Compute dL/dx by the formula above."""
    wide, g = x.to(compute_dtype(x.dtype)), grad.to(compute_dtype(x.dtype))
    if tanh:
        t = torch.tanh(math.sqrt(2 / math.pi) * (wide + 0.044715 * wide**3))
        slope = 0.5 * (1 + t) + 0.5 * wide * (1 - t * t) * math.sqrt(2 / math.pi) * (1 + 3 * 0.044715 * wide**2)
    else:
        bell = torch.exp(-0.5 * wide * wide) / math.sqrt(2 * math.pi)
        slope = 0.5 * (1 + torch.erf(wide / math.sqrt(2))) + wide * bell
    return (g * slope).to(x.dtype)


@torch.library.custom_op("transect::gelu", mutates_args=())
def gelu(x: Tensor, tanh: bool) -> Tensor:
    """Run the operator for autograd and ``torch.compile``: the Triton kernel where it can run, else the
    reference."""
    return triton_gelu(x, tanh) if runs_triton(x) else reference(x, tanh).contiguous()


@torch.library.custom_op("transect::gelu_backward", mutates_args=())
def gelu_backward(grad: Tensor, x: Tensor, tanh: bool) -> Tensor:
    """Compute the operator's gradient, dL/dx."""
    made = triton_backward(grad, x, tanh) if runs_triton(grad, x) else reference_backward(grad, x, tanh)
    return made.contiguous()


@gelu.register_fake
def _(x: Tensor, tanh: bool) -> Tensor:
    return torch.empty(x.shape, device=x.device, dtype=x.dtype)


@gelu_backward.register_fake
def _(grad: Tensor, x: Tensor, tanh: bool) -> Tensor:
    return torch.empty(x.shape, device=x.device, dtype=x.dtype)


def _setup(ctx: Any, inputs: tuple[Tensor, bool], output: Tensor) -> None:
    ctx.save_for_backward(inputs[0])
    ctx.tanh = inputs[1]


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    (x,) = ctx.saved_tensors
    return gelu_backward(grad, x, ctx.tanh), None


gelu.register_autograd(_backward, setup_context=_setup)


@torch.library.custom_op("transect::gelu_cuda", mutates_args=())
def cuda_gelu(x: Tensor, tanh: bool) -> Tensor:
    """Compute ``reference`` by ``gelu.cu``: bfloat16 on an NVIDIA GPU; an input that is not contiguous is copied."""
    x = cuda.aligned(x)
    y = torch.empty_like(x)
    cuda.launcher("gelu", "transect_gelu")(x, y, x.numel(), int(tanh))
    return y


@torch.library.custom_op("transect::gelu_cuda_backward", mutates_args=())
def cuda_backward(grad: Tensor, x: Tensor, tanh: bool) -> Tensor:
    """Compute dL/dx by ``gelu.cu``."""
    grad, x = cuda.aligned(grad), cuda.aligned(x)
    dx = torch.empty_like(x)
    cuda.launcher("gelu", "transect_gelu_gradient")(grad, x, dx, x.numel(), int(tanh))
    return dx


cuda_gelu.register_fake(lambda x, tanh: torch.empty(x.shape, device=x.device, dtype=x.dtype))
cuda_backward.register_fake(lambda grad, x, tanh: torch.empty(x.shape, device=x.device, dtype=x.dtype))


def _backward_by_cuda(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
    return cuda_backward(grad, ctx.saved_tensors[0], ctx.tanh), None


cuda_gelu.register_autograd(_backward_by_cuda, setup_context=_setup)


def cost(x: Tensor, tanh: bool) -> Cost:
    """Count 10 FLOPs an element, tanh and erf counted as one each."""
    return Cost(10 * x.numel(), x.nbytes, x.nbytes)


def _examples() -> Sequence[dict[str, Any]]:
    shapes = ((1, 3072), (7, 33), (3, 5, 1))
    return [{"x": 3 * sample(*shape), "tanh": tanh} for shape in shapes for tanh in (False, True)]


def _peer(x: Tensor, tanh: bool) -> Tensor:
    return F.gelu(x, approximate="tanh" if tanh else "none")


CHOICES = {"block": (1024, 2048, 4096), "warps": (4, 8)}


def _cases() -> Sequence[Case]:
    form = {False: "erf", True: "tanh"}

    def case(name: str, width: int, tanh: bool, rows: int, first: bool) -> Case:
        def make(device: torch.device, seed: int) -> Mapping[str, Any]:
            generator = torch.Generator(device).manual_seed(seed)
            x = torch.randn(rows, width, device=device, dtype=torch.bfloat16, generator=generator)
            return {"x": x, "tanh": tanh}

        directions = ("forward",) if rows <= max(shapes.DECODE_ROWS) else ()
        only = () if first else ("triton", "cuda", "torch")
        return Case(f"{form[tanh]}, MLP of {name}, {rows} tokens", make, directions=directions, only=only)

    made = []
    for name, model in shapes.by_size(lambda model: model.ffn_dim):
        many = shapes.rows_for_bytes(2 * model.ffn_dim)
        for tanh in form:
            made.append(case(name, model.ffn_dim, tanh, many, model is shapes.LLAMA_8B))
            made += [case(name, model.ffn_dim, tanh, rows, False) for rows in shapes.PREFILL_ROWS]
    made += [case(shapes.LLAMA_8B.name, shapes.LLAMA_8B.ffn_dim, True, rows, False) for rows in shapes.DECODE_ROWS]
    return made


def _kernels() -> Sequence[Kernel]:
    made = []
    for tanh in (False, True):
        constants = {"TANH": tanh, "EXACT": False, "BLOCK": 2048}
        name = "tanh" if tanh else "erf"
        forward = {"x_ptr": "*bf16", "y_ptr": "*bf16", "n": "i32"}
        backward = {"g_ptr": "*bf16", "x_ptr": "*bf16", "dx_ptr": "*bf16", "n": "i32"}
        made.append(Kernel(f"{name} forward", _forward_kernel, forward, constants, ("n",)))
        made.append(Kernel(f"{name} backward", _backward_kernel, backward, constants, ("n",)))
    return made


register(
    Op(
        name="gelu",
        reference=reference,
        cost=cost,
        implementations={
            "torch": in_torch(reference, batch_invariant=True),
            "triton": in_triton(triton_gelu, batch_invariant=True, autograd=gelu),
            "cuda": cuda.in_cuda("gelu", cuda_gelu, batch_invariant=True, autograd=cuda_gelu, dtypes=("bfloat16",)),
        },
        examples=_examples,
        peers={"torch": _peer, "torch.compile": compiled(_peer)},
        differentiable=("x",),
        gradient_cost=lambda x, tanh: Cost(20 * x.numel(), 2 * x.nbytes, x.nbytes),
        cases=_cases,
        kernels=_kernels,
        knobs=lambda: [Knobs("gelu", CHOICES, flat_rule, triton_gelu, dict, lambda inputs: inputs["x"].numel())],
    )
)
