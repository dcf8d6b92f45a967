"""The Triton kernels of ``int4_matmul.py``: products for other dtypes and GPUs than Hopper's, and a weight rebuilt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .....hardware.device import target_of
from .....hardware.targets import PLAIN_TARGETS
from ....lang.jit import (
    INTERPRETED,
    TRITON_TARGETS,
    kernel,
    multiprocessors,
    next_power_of_2,
    require,
    tl,
    triton,
)
from ....lang.tiles import INTERPRETS, after_previous, dot
from ....registry import Kernel
from ....tuning import choose
from ...few_rows.triton import Counters, TritonTiling, add_parts
from .int4_packing import CHUNK, group_of, is_arranged

OFFSETS = {torch.bfloat16: 128, torch.float16: 1024, torch.float32: -8}
"""The offset that is added to a code before the product."""
REBUILT_ROWS = 64
"""Rows of W in a program that rebuilds it."""
TRITON_CHOICES = {"bn": (32, 64, 128), "split": (1, 2, 4, 8), "warps": (2, 4, 8), "stages": (2, 3, 4)}


@kernel
def _as_float(nibbles, OFFSET: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Convert 0..15 to OFFSET + nibble: the bits of OFFSET with the nibble in their lowest places."""
    if INTERPRETS or OFFSET < 0:
        number = nibbles.to(tl.float32) + OFFSET
    else:
        BITS: tl.constexpr = 0x4300 if OFFSET == 128 else 0x6400
        number = (nibbles.to(tl.int16) | BITS).to(dtype, bitcast=True)
    return number


@kernel
def _codes(  # type: ignore[no-untyped-def]
    x, weight, bias, out, parts, counters, M, N, K, x_m, out_m, part_chunks,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, OFFSET: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """Compute one tile of Y, or a part of it; 128 k a step. Axes as in ``small_matmul``; W is the left operand.

    A word holds four k of each of two rows of W, so there are two products; X is read in the order of those k.
    """
    after_previous(DEPENDENT_LAUNCH)
    tile_n = tl.program_id(0)
    tile_m = tl.program_id(1)
    part = tl.program_id(2)
    blocks = (N + 15) // 16
    GROUPS: tl.constexpr = 128 // GROUP
    STRIDE: tl.constexpr = 256 + 16 * GROUPS
    WORDS: tl.constexpr = GROUP // 4  # of a row and a group
    SIXTEENS: tl.constexpr = 4 if GROUP >= 64 else 2  # neighbouring words
    m = tile_m * BM + tl.arange(0, BM)
    pair = tl.arange(0, BN // 2)  # rows n and n + 8
    block = tile_n * (BN // 16) + pair // 8
    inside = block < blocks
    first = part * part_chunks
    at = weight + (first.to(tl.int64) * blocks + tl.where(inside, block, 0)) * STRIDE
    j = tl.arange(0, WORDS)
    word_thread = j // SIXTEENS % 4
    word_place = j // (4 * SIXTEENS) * 4 + j % SIXTEENS  # 16 k
    shift = tl.arange(0, 4) // 2 * 8 + tl.arange(0, 4) % 2 * 16
    i = tl.arange(0, GROUP)
    k_place = i // (16 * SIXTEENS) * 4 + i // 4 % SIXTEENS
    k = k_place * 16 + i // (4 * SIXTEENS) % 4 * 2 + i // 2 % 2 * 8 + i % 2
    x_at = x + m[None, :] * x_m + first * 128 + k[:, None]
    above = tl.zeros((BN // 2, BM), tl.float32)
    below = tl.zeros((BN // 2, BM), tl.float32)
    # The sum of x over a group, for every row of the tile alike: a product with ones, which costs nothing here.
    ones = tl.full((BN // 2, GROUP), 1.0, tl.float32).to(x.dtype.element_ty)
    for _ in range(first, min(K // 128, first + part_chunks)):
        for g in tl.static_range(GROUPS):
            place = g * (GROUP // 16) + word_place
            word = place // 4 * 128 + (pair % 8 * 16)[:, None] + (word_thread * 4 + place % 4)[None, :]
            words = tl.load(at[:, None] + word, inside[:, None], 0)
            both_above = tl.load(at + 256 + g * 16 + pair % 8 * 2, inside, 0)
            both_below = tl.load(at + 256 + g * 16 + pair % 8 * 2 + 1, inside, 0)
            k_x = tl.load(x_at + g * GROUP, m[None, :] < M, 0.0)
            nibbles = (words[:, :, None] >> shift[None, None, :]).reshape(BN // 2, GROUP)
            fresh = tl.zeros((BN // 2, BM), tl.float32)
            dot_above = dot(_as_float(nibbles & 15, OFFSET, x.dtype.element_ty), k_x, fresh)
            dot_below = dot(_as_float((nibbles >> 4) & 15, OFFSET, x.dtype.element_ty), k_x, fresh)
            total = dot(ones, k_x, fresh)
            # bfloat16 is the upper half of float32.
            scale_above = (both_above << 16).to(tl.float32, bitcast=True)
            scale_below = (both_below << 16).to(tl.float32, bitcast=True)
            zero_above = (both_above & -65536).to(tl.float32, bitcast=True) - OFFSET * scale_above
            zero_below = (both_below & -65536).to(tl.float32, bitcast=True) - OFFSET * scale_below
            above += dot_above * scale_above[:, None] + total * zero_above[:, None]
            below += dot_below * scale_below[:, None] + total * zero_below[:, None]
        at += blocks * STRIDE
        x_at += 128
    acc = tl.join(above, below)
    rows = m[None, :, None]
    columns = (block * 16 + pair % 8)[:, None, None] + 8 * tl.arange(0, 2)[None, None, :]
    done = True
    if SPLIT > 1:
        tile = tile_m * tl.num_programs(0) + tile_n
        done, acc = add_parts(acc, parts, counters, tile, part, rows, columns, M, N, SPLIT)
    if done:
        if bias is not None:
            acc += tl.load(bias + columns, columns < N, 0.0).to(tl.float32)
        tl.store(out + rows * out_m + columns, acc.to(out.dtype.element_ty), (rows < M) & (columns < N))


@kernel
def _value(code, scale, zero):  # type: ignore[no-untyped-def]
    """Compute ``code * scale + zero`` in float32, such that rounding it to 16 bits rounds the exact sum once.

    The product is exact: it has 12 bits. A zero too small for the sum would be lost, and with it the side of a half
    on which the sum lies. Any other small number of its sign gives the same rounding.
    """
    product = code.to(tl.float32) * scale
    least = tl.abs(product) * 9.5367431640625e-07  # 2^-20
    small = (tl.abs(zero) < least) & (zero != 0.0)
    return product + tl.where(small, tl.where(zero < 0.0, -least, least), zero)


@kernel
def _rebuild(weight, out, N, K, GROUP: tl.constexpr, BN: tl.constexpr, APART: tl.constexpr):  # type: ignore[no-untyped-def]
    """Dequantize BN rows of W and 128 k, two adjacent numbers in a word of ``out``. ``APART``: blocks of 16 rows that
    alternate become the upper and the lower half of ``out``.

    k comes first in every tile, so that the threads of a warp go along k: 32 of them share one line of memory.
    """
    STRIDE: tl.constexpr = 256 + 16 * (128 // GROUP)
    chunk = tl.program_id(0)
    blocks = (N + 15) // 16
    pair = tl.arange(0, BN // 2)  # rows n and n + 8
    block = tl.program_id(1) * (BN // 16) + pair // 8
    inside = (block < blocks)[None, :]
    two = tl.arange(0, 64)[:, None]
    place = two // 8  # 16 k
    at = weight + ((chunk.to(tl.int64) * blocks + tl.where(block < blocks, block, 0)) * STRIDE + pair % 8 * 16)[None, :]
    words = tl.load(at + (place // 4 * 128 + two % 4 * 4 + place % 4), inside, 0)
    words = words >> (two // 4 % 2 * 8)
    group_at = at + (256 + place // (GROUP // 16) * 16) - (pair % 8 * 14)[None, :]
    for below in tl.static_range(2):
        both = tl.load(group_at + below, inside, 0)
        scale = (both << 16).to(tl.float32, bitcast=True)
        zero = (both & -65536).to(tl.float32, bitcast=True)
        even = _value((words >> (4 * below)) & 15, scale, zero)
        odd = _value((words >> (4 * below + 16)) & 15, scale, zero)
        low = even.to(out.dtype.element_ty).to(tl.int16, bitcast=True).to(tl.int32) & 65535
        high = odd.to(out.dtype.element_ty).to(tl.int16, bitcast=True).to(tl.int32) << 16
        first = block // 2 * 16 + block % 2 * (N // 2) if APART else block * 16
        row = (first + pair % 8 + 8 * below)[None, :]
        to = out.to(tl.pointer_type(tl.int32)) + row.to(tl.int64) * (K // 2) + chunk * 64 + two
        tl.store(to, low | high, inside & (row < N))


def triton_rule(size: tuple[int, int, int]) -> Mapping[str, Any]:
    """Choose the knobs of the Triton kernel for m, n, k. Measured on an H200; elsewhere an estimate from the same
    numbers."""
    m, n, _ = size
    count = multiprocessors(torch.device("cuda")) if torch.cuda.is_available() else 132
    tiles = -(-n // 64) * -(-m // rows_of_a_tile(m))
    split = 1 << max(0, min(3, ((8 if m <= 16 else 4) * count // tiles).bit_length() - 1))
    warps = 4 if m <= 16 or target_of().hopper else 8  # without spills
    return {"bn": 64, "split": split, "warps": warps, "stages": 3 if split > 2 else 4}


def rows_of_a_tile(m: int) -> int:
    """Return the rows of X in a tile of the Triton kernel."""
    return max(16, min(64, next_power_of_2(m)))


def tiling_of(m: int, n: int, k: int, device: torch.device, config: Mapping[str, Any] | None = None) -> TritonTiling:
    """Choose the tiling of the Triton kernel (``bk`` columns at a time): by ``config``, else tuned, else by rule."""
    if INTERPRETED:
        return TritonTiling(16, 32, CHUNK, 2, warps=1, stages=1)
    knobs = config or choose("int4_matmul", (m, n, k), device, triton_rule)
    return TritonTiling(
        rows_of_a_tile(m), knobs["bn"], CHUNK, min(knobs["split"], k // CHUNK), warps=knobs["warps"],
        stages=knobs["stages"], dependent_launch=target_of(device).dependent_launch,
    )  # fmt: skip


def _fitting(x: Tensor, weight: Tensor, n: int) -> None:
    """Raise ValueError where the shapes are not those of a product."""
    if x.dim() != 2 or not is_arranged(weight, n, x.shape[1]):
        raise ValueError(
            f"int4_matmul: x {list(x.shape)} and weight {weight.dtype} {list(weight.shape)} of {n} rows do not fit; x "
            "must be [M, K] and the weight what arrange(codes, scale, zero) of int4_packing.py gives for [n, K]"
        )


def launcher() -> Callable[..., Tensor]:
    """Return a new call of the Triton kernel with counters of its own (see ``few_rows/triton.Counters``)."""
    counters = Counters()

    def call(
        x: Tensor, weight: Tensor, n: int, bias: Tensor | None = None, *, config: Mapping[str, Any] | None = None
    ) -> Tensor:
        """Compute ``reference`` on the GPU. ``config``: one of ``TRITON_CHOICES`` instead of the tuned one."""
        require("int4_matmul", *(t for t in (x, bias) if t is not None))
        _fitting(x, weight, n)
        m, k = x.shape
        x = x if x.stride(1) == 1 else x.contiguous()
        weight = weight.contiguous()
        out = x.new_empty((m, n))
        if out.numel() == 0:
            return out
        tiling = tiling_of(m, n, k, x.device, config)
        grid = (triton.cdiv(n, tiling.bn), triton.cdiv(m, tiling.bm))
        part_chunks = triton.cdiv(k // CHUNK, tiling.split)
        split = triton.cdiv(k // CHUNK, part_chunks)
        parts = held = None
        if split > 1:
            parts = x.new_empty((split, m, n), dtype=torch.float32)
            held = counters.get(x.device, grid[0] * grid[1])
        _codes[(*grid, split)](
            x, weight, None if bias is None else bias.contiguous(), out, parts, held, m, n, k, x.stride(0), n,
            part_chunks, GROUP=group_of(weight), BM=tiling.bm, BN=tiling.bn, SPLIT=split, OFFSET=OFFSETS[x.dtype],
            DEPENDENT_LAUNCH=tiling.dependent_launch, num_warps=tiling.warps, num_stages=tiling.stages,
            **({"launch_pdl": True} if tiling.dependent_launch else {}),
        )  # fmt: skip
        return out

    return call


by_triton = launcher()


def rebuilt(x: Tensor, weight: Tensor, n: int, bias: Tensor | None = None) -> Tensor:
    """Compute ``reference`` for many rows of bfloat16 or float16, on the GPU. W is dequantized to that type, which
    rounds it, and takes 2 N K bytes during the call."""
    require("int4_matmul", x)
    if x.element_size() != 2:
        raise ValueError(f"int4_matmul: a weight is rebuilt in bfloat16 or float16, not in {x.dtype}; use by_triton")
    _fitting(x, weight, n)
    return F.linear(x, rebuild(weight, n, x.dtype), bias)


def rebuild(weight: Tensor, n: int, dtype: torch.dtype, *, apart: bool = False) -> Tensor:
    """Dequantize a weight from ``arrange`` to bfloat16 or float16 ``[n, K]`` on the GPU, each number rounded once.
    ``apart``: gate and up, whose sixteens of rows alternate, become the upper and the lower half."""
    wide = weight.new_empty((n, weight.shape[0] * CHUNK), dtype=dtype)
    if wide.numel():
        grid = (weight.shape[0], triton.cdiv(n, REBUILT_ROWS))
        _rebuild[grid](
            weight.contiguous(), wide, *wide.shape, GROUP=group_of(weight), BN=REBUILT_ROWS, APART=apart, num_warps=4
        )
    return wide


def kernels() -> Sequence[Kernel]:
    """List the kernels for ahead-of-time compilation."""
    ints = dict.fromkeys(("M", "N", "K", "x_m", "out_m", "part_chunks"), "i32")
    pointers = {"x": "*bf16", "weight": "*i32", "out": "*bf16", "parts": "*fp32", "counters": "*i32"}
    constants = {"bias": None, "GROUP": 128, "BM": 16, "BN": 64, "SPLIT": 4, "OFFSET": 128, "DEPENDENT_LAUNCH": False}
    rebuild = {"weight": "*i32", "out": "*bf16", "N": "i32", "K": "i32"}
    return [
        Kernel("codes", _codes, {**pointers, **ints}, constants, divisible=("N", "K", "x_m", "out_m"), stages=4,
               targets=TRITON_TARGETS),
        Kernel("codes, 64 rows", _codes, {**pointers, **ints}, constants | {"BM": 64, "SPLIT": 1},
               divisible=("N", "K", "x_m", "out_m"), warps=8, stages=4, targets=PLAIN_TARGETS),
        Kernel("rebuild", _rebuild, rebuild, {"GROUP": 128, "BN": REBUILT_ROWS, "APART": False}, divisible=("N", "K"),
               targets=TRITON_TARGETS),
    ]  # fmt: skip
