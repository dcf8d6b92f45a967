r"""Matrix product of a weight, with what usually follows it fused into the same kernel.

    Z = X W^T + b        Y = act(Z) [+ R]          act: nothing, GELU exact, GELU tanh
    Y = silu(X V^T) * (X W^T + b) [+ R]            where a gate V is given (the two up-projections of a gated MLP)

Backward, with G = dL/dY and dZ = G * act'(Z):

    dL/dX = dZ W        dL/dW = dZ^T X        dL/db = sum over rows of dZ        dL/dR = G
    gate: A = X V^T, s = sigmoid(A):  dZ = G * A s,  dA = G * Z * s (1 + A (1 - s)),  dX also gets dA V,  dV = dA^T X

Z (and A) are computed again in the backward pass rather than kept: M x N elements less to hold, one product more.

Shapes: x ``[M, K]``, weight and gate ``[N, K]``, bias ``[N]``, residual and result ``[M, N]``, all of one dtype. Any
strides: a weight stored as ``[K, N]`` is passed as its transposed view. Sums, bias, activation and residual are
float32, rounded once at the end.

Bound by arithmetic when M, N and K are in the thousands: 2 M N K FLOPs against 2 (M K + N K + M N) bytes in bfloat16 is
n / 3 FLOPs per byte for n = M = N = K: 1365 at 4096, where an H200 needs 185 for its tensor cores to be what it waits
for. What is left to a kernel is to feed them: see ``many_rows/triton.py``.

Source: tiles and swizzle: Tillet et al. 2019 (Triton); persistence and bulk copies: NVIDIA CUTLASS 3 (ping-pong).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ....costs.work import Cost
from ... import shapes
from ...activation import gelu, swiglu
from ...first import matmul_ladder
from ...lang.jit import INTERPRETED, TRITON_TARGETS, available, multiprocessors, require, runs_triton, triton
from ...lang.tiles import describe, fits_descriptor
from ...numerics import compute_dtype, sample
from ...peers import compiled
from ...registry import Case, Implementation, KernelTrace, OnHost, Op, register
from .tiling import ManyRowsTiling, choose, knobs
from .triton import gradient_kernel, kernels, persistent_kernel, tile_kernel

ACTIVATIONS = ("", "gelu", "gelu_tanh")


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "",
) -> Tensor:
    """Multiply x ``[M, K]``, weight ``[N, K]``, ... -> ``[M, N]`` in x's dtype.

    Raises:
        ValueError: an unknown activation, or one beside a gate.
    """
    _check(x, weight, bias, gate, residual, activation)
    dtype = compute_dtype(x.dtype)
    z = x.to(dtype) @ weight.to(dtype).T
    if bias is not None:
        z = z + bias.to(dtype)
    if gate is not None:
        z = F.silu(x.to(dtype) @ gate.to(dtype).T) * z
    elif activation == "gelu":
        z = F.gelu(z)
    elif activation == "gelu_tanh":
        z = F.gelu(z, approximate="tanh")
    return (z if residual is None else z + residual.to(dtype)).to(x.dtype)


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor | None, residual: Tensor | None, activation: str
) -> None:
    if activation not in ACTIVATIONS:
        raise ValueError(f"matmul: activation {activation!r} is not known; use one of {ACTIVATIONS}")
    if gate is not None and activation:
        raise ValueError("matmul: a gate brings its own activation (SiLU); leave activation empty")
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ValueError(f"matmul: x [M, K] and weight [N, K] do not fit: {list(x.shape)} and {list(weight.shape)}")
    if gate is not None and gate.shape != weight.shape:
        raise ValueError(f"matmul: gate {list(gate.shape)} must have the shape of weight {list(weight.shape)}")
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(f"matmul: bias {list(bias.shape)} must be [{weight.shape[0]}]")
    if residual is not None and residual.shape != (x.shape[0], weight.shape[0]):
        raise ValueError(f"matmul: residual {list(residual.shape)} must be [{x.shape[0]}, {weight.shape[0]}]")


# -------------------------------------------------------------------------------------------------------- launchers


def matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "",
    *,
    tiling: ManyRowsTiling | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """Compute ``reference`` on the GPU: by the persistent kernel where the device has bulk copies and the strides allow
    it.

    ``out``: where the result goes, with neighbouring elements of a row side by side; it may be the residual.
    """
    _check(x, weight, bias, gate, residual, activation)
    require("matmul", *(t for t in (x, weight, bias, gate, residual) if t is not None))
    m, k = x.shape
    n = weight.shape[0]
    out = x.new_empty((m, n)) if out is None else out
    if out.shape != (m, n) or out.stride(1) != 1 or (m > 1 and out.stride(0) < n):
        raise ValueError(f"matmul: out must be [{m}, {n}] with whole rows, not {list(out.shape)} {out.stride()}")
    if out.numel() == 0:
        return out
    tiling = tiling or choose(x, weight, gate is not None, residual is not None)
    if tiling.stages > 3 and (residual is not None or x.stride(1) != 1 or weight.stride(1) != 1):
        tiling = replace(
            tiling, stages=3
        )  # a residual, or an operand turned around, takes the shared memory of a stage
    matrices = (x, weight, out) if gate is None else (x, weight, gate, out)
    bias = None if bias is None else bias.contiguous()
    if tiling.persistent and x.element_size() == 2 and k > 0 and fits_descriptor(*matrices):
        _launch_persistent(x, weight, bias, gate, residual, activation, out, tiling)
        return out
    res_m, res_n = (0, 0) if residual is None else residual.stride()
    g_n, g_k = (0, 0) if gate is None else gate.stride()
    tile_kernel[(triton.cdiv(m, tiling.bm) * triton.cdiv(n, tiling.bn),)](
        x, weight, gate, bias, residual, out, m, n, k, *x.stride(), *weight.stride(), g_n, g_k, res_m, res_n,
        out.stride(0), BM=tiling.bm, BN=tiling.bn, BK=tiling.bk, GROUP=tiling.group, ACT=activation,
        GATED=gate is not None, PARTS=tiling.parts, num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip
    return out


def _launch_persistent(
    x: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor | None, residual: Tensor | None, activation: str,
    out: Tensor, tiling: ManyRowsTiling,
) -> None:  # fmt: skip
    m, k = x.shape
    n = weight.shape[0]
    bm, bn, bk = tiling.bm, tiling.bn, tiling.bk
    x_t = x.stride(1) != 1
    w_t = weight.stride(1) != 1
    if gate is not None and (gate.stride(1) != 1) != w_t:
        gate = gate.contiguous() if not w_t else gate.T.contiguous().T

    pair = gate is not None and not w_t and _is_pair(gate, weight)
    most = multiprocessors(x.device)
    programs = min(most, triton.cdiv(m, bm) * triton.cdiv(n, bn))
    res_m, res_n = (0, 0) if residual is None else residual.stride()
    persistent_kernel[(programs,)](
        describe(x, bm, bk, transposed=x_t),
        describe_pair(gate, weight, bn, bk) if gate is not None and pair else describe(weight, bn, bk, transposed=w_t),
        None if gate is None or pair else describe(gate, bn, bk, transposed=w_t),
        describe(out, bm, bn // 2 if tiling.halves else bn),
        bias, residual, m, n, k, res_m, res_n, BM=bm, BN=bn, BK=bk, GROUP=tiling.group, ACT=activation,
        GATED=gate is not None, X_T=x_t, W_T=w_t, PROGRAMS=most,
        FLATTEN=not INTERPRETED and tiling.parts == 1, HALVES=tiling.halves,
        PAIRED=pair, PARTS=tiling.parts, num_warps=tiling.warps, num_stages=tiling.stages,
    )  # fmt: skip


def _is_pair(gate: Tensor, weight: Tensor) -> bool:
    """Return True if gate and weight are parts of one tensor with the gate first, as rows of a merged projection."""
    return (
        gate.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
        and gate.stride() == weight.stride()
        and gate.data_ptr() < weight.data_ptr()
    )


def describe_pair(gate: Tensor, weight: Tensor, rows: int, columns: int) -> Any:
    """Describe both as ``[2, N, K]``."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    apart = (weight.data_ptr() - gate.data_ptr()) // gate.element_size()
    return TensorDescriptor(gate, [2, *gate.shape], [apart, *gate.stride()], [2, rows, columns])


def matmul_gradient(
    g: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor | None, activation: str
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute the gradients of x, weight, bias and gate from the upstream gradient ``[M, N]``."""
    dz, da = g.contiguous(), None
    if activation or gate is not None:
        z = matmul(x, weight, bias)
        a = None if gate is None else matmul(x, gate)
        g, dz = dz, torch.empty_like(z)
        da = None if a is None else torch.empty_like(a)
        if z.numel():
            gradient_kernel[(triton.cdiv(z.numel(), 1024),)](
                g, z, a, dz, da, z.numel(), ACT=activation, GATED=gate is not None, BLOCK=1024
            )
    dx = matmul(dz, weight.T)
    dw = matmul(dz.T, x.T)
    db = None if bias is None else dz.sum(0, dtype=torch.float32).to(bias.dtype)
    if gate is None or da is None:
        return dx, dw, db, None
    return matmul(da, gate.T, residual=dx), dw, db, matmul(da.T, x.T)


def reference_gradient(
    g: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor | None, activation: str
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Compute ``matmul_gradient`` in plain torch."""
    wide = compute_dtype(x.dtype)
    dz, a, w = g.to(wide), x.to(wide), weight.to(wide)
    v, dv, da = None if gate is None else gate.to(wide), None, None
    if activation or v is not None:
        z = reference(a, w, None if bias is None else bias.to(wide))
        if v is not None:
            da, dz = swiglu.reference_backward(dz, a @ v.T, z)
        else:
            dz = gelu.reference_backward(dz, z, activation == "gelu_tanh")
    dx = dz @ w
    if v is not None and da is not None:
        dx, dv = dx + da @ v, (da.T @ a).to(x.dtype)
    db = None if bias is None else dz.sum(0).to(bias.dtype)
    return dx.to(x.dtype), (dz.T @ a).to(weight.dtype), db, dv


@torch.library.custom_op("transect::matmul", mutates_args=())
def _matmul_op(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "",
) -> Tensor:
    if not runs_triton(x, weight):
        return reference(x, weight, bias, gate, residual, activation).contiguous()
    return matmul(x, weight, bias, gate, residual, activation)


@_matmul_op.register_fake
def _(x: Tensor, weight: Tensor, *others: Any) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]))


@torch.library.custom_op("transect::matmul_gradient", mutates_args=())
def _gradient_op(
    g: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor | None, activation: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    made = matmul_gradient if runs_triton(g, x, weight) else reference_gradient
    dx, dw, db, dv = made(g, x, weight, bias, gate, activation)
    return dx, dw, x.new_empty(0) if db is None else db, x.new_empty(0) if dv is None else dv


@_gradient_op.register_fake
def _(
    g: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor | None, activation: str
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return (
        x.new_empty(x.shape),
        x.new_empty(weight.shape),
        x.new_empty(0 if bias is None else bias.shape[0]),
        x.new_empty(0) if gate is None else x.new_empty(gate.shape),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, gate, residual, activation = inputs
    plain = not activation and gate is None
    ctx.save_for_backward(x if ctx.needs_input_grad[1] or not plain else None, weight, bias, gate)
    ctx.has_residual, ctx.activation = residual is not None, activation


def _backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, bias, gate = ctx.saved_tensors
    if not ctx.activation and gate is None:  # plain: only the products that are asked for; a frozen weight is free
        g = g.contiguous()
        return (
            _matmul_op(g, weight.T) if ctx.needs_input_grad[0] else None,
            _matmul_op(g.T, x.T) if ctx.needs_input_grad[1] else None,
            None
            if bias is None or not ctx.needs_input_grad[2]
            else g.sum(0, dtype=compute_dtype(g.dtype)).to(bias.dtype),
            None,
            g if ctx.has_residual else None,
            None,
        )
    dx, dw, db, dv = _gradient_op(g, x, weight, bias, gate, ctx.activation)
    return (
        dx,
        dw,
        None if bias is None else db,
        None if gate is None else dv,
        g if ctx.has_residual else None,
        None,
    )


_matmul_op.register_autograd(_backward, setup_context=_save)


matmul_autograd = _matmul_op
"""``matmul`` through ``torch.library``: gradients, fake tensors, ``torch.compile``; the reference where no kernel
runs."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``matmul`` with the arguments of the operator ``linear``."""
    return matmul(x, weight, bias)


def linear_autograd(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``linear`` with gradients."""
    return _matmul_op(x, weight, bias, None, None, "")


def cases() -> Sequence[Case]:
    """Square products, products with what follows them fused, and the ladder's."""

    def make(
        device: torch.device, seed: int, m: int, n: int, k: int, activation: str, gated: bool
    ) -> Mapping[str, Any]:
        generator = torch.Generator(device).manual_seed(seed)

        def normal(rows: int, scale: float) -> Tensor:
            return torch.randn(rows, k, device=device, dtype=torch.bfloat16, generator=generator) * scale

        both = normal(2 * n if gated else n, k**-0.5)  # gate above up, as a model holds them
        made: dict[str, Any] = {"x": normal(m, 1.0), "weight": both[n:] if gated else both, "activation": activation}
        return made | ({"gate": both[:n]} if gated else {})

    model, only = shapes.LLAMA_8B, ("triton", "torch", "torch.compile")
    fused = [
        Case(
            f"{name}: {m} x {k} by {n}",
            functools.partial(make, m=m, n=n, k=k, activation=activation, gated=gated),
            directions=directions,
            only=only,
        )
        for name, m, n, k, activation, gated, directions in (
            ("square", 4096, 4096, 4096, "", False, ()),
            ("square", 8192, 8192, 8192, "", False, ("forward",)),
            ("GELU fused", 4096, 4096, 4096, "gelu", False, ("forward",)),
            (f"SiLU gate fused, MLP of {model.name}", 4096, model.ffn_dim, model.dim, "", True, ("forward",)),
        )
    ]
    return [*fused, *matmul_ladder.ladder_cases()]


# ----------------------------------------------------------------------------------------------------- registry entry


def cost(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "",
) -> Cost:
    """Count 2 M N K FLOPs for each weight; the epilogue's arithmetic is not counted, its reads are."""
    m, k = x.shape
    n = weight.shape[0]
    read = sum(t.nbytes for t in (x, weight, bias, gate, residual) if t is not None)
    return Cost(2 * m * n * k * (1 if gate is None else 2), read, m * n * x.element_size())


def gradient_cost(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "",
) -> Cost:
    """Count two products for each weight; recomputing Z is not counted."""
    m, k = x.shape
    n = weight.shape[0]
    inputs = [t for t in (x, weight, bias, gate, residual) if t is not None]
    kept = [t for t in (x, weight, gate) if t is not None]
    read = sum(t.nbytes for t in kept) + m * n * x.element_size()
    return Cost(4 * m * n * k * (1 if gate is None else 2), read, sum(t.nbytes for t in inputs))


def _peer(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "",
) -> Tensor:
    """Call cuBLAS (on a GPU) through torch, and torch's operators after it."""
    z = F.linear(x, weight, bias)
    if gate is not None:
        z = F.silu(F.linear(x, gate)) * z
    elif activation:
        z = F.gelu(z, approximate="tanh" if activation == "gelu_tanh" else "none")
    return z if residual is None else z + residual


def _examples() -> Sequence[dict[str, Any]]:
    def inputs(m: int, n: int, k: int, extra: str = "", **more: Any) -> dict[str, Any]:
        made: dict[str, Any] = {"x": sample(m, k), "weight": sample(n, k, seed=1) / math.sqrt(max(k, 1))}
        if "b" in extra:
            made["bias"] = sample(n, seed=2)
        if "g" in extra:
            made["gate"] = sample(n, k, seed=3) / math.sqrt(k)
        if "r" in extra:
            made["residual"] = sample(m, n, seed=4)
        return made | more

    transposed = inputs(24, 16, 40)
    transposed["weight"] = transposed["weight"].T.contiguous().T
    transposed["x"] = transposed["x"].T.contiguous().T
    merged = sample(48, 40, seed=5) / math.sqrt(40)
    return [
        inputs(1, 1, 1),
        inputs(0, 5, 3),
        {"x": sample(20, 40), "weight": merged[24:], "gate": merged[:24]},
        inputs(33, 17, 50, "b", activation="gelu"),
        inputs(16, 48, 32, "br", activation="gelu_tanh"),
        inputs(40, 24, 33, "gr"),
        transposed,
    ]


def _trace() -> KernelTrace:
    def arguments() -> Mapping[str, Any]:
        return {"x": sample(12, 8), "weight": sample(16, 8, seed=1)}

    return KernelTrace(
        arguments,
        functools.partial(matmul, tiling=ManyRowsTiling(bm=4, bn=4, bk=4, group=2, warps=1)),
        note="Programs go down a group of 2 row tiles before they go on to the next column: those in flight share rows "
        "of x and columns of the weight.",
    )


register(
    Op(
        name="matmul",
        reference=reference,
        cost=cost,
        gradient_cost=gradient_cost,
        implementations={
            "triton": Implementation("triton", available(matmul), TRITON_TARGETS, autograd=available(matmul_autograd)),
            **{name: matmul_ladder.rung(number) for name, number in matmul_ladder.RUNGS.items()},
        },
        examples=_examples,
        peers={"torch": _peer, "torch.compile": compiled(_peer), "cpu_blas": OnHost(_peer)},
        cases=cases,
        differentiable=("x", "weight", "bias", "gate", "residual"),
        kernels=kernels,
        knobs=lambda: [knobs(matmul, gated) for gated in (False, True)],
        trace=_trace,
    )
)
