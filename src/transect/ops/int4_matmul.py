r"""Product of a few to some thousand rows with a weight of 4-bit codes in groups.

    Y = X W^T + b        W[n, k] = scale[n, k // G] * code[n, k] + zero[n, k // G]

For each group g of G neighbouring k the scale leaves the sum, and so does the zero:

    sum over g of  scale[n, g] * (sum of code * x)  +  zero[n, g] * (sum of x)

The inner product of codes and x runs on the tensor cores. A code c becomes a bfloat16 by an or: the bits 0x4300 are
128 with a step of 1, so 0x4300 | c is 128 + c, and 128 times the sum of x is taken off with the zero. Codes are exact
that way; no weight is ever rounded, which a kernel that rebuilds W in bfloat16 cannot say. float16 has 0x6400, 1024 +
c. In float32 8 is taken off the code instead: zeros lie near -8 scale, and their share would cancel against the codes'.

Shapes: x ``[M, K]``, codes uint8 ``[N, K / 2]`` (``pack`` of ``int4_packing.py``), scale and zero ``[N, K / G]`` of one
floating dtype (fastest as transposed views of ``[K / G, N]``), bias ``[N]``, result ``[M, N]``. G is 32, 64 or 128 and
K a multiple of 2 G. Inference only.

Bound by bytes for few rows: (1/2 + 4 / G) bytes a weight, 0.53 at G = 128 with 16-bit scales, against 2 in bfloat16.
Four ways, chosen by ``way`` from what was measured on an H200 (fractions of the byte floor, in a chain of launches):

* ``int4_matmul.cu`` (``int4_rows.py``), up to 16 rows: N 28672, K 4096 at 75, 68 and 51% for 1, 8 and 16 rows, N 4096,
  K 14336 at 63, 52 and 33%, N 4096, K 4096 at 40, 33 and 24%. All of X lies in shared memory, which at 16 rows leaves
  a short ring for W; below some 30 MB the 3 to 4 us that begin and end a launch are what is left.
* ``int4_matmul_hopper.cu`` (``int4_hopper.py``), 17 to 64 rows, and heads: X is streamed beside W. Its first version
  had N 128256, K 4096 at 91, 92 and 86% for 1, 8 and 16 rows (the other kernel: 91, 84, 62%), and N 28672 at 44 and 33%
  for 32 and 64 rows, 1.6 and 1.8 times as fast as the Triton kernel: there instructions and products bound it.
* the Triton kernel below, 17 to 64 rows of narrow weights, other dtypes and GPUs.
* from 65 rows on W is rebuilt and multiplied by cuBLAS: 75 + 68 us at 128 rows of 28672 x 4096, the Triton kernel 175.

Source: the formats of GPTQ (Frantar et al. 2022, arXiv:2210.17323) and AWQ (Lin et al. 2023, arXiv:2306.00978), with
the or-trick of Kim et al. 2022, arXiv:2211.10017; split sums as in ``small_matmul.py``.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from . import cuda, shapes
from .int4_dequantize import triton_dequantize
from .int4_hopper import CHOICES, HOPPER_ROWS, HopperCodes, hopper_refuses
from .int4_hopper import rule as hopper_rule
from .int4_packing import GROUPS, pack, repack, unpack
from .int4_rows import CUDA_ROWS, CudaCodes, cuda_refuses
from .jit import INTERPRETED, TRITON_TARGETS, available, kernel, multiprocessors, next_power_of_2, require, tl, triton
from .numerics import compute_dtype, sample
from .registry import Case, Cost, Implementation, Kernel, Knobs, Op, Unavailable, register
from .small_matmul import Counters, Cut, add_parts
from .tiles import INTERPRETS, after_previous, dot
from .tuning import choose

log = logging.getLogger(__name__)
OFFSETS = {torch.bfloat16: 128, torch.float16: 1024, torch.float32: -8}
"""What comes on top of a code before the product."""
DENSE_ROWS = 65
"""From so many rows on it is quicker to rebuild W and multiply by it."""
TRITON_CHOICES = {"bn": (32, 64, 128), "split": (1, 2, 4, 8), "warps": (2, 4, 8), "stages": (2, 3, 4)}


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
    if INTERPRETS or OFFSET < 0:
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


def triton_rule(size: tuple[int, int, int]) -> Mapping[str, Any]:
    """Knobs of the Triton kernel for m, n, k. Measured on an H200; elsewhere a guess from the same numbers."""
    m, n, _ = size
    count = multiprocessors(torch.device("cuda")) if torch.cuda.is_available() else 132
    tiles = -(-n // 64) * -(-m // rows_of_a_tile(m))
    split = 1 << max(0, min(3, ((8 if m <= 16 else 4) * count // tiles).bit_length() - 1))
    return {"bn": 64, "split": split, "warps": 4, "stages": 3 if split > 2 else 4}


def rows_of_a_tile(m: int) -> int:
    """Of X, in the Triton kernel."""
    return max(16, min(64, next_power_of_2(m)))


def cut_of(m: int, n: int, k: int, group: int, device: torch.device, config: Mapping[str, Any] | None = None) -> Cut:
    """How the Triton kernel cuts a product up (``bk`` is a pair of groups): by ``config``, else tuned, else by rule."""
    if INTERPRETED:
        return Cut(16, 16, 2 * group, 2, warps=1, stages=1)
    knobs = config or choose("int4_matmul", (m, n, k), device, triton_rule)
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return Cut(
        rows_of_a_tile(m), knobs["bn"], 2 * group, min(knobs["split"], k // (2 * group)), warps=knobs["warps"],
        stages=knobs["stages"], early=hopper,
    )  # fmt: skip


def launcher() -> Callable[..., Tensor]:
    """A new call of the Triton kernel with counters of its own (see ``small_matmul.Counters``)."""
    counters = Counters()

    def call(
        x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None = None, *,
        config: Mapping[str, Any] | None = None,
    ) -> Tensor:  # fmt: skip
        """As ``reference``, on the GPU. ``config``: of ``TRITON_CHOICES``, instead of the tuned one."""
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
        cut = cut_of(m, n, k, group, x.device, config)
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


by_triton = launcher()


def rebuilt(x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None = None) -> Tensor:
    """As ``reference`` for many rows, on the GPU: W is rebuilt in x's dtype, which rounds it, and takes 2 N K bytes for
    the time of the call."""
    return F.linear(x, triton_dequantize(codes, scale.to(x.dtype), zero.to(x.dtype)), bias)


def way(m: int, n: int) -> str:
    """What was quickest on an H200 for ``m`` rows of bfloat16 and a weight of ``n`` rows: ``rows``
    (``int4_matmul.cu``), ``hopper`` (``int4_matmul_hopper.cu``), ``triton`` or ``rebuilt``."""
    if m >= DENSE_ROWS:
        return "rebuilt"
    if n >= 65536 or (m > CUDA_ROWS and n >= 16384):
        return "hopper"
    return "rows" if m <= CUDA_ROWS else "triton"


def best_launcher() -> Callable[..., Tensor]:
    """A new ``int4_matmul(x, codes, scale, zero, bias=None, *, pdl=False)``: on a Hopper GPU whatever ``way`` says, if
    it takes the arguments; else ``rebuilt`` for many rows of a half type, and the Triton kernel.

    Which one runs is decided by the shape, the strides and the dtype alone. The CUDA kernels read W in orders of their
    own, each made at its first call and kept as long as the codes live: a weight that meets both up to 16 and 17 to 64
    rows is held three times. Where they cannot be built, that is said once, in the log.
    """
    by_tiles = launcher()
    built: dict[torch.device, dict[str, Callable[..., Tensor]]] = {}

    def build(device: torch.device) -> dict[str, Callable[..., Tensor]]:
        if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] != 9:
            return {}
        try:
            return {"rows": CudaCodes(), "hopper": HopperCodes()}
        except Unavailable as error:
            log.warning("int4_matmul runs its Triton kernel, which is slower: %s", error)
            return {}

    def call(
        x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, bias: Tensor | None = None, *, pdl: bool = False
    ) -> Tensor:
        """As ``reference``, on the GPU; ``pdl`` as in ``CudaRows``."""
        chosen = way(x.shape[0], codes.shape[0])
        if chosen == "rebuilt" and x.element_size() == 2:
            return rebuilt(x, codes, scale, zero, bias)
        if x.device not in built:
            built[x.device] = build(x.device)
        kernel = built[x.device].get(chosen)
        if kernel is not None and not cuda_refuses(x, codes, scale, zero, bias):
            return kernel(x, codes, scale, zero, bias, pdl=pdl)
        return by_tiles(x, codes, scale, zero, bias)

    return call


int4_matmul = best_launcher()


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


def _size(inputs: Mapping[str, Any]) -> tuple[int, int, int]:
    x = inputs["x"]
    return x.shape[0], inputs["codes"].shape[0], x.shape[1]


@cache
def _hopper() -> HopperCodes:
    return HopperCodes()


def _repack_case(inputs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The arguments of ``HopperCodes.packed`` for a case's."""
    weight = repack(inputs["codes"], inputs["scale"], inputs["zero"])
    return {"x": inputs["x"], "weight": weight, "n": inputs["codes"].shape[0]}


def _launch_hopper(x: Tensor, weight: Tensor, n: int, *, config: Mapping[str, Any]) -> Tensor:
    return _hopper().packed(x, weight, n, pdl=True, config=config)


register(
    Op(
        name="int4_matmul",
        reference=reference,
        cost=cost,
        implementations={
            "triton": Implementation("triton", available(by_triton), TRITON_TARGETS),
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
            "hopper": Implementation(
                "cuda",
                lambda: HopperCodes(),
                ("sm_90",),
                dtypes=("bfloat16",),
                refuses=hopper_refuses,
                source="int4_matmul_hopper.cu",
            ),
            "hopper_pdl": Implementation(
                "cuda",
                lambda: partial(HopperCodes(), pdl=True),
                ("sm_90",),
                dtypes=("bfloat16",),
                refuses=hopper_refuses,
                source="int4_matmul_hopper.cu",
            ),
        },
        examples=_examples,
        peers={"torch": _peer},
        cases=_cases,
        kernels=_kernels,
        knobs=[
            Knobs("int4_matmul", TRITON_CHOICES, triton_rule, by_triton, dict, _size),
            Knobs(
                "int4_matmul_hopper.cu",
                CHOICES,
                hopper_rule,
                _launch_hopper,
                _repack_case,
                _size,
                applies=lambda inputs: inputs["x"].shape[0] <= HOPPER_ROWS and not hopper_refuses(**inputs),
            ),
        ],
    )
)
