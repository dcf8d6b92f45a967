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
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cuda, shapes
from .int4_packing import GROUPS, pack, unpack
from .jit import INTERPRETED, TRITON_TARGETS, available, kernel, multiprocessors, next_power_of_2, require, tl, triton
from .numerics import compute_dtype, sample
from .registry import Case, Cost, Implementation, Kernel, Op, register
from .small_matmul import SHARED, Counters, Cut, add_parts, bind
from .tiles import INTERPRETS, after_previous, dot

OFFSETS = {torch.bfloat16: 128, torch.float16: 1024, torch.float32: 0}
"""What the or-trick adds to a code; float32 does without it."""


def repack(codes: Tensor, scale: Tensor, zero: Tensor) -> tuple[Tensor, Tensor]:
    """The order that ``int4_matmul.cu`` reads: done once, when a weight is loaded.

    Args:
        codes: uint8 ``[N, K / 2]`` from ``pack``.
        scale, zero: ``[N, K / G]``; rounded to bfloat16.

    Returns:
        codes int32 ``[B, K / 128, 4, 32, 2]`` for B = N / 16 blocks of rows (the last filled up with zeros): of each
        32 k, for every lane l of a warp, two words, one for each 16 k. A word holds rows l / 4 and l / 4 + 8, k = 2 (l
        % 4) and the next, and both 8 further: what the lane feeds to one product, in the order in which shifts by four
        bits bring it out. And scale and zero bfloat16 ``[B, K / 128, 128 / G, 8, 2, 2]``: rows r and r + 8, scale and
        zero.

    Raises:
        ValueError: K is not a multiple of 128.
    """
    n, half = codes.shape
    k, groups = 2 * half, scale.shape[1]
    if k % 128:
        raise ValueError(f"int4_matmul.cu: K must be a multiple of 128, not {k}")
    group, blocks = k // groups, -(-n // 16)
    whole = F.pad(unpack(codes, group).to(torch.int32), (0, 0, 0, blocks * 16 - n))
    #             block, row / 8, row % 8, chunk, 32 k, 16 k, 8 k, thread, pair
    parts = whole.view(blocks, 2, 8, k // 128, 4, 2, 2, 4, 2)
    words = torch.zeros((blocks, 8, k // 128, 4, 2, 4), dtype=torch.int32, device=codes.device)
    for below, right, odd in product(range(2), repeat=3):
        words |= parts[:, below, :, :, :, :, right, :, odd] << (4 * (below + 2 * right) + 16 * odd)
    words = words.permute(0, 2, 3, 1, 5, 4).reshape(blocks, k // 128, 4, 32, 2).contiguous()
    both = F.pad(torch.stack((scale, zero), -1).to(torch.bfloat16), (0, 0, 0, 0, 0, blocks * 16 - n))
    both = both.view(blocks, 2, 8, k // 128, 128 // group, 2).permute(0, 3, 4, 2, 1, 5).contiguous()
    return words, both


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


# --------------------------------------------------------------------------------------------------------- CUDA C++


@dataclass(frozen=True, slots=True)
class Plan:
    """How ``int4_matmul.cu`` cuts a product up; the fields are the arguments of its launcher."""

    rows: int
    """Of X at a time."""
    columns: int
    """Rows of W in a group, in sixteens."""
    stages: int
    warps: int
    per: int
    """Sixteens of rows of W for a block."""
    ranks: int
    """Blocks of a cluster that share K."""


CUDA_ROWS = 16
"""Up to so many rows of X ``int4_matmul.cu`` is the quicker one; it takes more, sixteen at a time."""
KERNELS = {8: ((4, 3), (4, 2), (2, 3), (2, 2), (1, 3)), 16: ((2, 3), (2, 2), (1, 3))}
"""(columns, stages) that are compiled for each number of rows."""


def shared_bytes(plan: Plan, m: int, k: int, group: int) -> int:
    """Shared memory of a block."""
    held = min(m, plan.rows)
    steps = -(-(k // 128) // (plan.warps * plan.ranks))
    ring = plan.warps * plan.stages * plan.columns * (1024 + 128 // group * 64)
    sums = plan.warps * plan.rows * (plan.columns * 16 + 4) * (1 + (plan.per > plan.columns))
    part = held * (plan.per + plan.columns) * 16 if plan.ranks > 1 else 0
    return (
        ring
        + 4 * (sums + part + plan.warps * steps * (128 // group) * plan.rows)
        + (plan.warps * held * (steps * 256 + 16))
    )


def plan_codes(m: int, n: int, k: int, group: int, clusters: Mapping[int, int]) -> Plan:
    """A plan by a rule from times on an H200 (no search). ``clusters``: how many of each size run at once.

    A block keeps its part of X in shared memory, so a long K is shared by a cluster. Many warps hide the time between
    unpacking and multiplying; wide groups end less often, which pays where a block has many rows.

    Raises:
        ValueError: X does not fit the shared memory of eight blocks.
    """
    rows, sixteens = 8 if m <= 8 else 16, -(-n // 16)
    for ranks in (1, 2, 4, 8):
        per = -(-sixteens // max(1, clusters[ranks]))
        if rows == 16 and ranks == 1 and per <= 3:
            continue
        wide = [(4, 3, 8), (2, 3, 16), (4, 2, 8)] if per >= 28 else [(2, 2, 16), (4, 2, 8)]
        order = (wide if rows == 8 else [(2, 2, 16), (2, 3, 8), (2, 2, 8)]) + [(2, 2, 8), (1, 3, 8), (1, 3, 4)]
        for columns, stages, warps in order:
            plan = Plan(rows, columns, stages, warps, per, ranks)
            if columns <= per and shared_bytes(plan, m, k, group) <= SHARED:
                return plan
    raise ValueError(f"int4_matmul.cu: {m} rows of {k} do not fit in shared memory; use the Triton kernel")


class CudaCodes:
    """``int4_matmul`` by ``int4_matmul.cu``: ``packed`` for weights in its own order, or called as ``reference``.

    Raises:
        Unavailable: no NVIDIA GPU, or no nvcc to build the kernels with.
    """

    def __init__(self) -> None:
        self._launch = bind("int4_matmul", "transect_int4_matmul", "pppppiiiiliiiiiiip")
        at_once = bind("int4_matmul", "transect_int4_clusters", "i")
        hopper = torch.cuda.get_device_capability()[0] >= 9
        count = multiprocessors(torch.device("cuda", torch.cuda.current_device()))
        self._clusters = {1: count} | {size: at_once(size) if hopper else 0 for size in (2, 4, 8)}
        self._dependent = hopper
        self._plans: dict[tuple[int, int, int, int], Plan] = {}
        self._repacked: dict[int, tuple[weakref.ref[Tensor], int, tuple[Tensor, Tensor]]] = {}

    def packed(
        self, x: Tensor, words: Tensor, scales: Tensor, n: int, bias: Tensor | None = None, *, pdl: bool = False,
        plan: Plan | None = None,
    ) -> Tensor:  # fmt: skip
        """x bfloat16 ``[M, K]``, words and scales from ``repack`` of a weight of ``n`` rows -> ``[M, n]``.

        ``pdl``: as in ``small_matmul.CudaRows``.

        Raises:
            RuntimeError: the launch failed.
        """
        m, k = x.shape
        group = 128 // scales.shape[2]
        out = x.new_empty((m, n))
        if m == 0 or n == 0:
            return out
        key = (m, n, k, group)
        cut = plan or self._plans.get(key)
        if cut is None:
            cut = self._plans[key] = plan_codes(m, n, k, group, self._clusters)
        code = self._launch(
            x.data_ptr(), words.data_ptr(), scales.data_ptr(), 0 if bias is None else bias.data_ptr(), out.data_ptr(),
            m, n, k, group, x.stride(0), cut.rows, cut.columns, cut.stages, cut.warps, cut.per, cut.ranks,
            (2 if pdl else 1) if self._dependent else 0, torch.cuda.current_stream(x.device).cuda_stream,
        )  # fmt: skip
        if code:
            raise RuntimeError(f"int4_matmul.cu: the launch of {cut} for {m} x {k} by {n} x {k} returned {code}")
        return out

    def __call__(
        self, x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None = None, *, pdl: bool = False
    ) -> Tensor:
        """As ``reference``. A weight is repacked at its first call; the result is kept as long as ``codes`` lives.

        Raises:
            ValueError: see ``cuda_refuses``.
        """
        reason = cuda_refuses(x, codes, scale, zero, bias)
        if reason:
            raise ValueError(f"int4_matmul.cu: {reason}")
        held = self._repacked.get(id(codes))
        if held is None or held[0]() is not codes or held[1] != codes._version:
            key = id(codes)
            kept = weakref.ref(codes, lambda _: self._repacked.pop(key, None))
            held = self._repacked[id(codes)] = (kept, codes._version, repack(codes, scale, zero))
        return self.packed(x, *held[2], codes.shape[0], bias, pdl=pdl)


def cuda_refuses(x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None = None) -> str:
    """Why ``int4_matmul.cu`` does not take these arguments, or ``""``."""
    if any(t is not None and t.dtype != torch.bfloat16 for t in (x, scale, zero, bias)):
        return "it computes in bfloat16, scales and zeros included"
    if x.shape[1] % 128 or x.shape[1] != 2 * codes.shape[1] or x.shape[1] // scale.shape[1] not in GROUPS:
        return f"K must be a multiple of 128, and a group one of {GROUPS}"
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        return "it reads 16 bytes of x at a time: the rows' stride and the address must be multiples of 16 bytes"
    return ""


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


def _cases() -> Sequence[Case]:
    """Projections of an 8B model and its head, in groups of 128."""

    def make(device: torch.device, seed: int, m: int, n: int, k: int) -> Mapping[str, Any]:
        generator = torch.Generator(device).manual_seed(seed)
        codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device, generator=generator)
        scale = torch.rand(k // 128, n, device=device, generator=generator).add(0.1).mul(k**-0.5 / 4)
        scale = scale.to(torch.bfloat16).T
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16, generator=generator)
        return {"x": x, "codes": codes, "scale": scale, "zero": -7.5 * scale, "bias": None}

    model = shapes.LLAMA_8B
    projections = {
        "qkv": (model.qkv_dim, model.dim),
        "out": (model.dim, model.n_heads * model.head_dim),
        "gate and up": (2 * model.ffn_dim, model.dim),
        "down": (model.dim, model.ffn_dim),
        "head": (model.vocab_size, model.dim),
    }
    return [
        Case(f"{what} of {model.name}: {m} x {k} by {n}, groups of 128", partial(make, m=m, n=n, k=k))
        for what, (n, k) in projections.items()
        for m in (1, 8, 16, 64)
    ]


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
        implementations={
            "triton": Implementation("triton", available(int4_matmul), TRITON_TARGETS),
            "cuda": Implementation(
                "cuda",
                lambda: CudaCodes(),
                cuda.CUDA_TARGETS,
                dtypes=("bfloat16",),
                refuses=cuda_refuses,
                source="int4_matmul.cu",
            ),
            "cuda_pdl": Implementation(
                "cuda",
                lambda: partial(CudaCodes(), pdl=True),
                ("sm_90",),
                dtypes=("bfloat16",),
                refuses=cuda_refuses,
                source="int4_matmul.cu",
            ),
        },
        examples=_examples,
        peers={"torch": _peer},
        cases=_cases,
        kernels=_kernels,
        error_ratio=4.0,
        error_note="in float32 the zero's share cancels against the codes' in the sum",
    )
)
