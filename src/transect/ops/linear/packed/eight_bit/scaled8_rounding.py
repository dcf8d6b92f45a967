r"""Rows rounded to 8 bits for ``scaled8_tiles.py``, alone or by the kernel that makes them.

    x_ti ~ s_t a_ti        with scales of blocks of 128 k:        x_ti ~ s_tg a_ti

The scale of a row of x (of 128 of its numbers) makes its largest number the largest code: 448 of fp8 (e4m3), 127 of
whole numbers. What comes before a product is one of three:

    attention              ``triton_rounded(x)``
    residual add and norm  ``norm_rounded(x, residual, w, eps)``: t = x + residual, codes of t / rms(t) w
    the gate of an MLP     ``gate_rounded(both)``: codes of silu(first half) * second half

The last two save a launch, and writing and reading their result in bfloat16. They round it to x's dtype before, so
the codes are those of the kernels one after the other, but for the order of the norm's sum.

Shapes: x and residual ``[T, D]``, both ``[T, 2 F]``, w ``[D]``; codes int8 of x's shape (of fp8 the bits), scales
float32 ``[T]`` or, with ``blocks``, ``[T, D / 128]`` rounded up. Inference only.
Bound by bytes: each number is read once, and a code written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from .....hardware.targets import FP8_TARGETS
from .....spec.numbers.fp8 import FP8
from .....spec.numbers.int8 import INT8
from ....lang.jit import kernel, next_power_of_2, require, rows_of, tl
from ....lang.tiles import after_previous
from ....registry import Kernel

BLOCK = 128
"""Numbers of a row, and rows, that share a scale where scales are of blocks."""
MOST = {True: FP8.largest, False: INT8.largest}
"""The largest code, of fp8 and of whole numbers."""


class Rounded(NamedTuple):
    """Rows in 8 bits, see above."""

    codes: Tensor
    scale: Tensor


def rounded(x: Tensor, fp8: bool, blocks: bool = False) -> Rounded:
    """Round x ``[T, I]`` to 8 bits, by torch."""
    wide = x.float()
    grouped = wide[:, None]
    if blocks:
        grouped = torch.nn.functional.pad(wide, (0, -x.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    scale = (grouped.abs().amax(-1) / MOST[fp8]).clamp(min=1e-12)
    shares = (grouped / scale[..., None]).flatten(1)[:, : x.shape[1]]
    codes = shares.to(torch.float8_e4m3fn).view(torch.int8) if fp8 else shares.round().to(torch.int8)
    return Rounded(codes, scale if blocks else scale[:, 0])


@kernel
def _store_codes(v, codes, scale, row, width, i, FP8: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store codes and scales of one row ``v [GROUPS, SIZE]`` of float32."""
    most: tl.constexpr = 448.0 if FP8 else 127.0
    s = tl.maximum(tl.max(tl.abs(v), 1) / most, 1e-12)
    share = v / s[:, None]
    if FP8:
        code = share.to(tl.float8e4nv)
    else:
        code = ((share + 12582912.0) - 12582912.0).to(tl.int8)  # rounded to the nearest, of two as near to the even one
    tl.store(codes + row * width + i, code, i < width)
    g = tl.arange(0, GROUPS)
    count = tl.cdiv(width, SIZE)
    tl.store(scale + row * count + g, s, g < count)


@kernel
def _round(  # type: ignore[no-untyped-def]
    x, codes, scale, I, x_row, FP8: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Round one row of x, up to GROUPS groups of SIZE numbers, each with a scale."""
    after_previous(DEPENDENT_LAUNCH)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, GROUPS)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    v = tl.load(x + row * x_row + i, i < I, 0.0).to(tl.float32)
    _store_codes(v, codes, scale, row, I, i, FP8, GROUPS, SIZE)


@kernel
def _norm_round(  # type: ignore[no-untyped-def]
    x, residual, weight, total, codes, scale, D, x_row, residual_row, eps,
    FP8: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Write one row of x + residual, and round its norm."""
    after_previous(DEPENDENT_LAUNCH)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, GROUPS)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    t = tl.load(x + row * x_row + i, i < D, 0.0).to(tl.float32)
    t += tl.load(residual + row * residual_row + i, i < D, 0.0).to(tl.float32)
    kept = t.to(total.dtype.element_ty)
    tl.store(total + row * D + i, kept, i < D)
    t = kept.to(tl.float32)
    w = tl.load(weight + i, i < D, 0.0).to(tl.float32)
    y = t * (1.0 / tl.sqrt_rn(tl.sum(tl.sum(t * t, 1), 0) / D + eps)) * w
    _store_codes(y.to(total.dtype.element_ty).to(tl.float32), codes, scale, row, D, i, FP8, GROUPS, SIZE)


@kernel
def _gate_round(  # type: ignore[no-untyped-def]
    both, codes, scale, F, FP8: tl.constexpr, GROUPS: tl.constexpr, SIZE: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Gate and round one row ``[2 F]`` -> ``[F]``."""
    after_previous(DEPENDENT_LAUNCH)
    row = tl.program_id(0).to(tl.int64)
    i = tl.arange(0, GROUPS)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    gate = tl.load(both + row * 2 * F + i, i < F, 0.0).to(tl.float32)
    up = tl.load(both + row * 2 * F + F + i, i < F, 0.0).to(tl.float32)
    y = gate / (1.0 + tl.exp2(-1.4426950408889634 * gate)) * up
    _store_codes(y.to(both.dtype.element_ty).to(tl.float32), codes, scale, row, F, i, FP8, GROUPS, SIZE)


def _new(x: Tensor, width: int, fp8: bool, blocks: bool) -> Rounded:
    codes = x.new_empty(len(x), width, dtype=torch.float8_e4m3fn if fp8 else torch.int8)
    return Rounded(codes, x.new_empty((len(x), -(-width // BLOCK)) if blocks else (len(x),), dtype=torch.float32))


def _cut(width: int, blocks: bool, dependent_launch: bool, most_warps: int = 8) -> dict[str, Any]:
    """Return the constants of a program that holds a row."""
    warps = min(most_warps, 16 if width > 8192 else 8 if width > 4096 else 4)
    groups = next_power_of_2(-(-width // BLOCK)) if blocks else 1
    held = {"GROUPS": groups, "SIZE": BLOCK if blocks else next_power_of_2(width), "num_warps": warps}
    return {**held, "DEPENDENT_LAUNCH": dependent_launch, **({"launch_pdl": True} if dependent_launch else {})}


def triton_rounded(x: Tensor, fp8: bool, blocks: bool = False, *, dependent_launch: bool = False) -> Rounded:
    """Compute ``rounded`` in Triton. ``dependent_launch``: begin while the previous kernel still runs (Hopper)."""
    require("rounded", x)
    x = rows_of(x)
    codes, scale = _new(x, x.shape[1], fp8, blocks)
    if codes.numel():
        options = _cut(x.shape[1], blocks, dependent_launch)
        _round[(len(x),)](x, codes, scale, x.shape[1], x.stride(0), FP8=fp8, **options)
    return Rounded(codes.view(torch.int8), scale)


def norm_rounded(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    fp8: bool,
    blocks: bool = False,
    *,
    dependent_launch: bool = False,
) -> tuple[Tensor, Rounded]:
    """Return (x + residual, its RMSNorm in 8 bits).

    Raises:
        ValueError: x and residual differ in shape or dtype, or a dtype has no kernel.
    """
    require("norm_rounded", x, residual, weight)
    if x.shape != residual.shape or x.dtype != residual.dtype or weight.shape != x.shape[1:]:
        raise ValueError(
            "norm_rounded: x and residual must have one shape and dtype, the weight a number for each column; got "
            f"{list(x.shape)} {x.dtype}, {list(residual.shape)} {residual.dtype}, {list(weight.shape)}"
        )
    x, residual = rows_of(x), rows_of(residual)
    total, (codes, scale) = x.new_empty(x.shape), _new(x, x.shape[1], fp8, blocks)
    if codes.numel():
        _norm_round[(len(x),)](
            x, residual, weight.contiguous(), total, codes, scale, x.shape[1], x.stride(0), residual.stride(0), eps,
            FP8=fp8, **_cut(x.shape[1], blocks, dependent_launch),
        )  # fmt: skip
    return total, Rounded(codes.view(torch.int8), scale)


def gate_rounded(both: Tensor, fp8: bool, blocks: bool = False, *, dependent_launch: bool = False) -> Rounded:
    """Compute ``silu(first half) * second half`` of rows ``[T, 2 F]`` in 8 bits."""
    require("gate_rounded", both)
    both, width = both.contiguous(), both.shape[1] // 2
    codes, scale = _new(both, width, fp8, blocks)
    if codes.numel():
        _gate_round[(len(both),)](both, codes, scale, width, FP8=fp8, **_cut(width, blocks, dependent_launch, 16))
    return Rounded(codes.view(torch.int8), scale)


def kernels() -> list[Kernel]:
    """List the kernels that are compiled ahead of time."""
    codes = {"codes": "*fp8e4nv", "scale": "*fp32"}
    rows = {"x": "*bf16", **codes, "I": "i32", "x_row": "i32"}
    norm = {"x": "*bf16", "residual": "*bf16", "weight": "*bf16", "total": "*bf16", **codes,
            "D": "i32", "x_row": "i32", "residual_row": "i32", "eps": "fp32"}  # fmt: skip
    row = {"FP8": True, "GROUPS": 1, "SIZE": 4096, "DEPENDENT_LAUNCH": False}
    wide = {**row, "SIZE": 16384}
    gate = {"both": "*bf16", **codes, "F": "i32"}
    return [
        Kernel("rounding", _round, rows, row, ("I", "x_row"), targets=FP8_TARGETS),
        Kernel("norm, rounded", _norm_round, norm, row, ("D", "x_row", "residual_row"), targets=FP8_TARGETS),
        Kernel("gate, rounded", _gate_round, gate, wide, ("F",), 16, targets=FP8_TARGETS),
    ]
