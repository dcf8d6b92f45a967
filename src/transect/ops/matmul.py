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
for. What is left to a kernel is to feed them:

* ``_tiles`` computes one BM x BN tile of Y per program and walks over K. Programs are numbered so that about GROUP row
  tiles share the columns in flight (swizzled order): the working set of the 132 tiles in flight at one time is then
  about square, and each element of X and W comes out of the L2 cache instead of memory for all but one of its uses.
* ``_persistent`` launches one program for each multiprocessor and hands it tile after tile, so that the loads of the
  next tile run during the epilogue of the last. Its loads are bulk tensor copies (TMA on Hopper), which need no
  address arithmetic in registers. Elsewhere Triton turns them into ordinary loads, which is how it is tested.

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

from . import gelu, matmul_ladder, shapes, swiglu
from .jit import INTERPRETED, TRITON_TARGETS, available, kernel, multiprocessors, require, runs_triton, tl, triton
from .matmul_tiles import Tiles, choose, knobs
from .numerics import compute_dtype, sample
from .peers import compiled
from .registry import Case, Cost, Implementation, Kernel, OnHost, Op, Trace, register
from .tiles import describe, dot, fits_descriptor

ACTIVATIONS = ("", "gelu", "gelu_tanh")


def reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "",
) -> Tensor:
    """x ``[M, K]``, weight ``[N, K]``, ... -> ``[M, N]`` in x's dtype.

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


# ---------------------------------------------------------------------------------------------------------- kernels


@kernel
def _tile_of(tile, rows, columns, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Row and column of a tile: numbers run down GROUP rows, then to the next column, then to the next GROUP rows."""
    per_group = GROUP * columns
    first = (tile // per_group) * GROUP
    height = min(rows - first, GROUP)
    return first + (tile % per_group) % height, (tile % per_group) // height


@kernel
def _sigmoid_of_log2(z):  # type: ignore[no-untyped-def]
    """1 / (1 + 2^-z) in two instructions of the special-function unit; a square of 1 / sqrt instead of a division,
    which would take five more of the others."""
    r = tl.rsqrt(1.0 + tl.exp2(-z))
    return r * r


@kernel
def _activate(z, ACT: tl.constexpr, SHORT: tl.constexpr):  # type: ignore[no-untyped-def]
    """SHORT: the result is rounded to bfloat16, and the normal probability may be off by 0.13% (of its smaller tail).

    It is then 1 / (1 + 2^-q) with q = log2(p / (1 - p)), an odd function that a polynomial of degree 7 follows: fitted
    to the least largest error on |z| <= 5, and rising beyond. An epilogue has no more time than that.
    """
    if ACT == "gelu":
        if SHORT:
            u = z * z
            q = 2.2976466591 + u * (0.1093967754 + u * (-0.0014235595 + u * 1.3032083e-05))
            z = z * _sigmoid_of_log2(z * q)
        else:
            z = z * 0.5 * (1.0 + tl.erf(z * 0.7071067811865476))
    if ACT == "gelu_tanh":
        # (1 + tanh(v)) / 2 = 1 / (1 + e^-2v); 2 / ln 2 times v's factors.
        if SHORT:
            z = z * _sigmoid_of_log2(z * (2.302208198 + 0.1029432397 * z * z))
        else:
            # exp may overflow to inf, and the quotient is then 0.
            u = 0.7978845608028654 * (z + 0.044715 * z * z * z)
            z = z * (1.0 - 1.0 / (tl.exp(2.0 * u) + 1.0))
    return z


@kernel
def _finish(acc, acc_gate, rows, columns, M, N, bias, residual, res_m, res_n, ACT: tl.constexpr, GATED: tl.constexpr,
            SHORT: tl.constexpr):  # fmt: skip
    """Bias, activation or gate, and residual on a float32 tile."""
    if bias is not None:
        acc += tl.load(bias + columns, columns < N, 0.0).to(tl.float32)[None, :]
    if GATED:
        if SHORT:
            acc = acc * acc_gate * _sigmoid_of_log2(1.4426950408889634 * acc_gate)
        else:
            acc = acc * acc_gate / (1.0 + tl.exp(-acc_gate))
    else:
        acc = _activate(acc, ACT, SHORT)
    if residual is not None:
        inside = (rows[:, None] < M) & (columns[None, :] < N)
        at = residual + rows[:, None].to(tl.int64) * res_m + columns[None, :] * res_n
        acc += tl.load(at, inside, 0.0).to(tl.float32)
    return acc


@kernel
def _tiles(  # type: ignore[no-untyped-def]
    x, weight, gate, bias, residual, out, M, N, K, x_m, x_k, w_n, w_k, g_n, g_k, res_m, res_n, out_m,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, ACT: tl.constexpr,
    GATED: tl.constexpr,
):  # fmt: skip
    """One tile of the result per program; any strides, any size."""
    tile_m, tile_n = _tile_of(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
    rows = tile_m * BM + tl.arange(0, BM)
    columns = tile_n * BN + tl.arange(0, BN)
    # Rows past the end read row 0: what they compute is not stored, and the loop needs no mask for them.
    safe_rows = tl.where(rows < M, rows, 0).to(tl.int64)
    safe_columns = tl.where(columns < N, columns, 0).to(tl.int64)
    k = tl.arange(0, BK)
    x_at = x + safe_rows[:, None] * x_m + k[None, :] * x_k
    w_at = weight + k[:, None] * w_k + safe_columns[None, :] * w_n
    acc = tl.zeros((BM, BN), tl.float32)
    acc_gate = acc
    if GATED:
        g_at = gate + k[:, None] * g_k + safe_columns[None, :] * g_n
    for start in range(0, K, BK):
        left = K - start
        a = tl.load(x_at, k[None, :] < left, 0.0)
        b = tl.load(w_at, k[:, None] < left, 0.0)
        acc = dot(a, b, acc)
        if GATED:
            c = tl.load(g_at, k[:, None] < left, 0.0)
            acc_gate = dot(a, c, acc_gate)
            g_at += BK * g_k
        x_at += BK * x_k
        w_at += BK * w_k
    SHORT: tl.constexpr = out.dtype.element_ty == tl.bfloat16
    acc = _finish(acc, acc_gate, rows, columns, M, N, bias, residual, res_m, res_n, ACT, GATED, SHORT)
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(out + rows[:, None].to(tl.int64) * out_m + columns[None, :], acc.to(out.dtype.element_ty), inside)


@kernel
def _persistent(  # type: ignore[no-untyped-def]
    x, weight, gate, out, bias, residual, M, N, K, res_m, res_n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, ACT: tl.constexpr,
    GATED: tl.constexpr, X_T: tl.constexpr, W_T: tl.constexpr, PROGRAMS: tl.constexpr,
    SPECIALIZE: tl.constexpr, FLATTEN: tl.constexpr, HALVES: tl.constexpr, PAIRED: tl.constexpr,
):  # fmt: skip
    """PROGRAMS programs share all tiles (fewer have one each); x, weight, gate and out are tensor descriptors.

    X_T, W_T: the operand lies in memory as [K, M] or [K, N]. The descriptors pad with zeros past the edges.
    PAIRED: gate and weight lie in one tensor, ``weight`` describes both as [2, N, K], and one product of twice the
    width computes both (the wider the right operand, the less often the left one is read from shared memory).
    """
    SHORT: tl.constexpr = out.dtype == tl.bfloat16
    rows_of_tiles = tl.cdiv(M, BM)
    columns_of_tiles = tl.cdiv(N, BN)
    tiles = rows_of_tiles * columns_of_tiles
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=FLATTEN, warp_specialize=SPECIALIZE):
        tile_m, tile_n = _tile_of(tile, rows_of_tiles, columns_of_tiles, GROUP)
        m = tile_m * BM
        n = tile_n * BN
        acc = tl.zeros((BM, 2 * BN if PAIRED else BN), tl.float32)
        acc_gate = acc
        for step in range(tl.cdiv(K, BK)):
            if X_T:
                a = x.load([step * BK, m]).T
            else:
                a = x.load([m, step * BK])
            if PAIRED:
                b = weight.load([0, n, step * BK]).reshape(2 * BN, BK).T
            elif W_T:
                b = weight.load([step * BK, n])
            else:
                b = weight.load([n, step * BK]).T
            acc = dot(a, b, acc)
            if GATED and not PAIRED:
                if W_T:
                    c = gate.load([step * BK, n])
                else:
                    c = gate.load([n, step * BK]).T
                acc_gate = dot(a, c, acc_gate)
        if PAIRED:
            acc_gate, acc = acc.reshape((BM, 2, BN)).permute((0, 2, 1)).split()
        rows = m + tl.arange(0, BM)
        if HALVES:
            # Two stores of half a tile need half the shared memory, which buys another stage of loads.
            left, right = acc.reshape((BM, 2, BN // 2)).permute((0, 2, 1)).split()
            gate_left, gate_right = left, right
            if GATED:
                gate_left, gate_right = acc_gate.reshape((BM, 2, BN // 2)).permute((0, 2, 1)).split()
            columns = n + tl.arange(0, BN // 2)
            left = _finish(left, gate_left, rows, columns, M, N, bias, residual, res_m, res_n, ACT, GATED, SHORT)
            out.store([m, n], left.to(out.dtype))
            columns += BN // 2
            right = _finish(right, gate_right, rows, columns, M, N, bias, residual, res_m, res_n, ACT, GATED, SHORT)
            out.store([m, n + BN // 2], right.to(out.dtype))
        else:
            columns = n + tl.arange(0, BN)
            acc = _finish(acc, acc_gate, rows, columns, M, N, bias, residual, res_m, res_n, ACT, GATED, SHORT)
            out.store([m, n], acc.to(out.dtype))


@kernel
def _activation_gradient(g, z, a, dz, da, N, ACT: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """dZ (and dA) from G, Z (and A), element by element; in and out are contiguous."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < N
    upstream = tl.load(g + at, inside, 0.0).to(tl.float32)
    pre = tl.load(z + at, inside, 0.0).to(tl.float32)
    if GATED:
        gate = tl.load(a + at, inside, 0.0).to(tl.float32)
        s = 1.0 / (1.0 + tl.exp(-gate))
        tl.store(dz + at, (upstream * gate * s).to(dz.dtype.element_ty), inside)
        tl.store(da + at, (upstream * pre * s * (1.0 + gate * (1.0 - s))).to(da.dtype.element_ty), inside)
    else:
        if ACT == "gelu":
            slope = 0.5 * (1.0 + tl.erf(pre * 0.7071067811865476))
            slope += pre * 0.3989422804014327 * tl.exp(-0.5 * pre * pre)
        else:
            u = 0.7978845608028654 * (pre + 0.044715 * pre * pre * pre)
            p = 1.0 - 1.0 / (tl.exp(2.0 * u) + 1.0)
            # (1 - tanh^2) / 2 = 2 p (1 - p)
            slope = p + pre * 2.0 * p * (1.0 - p) * 0.7978845608028654 * (1.0 + 0.134145 * pre * pre)
        tl.store(dz + at, (upstream * slope).to(dz.dtype.element_ty), inside)


# -------------------------------------------------------------------------------------------------------- launchers


def matmul(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "",
    *,
    tiles: Tiles | None = None,
    out: Tensor | None = None,
) -> Tensor:
    """As ``reference``, on the GPU: the persistent kernel where a device has bulk copies and the strides allow it.

    ``out``: where the result is to be written, rows of neighbouring elements; it may be the residual.
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
    tiles = tiles or choose(x, weight, gate is not None, residual is not None)
    if tiles.stages > 3 and (residual is not None or x.stride(1) != 1 or weight.stride(1) != 1):
        tiles = replace(tiles, stages=3)  # a residual, or an operand turned around, takes the shared memory of a stage
    matrices = (x, weight, out) if gate is None else (x, weight, gate, out)
    bias = None if bias is None else bias.contiguous()
    if tiles.persistent and x.element_size() == 2 and k > 0 and fits_descriptor(*matrices):
        _launch_persistent(x, weight, bias, gate, residual, activation, out, tiles)
        return out
    res_m, res_n = (0, 0) if residual is None else residual.stride()
    g_n, g_k = (0, 0) if gate is None else gate.stride()
    _tiles[(triton.cdiv(m, tiles.bm) * triton.cdiv(n, tiles.bn),)](
        x, weight, gate, bias, residual, out, m, n, k, *x.stride(), *weight.stride(), g_n, g_k, res_m, res_n,
        out.stride(0), BM=tiles.bm, BN=tiles.bn, BK=tiles.bk, GROUP=tiles.group, ACT=activation,
        GATED=gate is not None, num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip
    return out


def _launch_persistent(
    x: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor | None, residual: Tensor | None, activation: str,
    out: Tensor, tiles: Tiles,
) -> None:  # fmt: skip
    m, k = x.shape
    n = weight.shape[0]
    bm, bn, bk = tiles.bm, tiles.bn, tiles.bk
    x_t = x.stride(1) != 1
    w_t = weight.stride(1) != 1
    if gate is not None and (gate.stride(1) != 1) != w_t:
        gate = gate.contiguous() if not w_t else gate.T.contiguous().T

    pair = gate is not None and not w_t and _is_pair(gate, weight)
    most = multiprocessors(x.device)
    programs = min(most, triton.cdiv(m, bm) * triton.cdiv(n, bn))
    res_m, res_n = (0, 0) if residual is None else residual.stride()
    _persistent[(programs,)](
        describe(x, bm, bk, transposed=x_t),
        describe_pair(gate, weight, bn, bk) if gate is not None and pair else describe(weight, bn, bk, transposed=w_t),
        None if gate is None or pair else describe(gate, bn, bk, transposed=w_t),
        describe(out, bm, bn // 2 if tiles.halves else bn),
        bias, residual, m, n, k, res_m, res_n, BM=bm, BN=bn, BK=bk, GROUP=tiles.group, ACT=activation,
        GATED=gate is not None, X_T=x_t, W_T=w_t, PROGRAMS=most, SPECIALIZE=tiles.specialize,
        FLATTEN=not tiles.specialize and not INTERPRETED, HALVES=tiles.halves, PAIRED=pair,
        num_warps=tiles.warps, num_stages=tiles.stages,
    )  # fmt: skip


def _is_pair(gate: Tensor, weight: Tensor) -> bool:
    """Whether gate and weight are parts of one tensor, gate first: rows of a merged projection."""
    return (
        gate.untyped_storage().data_ptr() == weight.untyped_storage().data_ptr()
        and gate.stride() == weight.stride()
        and gate.data_ptr() < weight.data_ptr()
    )


def describe_pair(gate: Tensor, weight: Tensor, rows: int, columns: int) -> Any:
    """Both as ``[2, N, K]``."""
    from triton.tools.tensor_descriptor import TensorDescriptor

    apart = (weight.data_ptr() - gate.data_ptr()) // gate.element_size()
    return TensorDescriptor(gate, [2, *gate.shape], [apart, *gate.stride()], [2, rows, columns])


def matmul_gradient(
    g: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None, gate: Tensor | None, activation: str
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Gradients of x, weight, bias and gate, from the upstream gradient ``[M, N]``."""
    dz, da = g.contiguous(), None
    if activation or gate is not None:
        z = matmul(x, weight, bias)
        a = None if gate is None else matmul(x, gate)
        g, dz = dz, torch.empty_like(z)
        da = None if a is None else torch.empty_like(a)
        if z.numel():
            _activation_gradient[(triton.cdiv(z.numel(), 1024),)](
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
    """What ``matmul_gradient`` makes, in plain torch."""
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
def _(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    activation: str = "",
) -> Tensor:
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
"""As ``matmul``, through ``torch.library``: gradients, fake tensors, ``torch.compile``; the reference where no kernel
runs."""


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``matmul`` with the arguments of the operator ``linear``."""
    return matmul(x, weight, bias)


def linear_autograd(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``linear`` with gradients."""
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
    """2 M N K FLOPs for each weight; what the epilogue computes is not counted, what it reads is."""
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
    """Two products for each weight; computing Z again is not counted."""
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
    """cuBLAS (on a GPU) through torch, and torch's operators after it."""
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


def _kernels() -> Sequence[Kernel]:
    scalars = ("M", "N", "K", "x_m", "x_k", "w_n", "w_k", "g_n", "g_k", "res_m", "res_n", "out_m")
    common = {"BM": 128, "BN": 128, "BK": 64, "GROUP": 8, "ACT": "", "GATED": False}
    tiles = Kernel(
        name="tiles",
        function=_tiles,
        arguments={"x": "*bf16", "weight": "*bf16", "out": "*bf16", **dict.fromkeys(scalars, "i32")},
        constants={**common, "gate": None, "bias": None, "residual": None, "x_k": 1, "w_k": 1},
        divisible=("M", "N", "K", "x_m", "w_n", "out_m"),
        warps=8,
        targets=TRITON_TARGETS,
    )
    persistent = Kernel(
        name="persistent",
        function=_persistent,
        arguments={
            "x": "tensordesc<bf16[128, 64]>",
            "weight": "tensordesc<bf16[256, 64]>",
            "out": "tensordesc<bf16[128, 128]>",
            **dict.fromkeys(("M", "N", "K", "res_m", "res_n"), "i32"),
        },
        constants={
            **common,
            "BN": 256,
            "gate": None,
            "bias": None,
            "residual": None,
            "X_T": False,
            "W_T": False,
            "PROGRAMS": 132,
            "SPECIALIZE": False,
            "FLATTEN": True,
            "HALVES": True,
            "PAIRED": False,
        },
        divisible=("M", "N", "K"),
        warps=8,
        stages=3,
        targets=("sm_90",),
    )
    return [tiles, persistent]


def _trace() -> Trace:
    def arguments() -> Mapping[str, Any]:
        return {"x": sample(12, 8), "weight": sample(16, 8, seed=1)}

    return Trace(
        arguments,
        functools.partial(matmul, tiles=Tiles(bm=4, bn=4, bk=4, group=2, warps=1)),
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
        kernels=_kernels,
        knobs=[knobs(matmul, gated) for gated in (False, True)],
        trace=_trace,
    )
)
