r"""SwiGLU: the gate of a gated MLP.

    y = silu(gate) * up        silu(a) = a * s        s = 1 / (1 + exp(-a))

Backward, with g = dL/dy:

    dL/dup = g * silu(gate)        dL/dgate = g * up * s * (1 + gate * (1 - s))

Shapes: gate, up and the result ``[..., F]``. float32 inside for half inputs, rounded once at the end.
Source: Shazeer 2020, arXiv:2002.05202.

Bound by bytes: about 5 FLOPs an element against two reads and one write, so 5 / (3 * 2), under 1 FLOP per byte in
bfloat16. Worth fusing into whatever produces gate and up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...costs.work import Cost
from .. import shapes
from ..cpu import gradients
from ..lang.jit import in_triton, kernel, require, runs_triton, tl
from ..numerics import compute_dtype, sample
from ..peers import compiled
from ..registry import Case, Kernel, Knobs, Op, in_torch, register
from ..tuning import Config, choose, flat_rule


def reference(gate: Tensor, up: Tensor) -> Tensor:
    """Compute ``silu(gate) * up`` of gate, up ``[..., F]`` -> ``[..., F]`` in gate's dtype."""
    wide = gate.to(compute_dtype(gate.dtype))
    return (wide * wide.sigmoid() * up.to(wide.dtype)).to(gate.dtype)


def by_exp(gate: Tensor, up: Tensor) -> Tensor:
    """Compute ``reference`` through exp: torch's CPU sigmoid rounds differently at the end of a tensor than inside it.

    Below -80 the gate is 0 in float32 either way; the clamp keeps exp and its gradient finite.
    """
    wide = gate.to(compute_dtype(gate.dtype))
    return (wide / (1 + torch.exp(-wide.clamp(min=-80))) * up.to(wide.dtype)).to(gate.dtype)


MERGED_BLOCK, MERGED_WARPS = 2048, 8
"""Block size and warps of the kernels on gate and up side by side."""


@kernel
def _forward_kernel(gate_ptr, up_ptr, y_ptr, n, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    gate = tl.load(gate_ptr + index, mask=index < n, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + index, mask=index < n, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp2(-1.4426950408889634 * gate)) * up
    tl.store(y_ptr + index, y.to(y_ptr.dtype.element_ty), mask=index < n)


@kernel
def _backward_kernel(g_ptr, gate_ptr, up_ptr, dgate_ptr, dup_ptr, n, BLOCK: tl.constexpr):
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    g = tl.load(g_ptr + index, mask=index < n, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + index, mask=index < n, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + index, mask=index < n, other=0.0).to(tl.float32)
    s = 1.0 / (1.0 + tl.exp2(-1.4426950408889634 * gate))
    tl.store(dup_ptr + index, (g * gate * s).to(dup_ptr.dtype.element_ty), mask=index < n)
    dgate = g * up * s * (1.0 + gate * (1.0 - s))
    tl.store(dgate_ptr + index, dgate.to(dgate_ptr.dtype.element_ty), mask=index < n)


def triton_swiglu(gate: Tensor, up: Tensor, *, config: Config | None = None) -> Tensor:
    """Compute ``reference`` in Triton; inputs that are not contiguous are copied. ValueError if the shapes differ."""
    require("swiglu", gate, up)
    if gate.shape != up.shape:
        raise ValueError(f"swiglu: gate and up must have one shape; got {list(gate.shape)} and {list(up.shape)}")
    gate, up = gate.contiguous(), up.contiguous()
    y = torch.empty_like(gate)
    n = gate.numel()
    if n:
        knobs = config or choose("swiglu", n, gate.device, flat_rule)
        grid = (-(-n // knobs["block"]),)
        _forward_kernel[grid](gate, up, y, n, BLOCK=knobs["block"], num_warps=knobs["warps"])
    return y


def triton_backward(grad: Tensor, gate: Tensor, up: Tensor, *, config: Config | None = None) -> tuple[Tensor, Tensor]:
    """Compute (dL/dgate, dL/dup) in Triton."""
    require("swiglu backward", grad, gate, up)
    grad, gate, up = grad.contiguous(), gate.contiguous(), up.contiguous()
    dgate, dup = torch.empty_like(gate), torch.empty_like(up)
    n = gate.numel()
    if n:
        knobs = config or choose("swiglu.backward", n, gate.device, flat_rule)
        grid = (-(-n // knobs["block"]),)
        _backward_kernel[grid](grad, gate, up, dgate, dup, n, BLOCK=knobs["block"], num_warps=knobs["warps"])
    return dgate, dup


@kernel
def _merged_kernel(x_ptr, y_ptr, n_cols, x_row, y_row, blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute BLOCK columns of a row: the first ``n_cols`` columns hold gates, the next ``n_cols`` the factors that the
    gates are multiplied by."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    col = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    x = x_ptr + row * x_row + col
    gate = tl.load(x, mask=col < n_cols, other=0.0).to(tl.float32)
    up = tl.load(x + n_cols, mask=col < n_cols, other=0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp2(-1.4426950408889634 * gate)) * up
    tl.store(y_ptr + row * y_row + col, y.to(y_ptr.dtype.element_ty), mask=col < n_cols)


@kernel
def _merged_backward_kernel(g_ptr, x_ptr, n_cols, g_row, x_row, blocks, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Overwrite gate and up with their gradients, and the upstream gradient with the forward pass's result."""
    row = (tl.program_id(0) // blocks).to(tl.int64)
    col = (tl.program_id(0) % blocks) * BLOCK + tl.arange(0, BLOCK)
    inside = col < n_cols
    x = x_ptr + row * x_row + col
    at = g_ptr + row * g_row + col
    g = tl.load(at, mask=inside, other=0.0).to(tl.float32)
    gate = tl.load(x, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(x + n_cols, mask=inside, other=0.0).to(tl.float32)
    e = 1.0 + tl.exp2(-1.4426950408889634 * gate)
    s = 1.0 / e
    tl.store(at, (gate / e * up).to(g_ptr.dtype.element_ty), mask=inside)
    tl.store(x + n_cols, (g * gate * s).to(x_ptr.dtype.element_ty), mask=inside)
    tl.store(x, (g * up * s * (1.0 + gate * (1.0 - s))).to(x_ptr.dtype.element_ty), mask=inside)


def triton_merged(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Compute ``silu(gate) * up`` of x ``[T, 2 F]``, gate and up side by side, -> ``[T, F]``. ``out``: the tensor to
    write the result to; rows of either may have any stride.

    Raises:
        ValueError: shapes that do not fit, or neighbours of a row that are apart.
    """
    rows, width = x.shape[0], x.shape[1] // 2
    y = x.new_empty((rows, width)) if out is None else out
    _check_merged(x, y)
    if y.numel():
        blocks = -(-width // MERGED_BLOCK)
        _merged_kernel[(rows * blocks,)](
            x, y, width, x.stride(0), y.stride(0), blocks, BLOCK=MERGED_BLOCK, num_warps=MERGED_WARPS
        )
    return y


def triton_merged_backward(grad: Tensor, x: Tensor) -> None:
    """Replace x ``[T, 2 F]`` by its gradient, and ``grad`` ``[T, F]`` by the result of ``triton_merged``, in place.
    ValueError as there."""
    _check_merged(x, grad)
    rows, width = grad.shape
    if grad.numel():
        blocks = -(-width // MERGED_BLOCK)
        _merged_backward_kernel[(rows * blocks,)](
            grad, x, width, grad.stride(0), x.stride(0), blocks, BLOCK=MERGED_BLOCK, num_warps=MERGED_WARPS
        )


def _check_merged(x: Tensor, y: Tensor) -> None:
    require("swiglu", x, y)
    if x.shape != (y.shape[0], 2 * y.shape[1]) or x.stride(1) != 1 or y.stride(1) != 1:
        raise ValueError(
            f"swiglu: gate beside up must be [T, 2 F] and the other [T, F], neighbours of a row side by side; got "
            f"{list(x.shape)} and {list(y.shape)}"
        )


def reference_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Compute (dL/dgate, dL/dup) by the formulas above."""
    wide = compute_dtype(gate.dtype)
    g, a, u = grad.to(wide), gate.to(wide), up.to(wide)
    s = a.sigmoid()
    return (g * u * s * (1 + a * (1 - s))).to(gate.dtype), (g * a * s).to(up.dtype)


@torch.library.custom_op("transect::swiglu", mutates_args=())
def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Run the operator for autograd and ``torch.compile``: the Triton kernel where it can run, else the
    reference."""
    return triton_swiglu(gate, up) if runs_triton(gate, up) else reference(gate, up).contiguous()


@torch.library.custom_op("transect::swiglu_backward", mutates_args=())
def swiglu_backward(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the operator's gradients, (dL/dgate, dL/dup)."""
    if runs_triton(grad, gate, up):
        return triton_backward(grad, gate, up)
    dgate, dup = reference_backward(grad, gate, up)
    return dgate.contiguous(), dup.contiguous()


@swiglu.register_fake
def _(gate: Tensor, up: Tensor) -> Tensor:
    return torch.empty(gate.shape, device=gate.device, dtype=gate.dtype)


@swiglu_backward.register_fake
def _(grad: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    return (
        torch.empty(gate.shape, device=gate.device, dtype=gate.dtype),
        torch.empty(up.shape, device=up.device, dtype=up.dtype),
    )


def _setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
    return swiglu_backward(grad, *ctx.saved_tensors)


swiglu.register_autograd(_backward, setup_context=_setup)


def cost(gate: Tensor, up: Tensor) -> Cost:
    """Count 5 FLOPs an element: exp, add, divide, and two products."""
    return Cost(5 * gate.numel(), gate.nbytes + up.nbytes, gate.nbytes)


def _examples() -> Sequence[dict[str, Any]]:
    return [{"gate": 4 * sample(*shape), "up": sample(*shape, seed=1)} for shape in ((1, 1536), (7, 33), (3, 5, 1))]


def _peer(gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(gate) * up


CHOICES = {"block": (1024, 2048, 4096), "warps": (4, 8)}


def _cases() -> Sequence[Case]:
    def case(name: str, width: int, rows: int, first: bool = False) -> Case:
        def make(device: torch.device, seed: int) -> Mapping[str, Any]:
            generator = torch.Generator(device).manual_seed(seed)
            gate, up = torch.randn(2, rows, width, device=device, dtype=torch.bfloat16, generator=generator)
            return {"gate": gate, "up": up}

        directions = ("forward",) if rows <= max(shapes.DECODE_ROWS) else ()
        only = () if first else ("triton", "torch")
        return Case(f"MLP of {name}, {rows} tokens", make, directions=directions, only=only)

    made = []
    for name, model in shapes.by_size(lambda model: model.ffn_dim):
        width = model.ffn_dim
        made.append(case(name, width, shapes.rows_for_bytes(2 * width), model is shapes.LLAMA_8B))
        made += [case(name, width, rows) for rows in (*shapes.PREFILL_ROWS, *shapes.DECODE_ROWS)]
    return made


def _kernels() -> Sequence[Kernel]:
    tensors = ("g_ptr", "gate_ptr", "up_ptr", "dgate_ptr", "dup_ptr")
    forward = {"gate_ptr": "*bf16", "up_ptr": "*bf16", "y_ptr": "*bf16", "n": "i32"}
    backward = {**dict.fromkeys(tensors, "*bf16"), "n": "i32"}
    merged = {"x_ptr": "*bf16", "y_ptr": "*bf16", "n_cols": "i32", "x_row": "i32", "y_row": "i32", "blocks": "i32"}
    back = {"g_ptr": "*bf16", "x_ptr": "*bf16", "n_cols": "i32", "g_row": "i32", "x_row": "i32", "blocks": "i32"}
    block = {"BLOCK": MERGED_BLOCK}
    return [
        Kernel("forward", _forward_kernel, forward, {"BLOCK": 2048}, ("n",)),
        Kernel("backward", _backward_kernel, backward, {"BLOCK": 2048}, ("n",)),
        Kernel("side by side", _merged_kernel, merged, block, ("n_cols", "x_row", "y_row"), MERGED_WARPS),
        Kernel(
            "side by side, backward", _merged_backward_kernel, back, block, ("n_cols", "g_row", "x_row"), MERGED_WARPS
        ),
    ]


register(
    Op(
        name="swiglu",
        reference=reference,
        cost=cost,
        implementations={
            "torch": in_torch(by_exp, batch_invariant=True),
            "cpu": gradients.implementation(gradients.swiglu, by_exp),
            "triton": in_triton(triton_swiglu, batch_invariant=True, autograd=swiglu),
        },
        examples=_examples,
        peers={"torch": _peer, "torch.compile": compiled(_peer)},
        differentiable=("gate", "up"),
        gradient_cost=lambda gate, up: Cost(10 * gate.numel(), 3 * gate.nbytes, 2 * gate.nbytes),
        cases=_cases,
        kernels=_kernels,
        knobs=lambda: [Knobs("swiglu", CHOICES, flat_rule, triton_swiglu, dict, lambda inputs: inputs["gate"].numel())],
    )
)
