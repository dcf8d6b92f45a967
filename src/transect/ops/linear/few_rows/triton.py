"""The Triton kernels of ``small_matmul.py``, the rule for their tilings, and their launcher.

``_rows`` computes tiles of Y, or SPLIT parts of each over k. The program that is last to leave its part adds them all,
in the order of the parts. ``_vector`` computes one row without tensor cores.

With weights of a few MB and 64 to 256 rows a launch takes about 4 us. Then three things count: nearly every
multiprocessor has exactly one tile of about 64 by 32 (even though each reads X), the rings are deep, and launches are
dependent. In a chain of layers of Qwen3-0.6B that beats cuBLAS, which has no dependent launch, and the kernels of
``few_rows/hopper.py``, whose blocks wait for the others of a cluster. At 32 rows W and X together come through the L2
cache at little more than the rate of memory, so from there on a tile must be wide, and not only its loads deep.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ....hardware.device import target_of
from ....hardware.targets import KernelTarget
from ...lang.jit import INTERPRETED, kernel, next_power_of_2, require, tl, triton
from ...lang.tiles import INTERPRETS, after_previous, describe, dot, fits_descriptor
from ..many_rows.matmul import describe_pair
from .cuda import Beside


@kernel
def add_parts(  # type: ignore[no-untyped-def]
    acc, parts, counters, tile, part, rows, columns, M, N, SPLIT: tl.constexpr
):  # fmt: skip
    """Leave this program's part; True and the whole sum for the program that arrives last at its tile.

    ``rows`` and ``columns`` give each element's row and column of Y in the shape of ``acc``; parts is ``[SPLIT, M,
    N]``.
    """
    inside = (rows < M) & (columns < N)
    at = rows * N + columns
    tl.store(parts + tl.cast(part, tl.int64) * M * N + at, acc, inside)
    tl.debug_barrier()
    # Release: the parts of all threads of this program are visible before the count is. Acquire: so are the others'.
    arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel")
    last = arrived == SPLIT - 1
    if last:
        tl.store(counters + tile, 0)  # ready for the next launch
        acc = tl.zeros_like(acc)
        for i in range(SPLIT):
            acc += tl.load(parts + tl.cast(i, tl.int64) * M * N + at, inside, 0.0, cache_modifier=".cg")
    return last, acc


@kernel
def _rows(  # type: ignore[no-untyped-def]
    x, weight, bias, out, parts, counters, residual, scale, scaled, left, squares, M, N, K, x_m, w_n, out_m,
    part_k, n_squares, eps, w_scale, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr,
    SWAP: tl.constexpr, EVEN: tl.constexpr, BULK: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr, GATED: tl.constexpr,
    SQUARES: tl.constexpr,
):  # fmt: skip
    """Compute one tile of Y, or one of SPLIT parts of it. Axis 0: column tiles; axis 1: row tiles; axis 2: parts of K.

    BULK: x and weight are tensor descriptors, which pad with zeros.
    GATED: weight is ``[2 N, K]``, gate first (a descriptor of ``[2, N, K]``), and Y is silu(one product) times the
    other; not with parts.
    residual ``[M, N]``, scale ``[N]``: Y is the product plus the residual, ``scaled`` gets Y times scale, and ``left``,
    ``[M, tiles of columns]``, sums of squares of Y. squares ``[M, n_squares]``: the product is divided by the root of
    their mean. See ``stream_products.py``; None where there is none.
    w_scale: of a weight in fp8, which becomes X's dtype, the float32 scale of each row; else None.
    """
    after_previous(DEPENDENT_LAUNCH)
    tile_n = tl.program_id(0)
    tile_m = tl.program_id(1)
    part = tl.program_id(2)
    m = tile_m * BM + tl.arange(0, BM)
    n = tile_n * BN + tl.arange(0, BN)
    k_end = min(K, (part + 1) * part_k)
    rows = m[None, :] if SWAP else m[:, None]
    columns = n[:, None] if SWAP else n[None, :]
    inside = (rows < M) & (columns < N)
    if residual is not None:  # asked for here, there when the product is
        before = tl.load(residual + rows * out_m + columns, inside, 0.0)
        factor = tl.load(scale + columns, columns < N, 0.0)
    if squares is not None:
        place = tl.arange(0, SQUARES)[None, :]
        square = tl.load(squares + m[:, None] * n_squares + place, (m[:, None] < M) & (place < n_squares), 0.0)
    WIDTH: tl.constexpr = 2 * BN if GATED else BN
    row = tile_n * BN + tl.arange(0, WIDTH) % BN
    of_weight = tl.where(row < N, row, 0).to(tl.int64)
    if GATED:
        of_weight += tl.arange(0, WIDTH) // BN * N
    acc = tl.zeros((WIDTH, BM), tl.float32) if SWAP else tl.zeros((BM, WIDTH), tl.float32)
    if not BULK:
        k = part * part_k + tl.arange(0, BK)
        x_at = x + m[:, None] * x_m + k[None, :]
        w_at = weight + of_weight[:, None] * w_n + k[None, :]
    for start in range(part * part_k, k_end, BK):
        if BULK:
            if GATED:
                b = weight.load([0, tile_n * BN, start]).reshape(2 * BN, BK)
            else:
                b = weight.load([tile_n * BN, start])
            a = x.load([tile_m * BM, start])
        else:
            if EVEN:
                b = tl.load(w_at)
                a = tl.load(x_at, m[:, None] < M, 0.0)
            else:
                inner = tl.arange(0, BK)[None, :] < k_end - start
                b = tl.load(w_at, inner, 0.0)
                a = tl.load(x_at, (m[:, None] < M) & inner, 0.0)
            x_at += BK
            w_at += BK
        if w_scale is not None:
            b = b.to(tl.float32 if INTERPRETS else a.dtype)
        acc = dot(b, a.T, acc) if SWAP else dot(a, b.T, acc)
    if w_scale is not None:
        row_scale = tl.load(w_scale + of_weight)
        acc *= row_scale[:, None] if SWAP else row_scale[None, :]
    if squares is not None:
        inverse = tl.rsqrt(tl.sum(square, 1) / K + eps)
        acc *= inverse[None, :] if SWAP else inverse[:, None]
    if GATED:
        if SWAP:
            gate, up = acc.reshape((2, BN, BM)).permute((1, 2, 0)).split()
        else:
            gate, up = acc.reshape((BM, 2, BN)).permute((0, 2, 1)).split()
        acc = gate / (1.0 + tl.exp2(-1.4426950408889634 * gate)) * up
    done = True
    if SPLIT > 1:
        tile = tile_m * tl.num_programs(0) + tile_n
        done, acc = add_parts(acc, parts, counters, tile, part, rows, columns, M, N, SPLIT)
    if done:
        if bias is not None:
            acc += tl.load(bias + columns, columns < N, 0.0).to(tl.float32)
        if residual is not None:
            total = (acc + before.to(tl.float32)).to(out.dtype.element_ty)
            tl.store(out + rows * out_m + columns, total, inside)
            acc = total.to(tl.float32)
            tl.store(scaled + rows * out_m + columns, (acc * factor.to(tl.float32)).to(out.dtype.element_ty), inside)
            sums = tl.sum(acc * acc, 0 if SWAP else 1)
            tl.store(left + m * tl.num_programs(0) + tile_n, sums, m < M)
        else:
            tl.store(out + rows * out_m + columns, acc.to(out.dtype.element_ty), inside)


@kernel
def _vector(  # type: ignore[no-untyped-def]
    x, weight, bias, out, M, N, K, x_m, w_n, out_m, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Compute BN elements of one row of Y, without tensor cores: sums are kept lane by lane and added up once at the
    end."""
    after_previous(DEPENDENT_LAUNCH)
    m = tl.program_id(1)
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    safe_n = tl.where(n < N, n, 0).to(tl.int64)
    k = tl.arange(0, BK)
    x_at = x + m * x_m + k
    w_at = weight + safe_n[:, None] * w_n + k[None, :]
    acc = tl.zeros((BN, BK), tl.float32)
    for start in range(0, K, BK):
        if EVEN:
            b = tl.load(w_at)
            a = tl.load(x_at)
        else:
            inner = k < K - start
            b = tl.load(w_at, inner[None, :], 0.0)
            a = tl.load(x_at, inner, 0.0)
        acc += b.to(tl.float32) * a.to(tl.float32)[None, :]
        x_at += BK
        w_at += BK
    y = tl.sum(acc, 1)
    if bias is not None:
        y += tl.load(bias + n, n < N, 0.0).to(tl.float32)
    tl.store(out + m * out_m + n, y.to(out.dtype.element_ty), n < N)


@dataclass(frozen=True, slots=True)
class TritonTiling:
    """The tiling of a product of few rows. ``bm`` 0 takes the kernel without tensor cores."""

    bm: int
    bn: int
    bk: int
    split: int
    warps: int = 4
    stages: int = 4
    swap: bool = True
    bulk: bool = False
    dependent_launch: bool = False
    """The launch begins while the kernel before it on the stream still ends."""
    gated: bool = False
    """``bn`` columns of the gate and as many of the other factor are one tile, see ``gate_up.py``."""


def choose_tiling(m: int, n: int, k: int, device: torch.device) -> TritonTiling:
    """Return the tiling for a shape: the quickest of those tried on an H200 at the shapes of an 8B model; elsewhere a
    guess from them.

    There are three kinds of weight: wide (more tiles than the chip takes at once), deep (few tiles and long sums, so
    they are split), and small (done in about 10 us, where the number of programs counts most).
    """
    if INTERPRETED:
        return (
            TritonTiling(16, 16, 16, min(3, -(-k // 16)), warps=1, stages=1)
            if m > 1
            else TritonTiling(0, 4, 32, 1, warps=1, stages=1)
        )
    target = target_of(device)
    return _rule(m, n, k, True, True) if target.bulk_copies else portable_tiling(m, n, k, target)


def portable_tiling(m: int, n: int, k: int, target: KernelTarget) -> TritonTiling:
    """Return the tiling without bulk copies, with as many stages as fit a block."""
    tiling = _rule(m, n, k, False, target.dependent_launch)
    if not tiling.bm:
        return tiling
    return replace(tiling, stages=target.stages(tiling.stages, (tiling.bm + tiling.bn) * tiling.bk * 2))


def portable_gate(m: int, n: int, k: int, target: KernelTarget) -> TritonTiling:
    """Return ``portable_tiling`` of a weight ``[n, k]`` whose halves are a gate and the other factor, in one launch."""
    tiling = portable_tiling(m, n, k, target)
    if 0 < tiling.bm <= 32:
        tiling = replace(tiling, bn=128, bk=64, stages=target.stages(5, (tiling.bm + 128) * 64 * 2))
    return replace(tiling, bn=tiling.bn // 2, split=1, gated=True)


def _rule(m: int, n: int, k: int, bulk: bool, early: bool) -> TritonTiling:
    """Return the tiling where shared memory does not matter. ``bulk``: with bulk copies; ``early``: with dependent
    launch."""
    wide, deep, small = n >= 16384, k >= 8192, n <= 5000
    if m == 1:
        bn, bk, warps = (16, 256, 4) if wide else (2, 2048, 4) if deep else (2, 1024, 2) if small else (8, 512, 4)
        return TritonTiling(0, bn, bk, 1, warps, dependent_launch=early)
    bm = 16 if m <= 16 else 32 if m <= 32 else 64 if m <= 64 else 128 if m <= 128 else 256
    if bm <= 32:
        if wide or deep:
            return TritonTiling(bm, 64, 128, 1 if wide else 4, dependent_launch=early)
        if small and bulk:
            return TritonTiling(bm, 64, 128, 1, stages=6, bulk=True, dependent_launch=True)
        return TritonTiling(bm, 32, 256, 1, dependent_launch=early)
    if wide:
        bn, warps, stages = {64: (128, 4, 5), 128: (256, 8, 4), 256: (128, 8, 4)}[bm]
        return TritonTiling(bm, bn, 64, 1, warps, stages, swap=False, bulk=bulk, dependent_launch=early)
    if bm == 64:
        return TritonTiling(64, 64, 128, 2 if deep or small else 1, bulk=bulk, dependent_launch=early)
    if bm == 128 and deep:
        return TritonTiling(128, 64, 64, 2, stages=5, bulk=bulk, dependent_launch=early)
    if bm == 256 and not (deep or small):
        return TritonTiling(256, 64, 64, 1, warps=8, stages=5, bulk=bulk, dependent_launch=early)
    return TritonTiling(128, 64, 128, 1, bulk=bulk, dependent_launch=early)


class Counters:
    """Counters of arrivals at split tiles: zeros that every launch leaves as zeros, one set for each device.

    Launches that share them must be on one stream; for a second stream make a second ``TritonRows``.
    """

    def __init__(self) -> None:
        self._by_device: dict[torch.device, Tensor] = {}

    def get(self, device: torch.device, tiles: int) -> Tensor:
        """Return at least ``tiles`` zeros, int32.

        Raises:
            RuntimeError: first use on this device is inside a CUDA graph capture.
        """
        held = self._by_device.get(device)
        if held is None or held.numel() < tiles:
            if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
                raise RuntimeError("small_matmul: run the operator once before capturing it in a CUDA graph")
            held = self._by_device[device] = torch.zeros(max(tiles, 16384), dtype=torch.int32, device=device)
        return held


class TritonRows:
    """``small_matmul(x, weight, bias=None, *, tiling=None)`` by these kernels. Each instance has counters of its
    own."""

    def __init__(self) -> None:
        self._counters = Counters()

    def __call__(
        self, x: Tensor, weight: Tensor, bias: Tensor | None = None, *, tiling: TritonTiling | None = None
    ) -> Tensor:
        """Compute ``small_matmul.reference`` on the GPU; with ``tiling.gated`` ``gate_up.reference``.

        Raises:
            ValueError: shapes that do not fit; or a gate with a bias or with parts.
        """
        return self.beside(x, weight, bias, Beside(), tiling=tiling)[0]

    def beside(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm: Beside,
        *,
        tiling: TritonTiling | None = None,
        weight_scale: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return a product with a norm beside it: (result, scaled, squares). The last two are those of
        ``stream_products.Stream``, or None where the result is not added to a stream. ``weight_scale``: of a weight in
        fp8 the float32 scale of each row.

        Errors are those of ``__call__``, and ``ValueError`` where ``norm.refusal``, or for a residual with a gate or
        with columns that are not whole number of tiles.
        """
        require("small_matmul", *(t for t in (x, weight if weight_scale is None else None, bias) if t is not None))
        if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
            raise ValueError(
                f"small_matmul: x {list(x.shape)} and weight {list(weight.shape)} must be [M, K] and [N, K]"
            )
        x, weight = (t if t.stride(1) == 1 else t.contiguous() for t in (x, weight))
        bias = None if bias is None else bias.contiguous()
        m, k = x.shape
        gated = tiling is not None and tiling.gated
        n = weight.shape[0] // 2 if gated else weight.shape[0]
        if reason := norm.refusal(x, n, sixteens=False):
            raise ValueError(f"small_matmul: {reason}")
        tiling = tiling or choose_tiling(m, n, k, x.device)
        if x.element_size() == 4 and tiling.bm > 0 and not INTERPRETED:
            tiling = TritonTiling(
                min(tiling.bm, 64), 64, 32, 1, stages=2
            )  # a tile of float32 takes twice the shared memory
        out = x.new_empty((m, n))
        scaled = squares = None
        if norm.residual is not None:
            if n % tiling.bn:
                raise ValueError(f"small_matmul: squares are of whole tiles, and {n} columns are none of {tiling.bn}")
            scaled, squares = x.new_empty((m, n)), x.new_empty((m, n // tiling.bn), dtype=torch.float32)
        if out.numel() == 0:
            return out, scaled, squares
        strides = (x.stride(0), weight.stride(0), n)
        options: dict[str, Any] = {
            "DEPENDENT_LAUNCH": tiling.dependent_launch,
            "num_warps": tiling.warps,
            "num_stages": tiling.stages,
        }
        if tiling.dependent_launch:
            options["launch_pdl"] = True
        if tiling.bm == 0:
            if norm.residual is not None or norm.squares is not None:
                raise ValueError("small_matmul: a tiling without tensor cores has no norm beside it")
            _vector[(triton.cdiv(n, tiling.bn), m)](
                x, weight, bias, out, m, n, k, *strides, BN=tiling.bn, BK=tiling.bk, EVEN=k % tiling.bk == 0, **options
            )  # fmt: skip
            return out, None, None
        grid = (triton.cdiv(n, tiling.bn), triton.cdiv(m, tiling.bm))
        part_k = triton.cdiv(triton.cdiv(k, tiling.bk), tiling.split) * tiling.bk
        split = max(1, triton.cdiv(k, part_k)) if k else 1
        parts = held = None
        if split > 1:
            parts = x.new_empty((split, m, n), dtype=torch.float32)
            held = self._counters.get(x.device, grid[0] * grid[1])
        bulk = tiling.bulk and k * x.element_size() % 16 == 0 and fits_descriptor(x, weight)
        if gated and (bias is not None or norm.residual is not None or split > 1):
            raise ValueError("small_matmul: a gate is for whole sums, without bias and residual")
        left, right = x, weight
        if bulk:
            left, right = describe(x, tiling.bm, tiling.bk), describe(weight, tiling.bn, tiling.bk)
        if gated and bulk:
            gate, up = weight.chunk(2)
            right = describe_pair(gate, up, tiling.bn, tiling.bk)
        count = 1 if norm.squares is None else norm.squares.shape[1]
        _rows[(*grid, split)](
            left, right, bias, out, parts, held, norm.residual, norm.scale, scaled, squares,
            norm.squares, m, n, k, *strides, part_k, count, norm.eps, weight_scale,
            BM=tiling.bm, BN=tiling.bn, BK=tiling.bk, SPLIT=split, SWAP=tiling.swap, EVEN=k % tiling.bk == 0, BULK=bulk,
            GATED=gated, SQUARES=next_power_of_2(count), **options,
        )  # fmt: skip
        return out, scaled, squares


by_triton = TritonRows()
