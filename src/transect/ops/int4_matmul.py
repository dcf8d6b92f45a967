r"""Product of 1 to 256 rows with a weight of 4-bit codes in groups, unpacked in registers.

    Y = X W^T + b        W[n, k] = scale[n, k // G] * code[n, k] + zero[n, k // G]

For each group g of G neighbouring k the scale leaves the sum, and so does the zero:

    sum over g of  scale[n, g] * (sum of code * x)  +  zero[n, g] * (sum of x)

The inner product of codes and x runs on the tensor cores. A code c becomes a bfloat16 by an or: the bits 0x4300 are
128 with a step of 1, so 0x4300 | c is 128 + c, and 128 times the sum of x is taken off with the zero. Codes are exact
that way; no weight is ever rounded, which a kernel that rebuilds W in bfloat16 cannot say. float16 has 0x6400, 1024 +
c.

Packing: pairs of groups share bytes, so that unpacking moves nothing between threads. Byte j of pair p of a row holds
code 2 p G + j in its low half and code (2 p + 1) G + j in its high half (``pack``).

Shapes: x ``[M, K]``, codes uint8 ``[N, K / 2]``, scale and zero ``[N,
K / G]`` of one floating dtype (fastest as transposed views of ``[K / G, N]``), bias ``[N]``, result ``[M, N]``. G is
32, 64 or 128 and K a multiple of 2 G. Inference only.

Bound by bytes for few rows: (1/2 + 4 / G) bytes a weight, 0.53 at G = 128 with 16-bit scales, against 2 in bfloat16.
Source: the formats of GPTQ (Frantar et al. 2022, arXiv:2210.17323) and AWQ (Lin et al. 2023, arXiv:2306.00978), with
the or-trick of Kim et al. 2022, arXiv:2211.10017; split sums as in ``small_matmul.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .jit import INTERPRETED, TRITON_TARGETS, available, kernel, multiprocessors, next_power_of_2, require, tl, triton
from .numerics import compute_dtype, sample
from .registry import Cost, Implementation, Kernel, Op, register
from .small_matmul import Counters, Cut, add_parts
from .tiles import INTERPRETS, after_previous, dot

GROUPS = (32, 64, 128)
OFFSETS = {torch.bfloat16: 128, torch.float16: 1024, torch.float32: 0}
"""What the or-trick adds to a code; float32 does without it."""


def pack(codes: Tensor, group: int) -> Tensor:
    """uint8 codes ``[N, K]`` in 0..15 -> ``[N, K / 2]``.

    Raises:
        ValueError: the group is not 32, 64 or 128, or K is not a multiple of two groups.
    """
    n, k = codes.shape
    if group not in GROUPS or k % (2 * group):
        raise ValueError(
            f"int4 groups: the group must be one of {GROUPS} and K a multiple of twice it; got {group}, {k}"
        )
    pairs = codes.view(n, k // (2 * group), 2, group)
    return (pairs[:, :, 0] | (pairs[:, :, 1] << 4)).reshape(n, k // 2)


def unpack(packed: Tensor, group: int) -> Tensor:
    """The inverse of ``pack``."""
    n, half = packed.shape
    pairs = packed.view(n, half // group, 1, group)
    return torch.cat((pairs & 15, pairs >> 4), dim=2).reshape(n, 2 * half)


def reference(x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None = None) -> Tensor:
    """x ``[M, K]``, codes ``[N, K / 2]``, scale and zero ``[N, K / G]``, bias ``[N]`` -> ``[M, N]`` in x's dtype."""
    group = x.shape[1] // scale.shape[1]
    dtype = compute_dtype(x.dtype)
    wide = (t.to(dtype).repeat_interleave(group, dim=1) for t in (scale, zero))
    weight = next(wide) * unpack(codes, group).to(dtype) + next(wide)
    y = x.to(dtype) @ weight.T
    return (y if bias is None else y + bias.to(dtype)).to(x.dtype)


@kernel
def _as_float(nibbles, OFFSET: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """0..15 as OFFSET + nibble: the bits of OFFSET with the nibble in their lowest places."""
    if INTERPRETS or OFFSET == 0:
        number = nibbles.to(tl.float32) + OFFSET
    else:
        BITS: tl.constexpr = 0x4300 if OFFSET == 128 else 0x6400
        number = (nibbles.to(tl.int16) | BITS).to(dtype, bitcast=True)
    return number


@kernel
def _codes(  # type: ignore[no-untyped-def]
    x, codes, scale, zero, bias, out, parts, counters, M, N, K, x_m, out_m, s_n, s_g, part_pairs,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, OFFSET: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """One tile of Y, or a part of it; one pair of groups per step. Axes as in ``small_matmul``; W is the left operand.

    Scales and zeros of the next step are loaded a step ahead: nothing else would hide the time they take.
    """
    after_previous(EARLY)
    tile_n = tl.program_id(0)
    tile_m = tl.program_id(1)
    part = tl.program_id(2)
    m = tile_m * BM + tl.arange(0, BM)
    n = tile_n * BN + tl.arange(0, BN)
    safe_n = tl.where(n < N, n, 0).to(tl.int64)
    j = tl.arange(0, GROUP)
    pairs = K // (2 * GROUP)
    first = part * part_pairs
    last = min(pairs, first + part_pairs)
    codes_at = codes + safe_n[:, None] * (K // 2) + first * GROUP + j[None, :]
    # Transposed: [GROUP, BM].
    x_at = x + m[None, :] * x_m + first * 2 * GROUP + j[:, None]
    scale_at = scale + safe_n * s_n + 2 * first * s_g
    zero_at = zero + safe_n * s_n + 2 * first * s_g
    acc = tl.zeros((BN, BM), tl.float32)
    # The sum of x over a group, for every row of the tile alike: a product with ones, which costs nothing here.
    ones = tl.full((BN, GROUP), 1.0, tl.float32).to(x.dtype.element_ty)
    next_low_scale = tl.load(scale_at)
    next_high_scale = tl.load(scale_at + s_g)
    next_low_zero = tl.load(zero_at)
    next_high_zero = tl.load(zero_at + s_g)
    for pair in range(first, last):
        packed = tl.load(codes_at)
        low_x = tl.load(x_at, m[None, :] < M, 0.0)
        high_x = tl.load(x_at + GROUP, m[None, :] < M, 0.0)
        low_scale = next_low_scale.to(tl.float32)
        high_scale = next_high_scale.to(tl.float32)
        low_zero = next_low_zero.to(tl.float32) - OFFSET * low_scale
        high_zero = next_high_zero.to(tl.float32) - OFFSET * high_scale
        scale_at += 2 * s_g
        zero_at += 2 * s_g
        more = (n < N) & (pair + 1 < last)
        next_low_scale = tl.load(scale_at, more, 0.0)
        next_high_scale = tl.load(scale_at + s_g, more, 0.0)
        next_low_zero = tl.load(zero_at, more, 0.0)
        next_high_zero = tl.load(zero_at + s_g, more, 0.0)
        fresh = tl.zeros((BN, BM), tl.float32)
        low = dot(_as_float(packed & 15, OFFSET, x.dtype.element_ty), low_x, fresh)
        high = dot(_as_float(packed >> 4, OFFSET, x.dtype.element_ty), high_x, fresh)
        acc += low * low_scale[:, None] + high * high_scale[:, None]
        acc += dot(ones, low_x, fresh) * low_zero[:, None] + dot(ones, high_x, fresh) * high_zero[:, None]
        codes_at += GROUP
        x_at += 2 * GROUP
    rows = m[None, :]
    columns = n[:, None]
    done = True
    if SPLIT > 1:
        tile = tile_m * tl.num_programs(0) + tile_n
        done, acc = add_parts(acc, parts, counters, tile, part, rows, columns, M, N, SPLIT)
    if done:
        if bias is not None:
            acc += tl.load(bias + columns, columns < N, 0.0).to(tl.float32)
        tl.store(out + rows * out_m + columns, acc.to(out.dtype.element_ty), (rows < M) & (columns < N))


def choose(m: int, n: int, k: int, group: int, device: torch.device) -> Cut:
    """The cut for a shape (``bk`` is the pair of groups). Measured on an H200; elsewhere a guess from the same
    numbers."""
    if INTERPRETED:
        return Cut(16, 16, 2 * group, 2, warps=1, stages=1)
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    bm = max(16, min(64, next_power_of_2(m)))
    tiles = -(-n // 64) * -(-m // bm)
    wanted = 8 * multiprocessors(device) if bm <= 16 else 4 * multiprocessors(device)
    split = 1 << max(0, min(3, (wanted // tiles).bit_length() - 1))
    return Cut(bm, 64, 2 * group, min(split, k // (2 * group)), stages=3 if split > 2 else 4, early=hopper)


def launcher() -> Callable[..., Tensor]:
    """A new ``int4_matmul`` with counters of its own (see ``small_matmul.Counters``)."""
    counters = Counters()

    def call(
        x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None = None, *, cut: Cut | None = None
    ) -> Tensor:
        """As ``reference``, on the GPU."""
        require("int4_matmul", *(t for t in (x, scale, zero, bias) if t is not None))
        m, k = x.shape
        n = codes.shape[0]
        group = k // max(1, scale.shape[1])
        if group not in GROUPS or k % (2 * group) or codes.shape[1] * 2 != k or scale.shape != zero.shape:
            raise ValueError(
                f"int4_matmul: x {list(x.shape)}, codes {list(codes.shape)} and scale {list(scale.shape)} do not fit; "
                f"codes must be [N, K / 2], scale and zero [N, K / G] with G in {GROUPS} and K a multiple of 2 G"
            )
        x = x if x.stride(1) == 1 else x.contiguous()
        codes = codes.contiguous()
        if scale.stride() != zero.stride():
            zero = torch.empty_like(scale).copy_(zero)
        out = x.new_empty((m, n))
        if out.numel() == 0:
            return out
        cut = cut or choose(m, n, k, group, x.device)
        pairs = k // (2 * group)
        grid = (triton.cdiv(n, cut.bn), triton.cdiv(m, cut.bm))
        part_pairs = triton.cdiv(pairs, cut.split)
        split = triton.cdiv(pairs, part_pairs)
        parts = held = None
        if split > 1:
            parts = x.new_empty((split, m, n), dtype=torch.float32)
            held = counters.get(x.device, grid[0] * grid[1])
        _codes[(*grid, split)](
            x, codes, scale, zero, None if bias is None else bias.contiguous(), out, parts, held, m, n, k, x.stride(0),
            n, *scale.stride(), part_pairs, GROUP=group, BM=cut.bm, BN=cut.bn, SPLIT=split,
            OFFSET=OFFSETS[x.dtype], EARLY=cut.early, num_warps=cut.warps, num_stages=cut.stages,
            **({"launch_pdl": True} if cut.early else {}),
        )  # fmt: skip
        return out

    return call


int4_matmul = launcher()


# ----------------------------------------------------------------------------------------------------- registry entry


def cost(x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None = None) -> Cost:
    """A product and a sum for each weight and row; codes, scales and zeros are read once."""
    tokens, outputs = x.shape[0], codes.shape[0]
    read = sum(t.nbytes for t in (x, codes, scale, zero, bias) if t is not None)
    return Cost(4 * tokens * codes.numel(), read, tokens * outputs * x.element_size())


def _peer(x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None = None) -> Tensor:
    """Weights rebuilt in x's dtype, then cuBLAS: what torch can do with these codes."""
    group = x.shape[1] // scale.shape[1]
    n = codes.shape[0]
    code = unpack(codes, group).reshape(n, -1, group).to(x.dtype)
    weight = torch.addcmul(zero[..., None].to(x.dtype), scale[..., None].to(x.dtype), code).reshape(n, -1)
    return F.linear(x, weight, bias)


def _examples() -> Sequence[dict[str, Any]]:
    def inputs(m: int, n: int, k: int, group: int, bias: bool) -> dict[str, Any]:
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
        scale = (sample(n, k // group, seed=1).abs() + 0.1) / math.sqrt(20 * k)
        made = {"x": sample(m, k), "codes": pack(codes, group), "scale": scale, "zero": -7.5 * scale}
        return made | {"bias": sample(n, seed=2) if bias else None}

    return [inputs(1, 33, 128, 32, True), inputs(5, 16, 384, 64, False), inputs(17, 20, 256, 128, False)]


def _kernels() -> Sequence[Kernel]:
    ints = dict.fromkeys(("M", "N", "K", "x_m", "out_m", "s_g", "part_pairs"), "i32")
    pointers = {"x": "*bf16", "codes": "*u8", "scale": "*bf16", "zero": "*bf16", "out": "*bf16", "parts": "*fp32"}
    return [
        Kernel(
            name="codes",
            function=_codes,
            arguments={**pointers, "counters": "*i32", **ints},
            constants={
                "bias": None,
                "GROUP": 128,
                "BM": 16,
                "BN": 64,
                "SPLIT": 4,
                "OFFSET": 128,
                "EARLY": False,
                "s_n": 1,
            },
            divisible=("N", "K", "x_m", "out_m", "s_g"),
            stages=4,
            targets=TRITON_TARGETS,
        )
    ]


register(
    Op(
        name="int4_matmul",
        reference=reference,
        cost=cost,
        implementations={"triton": Implementation("triton", available(int4_matmul), TRITON_TARGETS)},
        examples=_examples,
        peers={"torch": _peer},
        kernels=_kernels,
        error_ratio=4.0,
        error_note="in float32 the zero's share cancels against the codes' in the sum",
    )
)
