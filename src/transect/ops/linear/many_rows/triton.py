"""The device code of ``matmul.py``: two kernels for the product, the epilogue that they share, and the gradient of the
epilogue.

* ``tile_kernel`` computes one BM x BN tile of Y per program and walks over K. Programs are numbered so that about GROUP
  row tiles share the columns in flight (swizzled order). The working set of the 132 tiles in flight is then about
  square, and all uses of an element of X or W but one come out of the L2 cache instead of memory.
* ``persistent_kernel`` launches one program for each multiprocessor and hands it one tile after another, so that the
  loads of the next tile run during the epilogue of the last. Its loads are bulk tensor copies (TMA on Hopper), which
  need no address arithmetic in registers. Elsewhere Triton turns them into ordinary loads, which is how the kernel is
  tested.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ....hardware.targets import BULK_TARGETS, PLAIN_TARGETS
from ...lang.jit import TRITON_TARGETS, kernel, tl
from ...lang.tiles import dot
from ...registry import Kernel


@kernel
def tile_of(tile, rows, columns, GROUP: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return row and column of a tile: numbers go down GROUP rows, then to the next column, then to the next GROUP
    rows."""
    per_group = GROUP * columns
    first = (tile // per_group) * GROUP
    height = min(rows - first, GROUP)
    return first + (tile % per_group) % height, (tile % per_group) // height


@kernel
def _sigmoid_of_log2(z):  # type: ignore[no-untyped-def]
    """Compute 1 / (1 + 2^-z) in two instructions of the special-function unit: a square of 1 / sqrt instead of a
    division, which would take five more instructions of the other units."""
    r = tl.rsqrt(1.0 + tl.exp2(-z))
    return r * r


@kernel
def _activate(z, ACT: tl.constexpr, SHORT: tl.constexpr):  # type: ignore[no-untyped-def]
    """Apply the activation. SHORT: the result is rounded to bfloat16, and the normal probability may be off by 0.13%
    (of its smaller tail).

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
    """Apply bias, activation or gate, and residual to a float32 tile."""
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
def tile_kernel(  # type: ignore[no-untyped-def]
    x, weight, gate, bias, residual, out, M, N, K, x_m, x_k, w_n, w_k, g_n, g_k, res_m, res_n, out_m,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, ACT: tl.constexpr,
    GATED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Compute one tile of the result per program; any strides, any size. PARTS: as of ``persistent_kernel``."""
    tile_m, tile_n = tile_of(tl.program_id(0), tl.cdiv(M, BM), tl.cdiv(N, BN), GROUP)
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
    total = tl.zeros((BM, BN), tl.float32)
    for start in range(0, K, BK):
        if PARTS > 1:  # noqa: SIM102  (it is constant)
            if start > 0 and start % (K // PARTS) == 0:
                total += acc
                acc = tl.zeros((BM, BN), tl.float32)
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
    if PARTS > 1:
        acc = total + acc
    SHORT: tl.constexpr = out.dtype.element_ty == tl.bfloat16
    acc = _finish(acc, acc_gate, rows, columns, M, N, bias, residual, res_m, res_n, ACT, GATED, SHORT)
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(out + rows[:, None].to(tl.int64) * out_m + columns[None, :], acc.to(out.dtype.element_ty), inside)


@kernel
def persistent_kernel(  # type: ignore[no-untyped-def]
    x, weight, gate, out, bias, residual, M, N, K, res_m, res_n,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, ACT: tl.constexpr,
    GATED: tl.constexpr, X_T: tl.constexpr, W_T: tl.constexpr, PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr, HALVES: tl.constexpr, PAIRED: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Compute all tiles by at most PROGRAMS programs. x, weight, gate and out are tensor descriptors.

    X_T, W_T: the operand is stored as [K, M] or [K, N]. The descriptors pad with zeros past the edges.
    PAIRED: gate and weight are one tensor, ``weight`` describes both as [2, N, K], and one product of twice the
    width computes both (the wider the right operand, the less often the left one is read from shared memory).
    PARTS: parts of K, whose sums are added in order; 1 with a gate or a transposed operand.
    """
    SHORT: tl.constexpr = out.dtype == tl.bfloat16
    rows_of_tiles = tl.cdiv(M, BM)
    columns_of_tiles = tl.cdiv(N, BN)
    tiles = rows_of_tiles * columns_of_tiles
    for tile in tl.range(tl.program_id(0), tiles, PROGRAMS, flatten=FLATTEN):
        tile_m, tile_n = tile_of(tile, rows_of_tiles, columns_of_tiles, GROUP)
        m = tile_m * BM
        n = tile_n * BN
        acc = tl.zeros((BM, 2 * BN if PAIRED else BN), tl.float32)
        acc_gate = acc
        if PARTS > 1:
            for part in range(PARTS):
                own = tl.zeros((BM, BN), tl.float32)
                for step in range(K // (PARTS * BK)):
                    at = part * (K // PARTS) + step * BK
                    own = dot(x.load([m, at]), weight.load([n, at]).T, own)
                acc += own
        else:
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
def gradient_kernel(g, z, a, dz, da, N, ACT: tl.constexpr, GATED: tl.constexpr, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute dZ (and dA) from G, Z (and A), element by element; inputs and outputs are contiguous."""
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


def kernels() -> Sequence[Kernel]:
    scalars = ("M", "N", "K", "x_m", "x_k", "w_n", "w_k", "g_n", "g_k", "res_m", "res_n", "out_m")
    common = {"BM": 128, "BN": 128, "BK": 64, "GROUP": 8, "ACT": "", "GATED": False, "PARTS": 1}
    tiles = Kernel(
        name="tiles",
        function=tile_kernel,
        arguments={"x": "*bf16", "weight": "*bf16", "out": "*bf16", **dict.fromkeys(scalars, "i32")},
        constants={**common, "gate": None, "bias": None, "residual": None, "x_k": 1, "w_k": 1},
        divisible=("M", "N", "K", "x_m", "w_n", "out_m"),
        warps=8,
        targets=TRITON_TARGETS,
    )
    persistent = Kernel(
        name="persistent",
        function=persistent_kernel,
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
            "FLATTEN": True,
            "HALVES": True,
            "PAIRED": False,
        },
        divisible=("M", "N", "K"),
        warps=8,
        stages=3,
        targets=BULK_TARGETS,
    )
    gated = {**tiles.constants, "BN": 64, "GATED": True}
    del gated["gate"]
    portable = replace(
        tiles,
        name="tiles, with a gate",
        arguments={**tiles.arguments, "gate": "*bf16"},
        constants=gated,
        targets=PLAIN_TARGETS,
    )
    return [tiles, portable, persistent]
