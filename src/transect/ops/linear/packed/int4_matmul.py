r"""Product of a few to some thousand rows with a weight of 4-bit codes in groups.

    Y = X W^T + b        W[n, k] = scale[n, k // G] * code[n, k] + zero[n, k // G]

For each group g of G neighbouring k the scale leaves the sum, and so does the zero:

    sum over g of  scale[n, g] * (sum of code * x)  +  zero[n, g] * (sum of x)

The inner product of codes and x runs on the tensor cores. A code c becomes a bfloat16 by an or: the bits 0x4300 are
128 with a step of 1, so 0x4300 | c is 128 + c, and 128 times the sum of x is taken off with the zero. Codes are exact
that way; no weight is ever rounded, which a kernel that rebuilds W in bfloat16 cannot say. float16 has 0x6400, 1024 +
c. In float32 8 is taken off the code instead: zeros lie near -8 scale, and their share would cancel against the codes'.

Shapes: x ``[M, K]``, weight int32 ``[K / 128, N / 16, 256 + 2048 / G]`` (``arrange`` of ``int4_packing.py``: codes,
scales and zeros, which are bfloat16), n = N, bias ``[N]``, result ``[M, N]``. G is 32, 64 or 128 and K a multiple of
128. Inference only.

Bound by bytes for few rows: (1/2 + 4 / G) bytes a weight, 0.53 at G = 128 with 16-bit scales, against 2 in bfloat16.
All ways read the same order of the weight, so one copy of it is all that is held. ``way`` chooses, from what was
quicker on an H200 in a chain of launches, as ``benchmarks/ops_int4.py`` times them:

* ``int4_matmul.cu`` (``int4_rows.py``), up to 16 rows, and up to 64 of narrow weights. Below some 30 MB the
  microseconds that begin and end a launch show. There X may be whole numbers of 16 bits, up to 8 rows of it, in units
  of at most 2^-14 of the largest of 128 k (``int4_whole.cuh``): products of bytes are exact, and what X loses is far
  below what the result's bfloat16 rounds off. For 9 to 16 rows codes are multiplied as subnormal numbers, exactly too;
  X must be below 2^64 there, and loses digits below 2^-57. What bounds 16 rows of a deep weight (14336 k) is how long
  a warp takes for 128 k, some 1000 cycles whatever it has to do less: 12 us with and without new weights, where the
  copies alone take 9 to 10 and the bytes 7.4.
* ``int4_matmul_hopper.cu`` (``int4_hopper.py``), heads, and 17 to 64 rows of wide weights, where instructions and
  products bound it.
* from 65 rows of a half type on W is rebuilt and multiplied by cuBLAS.
* the Triton kernel below for other dtypes and GPUs.

Source: the formats of GPTQ (Frantar et al. 2022, arXiv:2210.17323) and AWQ (Lin et al. 2023, arXiv:2306.00978), with
the or-trick of Kim et al. 2022, arXiv:2211.10017; split sums as in ``small_matmul.py``.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ... import shapes
from ...lang.jit import (
    INTERPRETED,
    TRITON_TARGETS,
    available,
    kernel,
    multiprocessors,
    next_power_of_2,
    require,
    tl,
    triton,
)
from ...lang.tiles import INTERPRETS, after_previous, dot
from ...numerics import compute_dtype, sample
from ...registry import Case, Cost, Implementation, Kernel, Knobs, Op, Unavailable, register
from ...tuning import choose
from ..few_rows.triton import Counters, TritonTiling, add_parts
from . import int4_hopper, int4_rows
from .int4_packing import CHUNK, arrange, group_of, is_arranged, pack, taken_apart

log = logging.getLogger(__name__)
OFFSETS = {torch.bfloat16: 128, torch.float16: 1024, torch.float32: -8}
"""What comes on top of a code before the product."""
DENSE_ROWS = 65
"""From so many rows on it is quicker to rebuild W and multiply by it."""
REBUILT_ROWS = 64
"""Of W, in a program that rebuilds it."""
TRITON_CHOICES = {"bn": (32, 64, 128), "split": (1, 2, 4, 8), "warps": (2, 4, 8), "stages": (2, 3, 4)}


def reference(x: Tensor, weight: Tensor, n: int, bias: Tensor | None = None) -> Tensor:
    """x ``[M, K]``, weight from ``arrange`` for ``n`` rows, bias ``[n]`` -> ``[M, n]`` in x's dtype."""
    dtype = compute_dtype(x.dtype)
    y = x.to(dtype) @ dense(weight, n, dtype).T
    return (y if bias is None else y + bias.to(dtype)).to(x.dtype)


def dense(weight: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """W ``[n, K]``, by torch: of float64 exact, of a narrower type rounded at every step."""
    codes, scale, zero = taken_apart(weight, n)
    grouped = codes.view(*scale.shape, -1).to(dtype)
    return torch.addcmul(zero[..., None].to(dtype), scale[..., None].to(dtype), grouped).view(n, -1)


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
    x, weight, bias, out, parts, counters, M, N, K, x_m, out_m, part_chunks,
    GROUP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, SPLIT: tl.constexpr, OFFSET: tl.constexpr,
    DEPENDENT_LAUNCH: tl.constexpr,
):  # fmt: skip
    """One tile of Y, or a part of it; 128 k a step. Axes as in ``small_matmul``; W is the left operand.

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
def _rebuild(weight, out, N, K, GROUP: tl.constexpr, BN: tl.constexpr):  # type: ignore[no-untyped-def]
    """BN rows of W and 128 k, two neighbours in a word of ``out``.

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
        even = ((words >> (4 * below)) & 15).to(tl.float32) * scale + zero
        odd = ((words >> (4 * below + 16)) & 15).to(tl.float32) * scale + zero
        low = even.to(out.dtype.element_ty).to(tl.int16, bitcast=True).to(tl.int32) & 65535
        high = odd.to(out.dtype.element_ty).to(tl.int16, bitcast=True).to(tl.int32) << 16
        row = (block * 16 + pair % 8 + 8 * below)[None, :]
        to = out.to(tl.pointer_type(tl.int32)) + row.to(tl.int64) * (K // 2) + chunk * 64 + two
        tl.store(to, low | high, row < N)


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


def tiling_of(m: int, n: int, k: int, device: torch.device, config: Mapping[str, Any] | None = None) -> TritonTiling:
    """How the Triton kernel cuts a product up (``bk`` is what it takes at a time): by ``config``, else tuned, else by
    rule."""
    if INTERPRETED:
        return TritonTiling(16, 32, CHUNK, 2, warps=1, stages=1)
    knobs = config or choose("int4_matmul", (m, n, k), device, triton_rule)
    hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    return TritonTiling(
        rows_of_a_tile(m), knobs["bn"], CHUNK, min(knobs["split"], k // CHUNK), warps=knobs["warps"],
        stages=knobs["stages"], dependent_launch=hopper,
    )  # fmt: skip


def _fitting(x: Tensor, weight: Tensor, n: int) -> None:
    """Raises ValueError where the shapes are not those of a product."""
    if x.dim() != 2 or not is_arranged(weight, n, x.shape[1]):
        raise ValueError(
            f"int4_matmul: x {list(x.shape)} and weight {weight.dtype} {list(weight.shape)} of {n} rows do not fit; x "
            "must be [M, K] and the weight what arrange(codes, scale, zero) of int4_packing.py gives for [n, K]"
        )


def launcher() -> Callable[..., Tensor]:
    """A new call of the Triton kernel with counters of its own (see ``small_matmul_triton.Counters``)."""
    counters = Counters()

    def call(
        x: Tensor, weight: Tensor, n: int, bias: Tensor | None = None, *, config: Mapping[str, Any] | None = None
    ) -> Tensor:
        """As ``reference``, on the GPU. ``config``: of ``TRITON_CHOICES``, instead of the tuned one."""
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
    """As ``reference`` for many rows of bfloat16 or float16, on the GPU: W is rebuilt in that type, which rounds it,
    and takes 2 N K bytes for the time of the call."""
    require("int4_matmul", x)
    if x.element_size() != 2:
        raise ValueError(f"int4_matmul: a weight is rebuilt in bfloat16 or float16, not in {x.dtype}; use by_triton")
    _fitting(x, weight, n)
    wide = x.new_empty((n, x.shape[1]))
    if wide.numel():
        grid = (weight.shape[0], triton.cdiv(n, REBUILT_ROWS))
        _rebuild[grid](weight.contiguous(), wide, n, x.shape[1], GROUP=group_of(weight), BN=REBUILT_ROWS, num_warps=4)
    return F.linear(x, wide, bias)


def way(m: int, n: int) -> str:
    """What was quickest on an H200 for ``m`` rows of bfloat16 and a weight of ``n`` rows: ``rows``
    (``int4_matmul.cu``), ``hopper`` (``int4_matmul_hopper.cu``) or ``rebuilt``."""
    if m >= DENSE_ROWS:
        return "rebuilt"
    return "hopper" if n >= 65536 or (m > 16 and n >= 16384) else "rows"


def _cuda_kernels(device: torch.device) -> dict[str, Callable[..., Tensor]]:
    """Those of Hopper by their names in ``way``; none elsewhere, or where they cannot be built, which is logged."""
    if device.type != "cuda" or torch.version.hip is not None or torch.cuda.get_device_capability(device)[0] != 9:
        return {}
    try:
        return {"rows": int4_rows.CudaCodes(), "hopper": int4_hopper.HopperCodes()}
    except Unavailable as error:
        log.warning("int4_matmul runs its Triton kernel, which is slower: %s", error)
        return {}


def gated_launcher() -> Callable[..., Tensor | None]:
    """A new ``(x, weight, n, *, dependent_launch=False)`` -> ``silu(gate) * up [M, n / 2]`` in one kernel, of a weight
    whose sixteens of rows are gate and up in turn; None where no kernel does that (see ``CudaCodes.gated``)."""
    built: dict[torch.device, int4_rows.CudaCodes | None] = {}

    def call(x: Tensor, weight: Tensor, n: int, *, dependent_launch: bool = False) -> Tensor | None:
        if x.device not in built:
            kernel = _cuda_kernels(x.device).get("rows")
            built[x.device] = kernel if isinstance(kernel, int4_rows.CudaCodes) else None
        kernel = built[x.device]
        if kernel is None or way(x.shape[0], n) != "rows":
            return None
        return kernel.gated(x, weight, n, dependent_launch=dependent_launch)

    return call


def best_launcher() -> Callable[..., Tensor]:
    """A new ``int4_matmul(x, weight, n, bias=None, *, dependent_launch=False)``: on a Hopper GPU whatever ``way`` says,
    if it takes the arguments; else ``rebuilt`` for many rows of a half type, and the Triton kernel.

    Which one runs is decided by the shape, the strides and the dtype alone, and all of them read the same order of the
    weight. Where the CUDA kernels cannot be built, that is said once, in the log.
    """
    by_tiles = launcher()
    built: dict[torch.device, dict[str, Callable[..., Tensor]]] = {}

    def call(
        x: Tensor, weight: Tensor, n: int, bias: Tensor | None = None, *, dependent_launch: bool = False
    ) -> Tensor:
        """As ``reference``, on the GPU; ``dependent_launch`` as in ``CudaRows``."""
        chosen = way(x.shape[0], n)
        if chosen == "rebuilt" and x.element_size() == 2:
            return rebuilt(x, weight, n, bias)
        if x.device not in built:
            built[x.device] = _cuda_kernels(x.device)
        kernel = built[x.device].get(chosen)
        if kernel is not None and not int4_rows.cuda_refusal(x, weight, n, bias):
            return kernel(x, weight, n, bias, dependent_launch=dependent_launch)
        return by_tiles(x, weight, n, bias)

    return call


int4_matmul = best_launcher()


# ----------------------------------------------------------------------------------------------------- registry entry


def cost(x: Tensor, weight: Tensor, n: int, bias: Tensor | None = None) -> Cost:
    """A product and a sum for each weight and row; codes, scales and zeros are read once."""
    m, k = x.shape
    read = sum(t.nbytes for t in (x, weight, bias) if t is not None)
    return Cost(2 * m * n * k, read, m * n * x.element_size())


class Prepared:
    """A peer that keeps a weight in an order of its own: made at the first call, dropped with the weight."""

    def __init__(self, make: Callable[[Tensor, int, torch.dtype], Any], call: Callable[..., Tensor]) -> None:
        self._make, self._call = make, call
        self._held: dict[int, tuple[weakref.ref[Tensor], Any]] = {}

    def __call__(self, x: Tensor, weight: Tensor, n: int, bias: Tensor | None = None) -> Tensor:
        held = self._held.get(id(weight))
        if held is None or held[0]() is not weight:
            key = id(weight)
            kept = weakref.ref(weight, lambda _: self._held.pop(key, None))
            held = self._held[key] = (kept, self._make(weight, n, x.dtype))
        y = self._call(x, held[1])
        return y if bias is None else y + bias


def _rounded(weight: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    return dense(weight, n, dtype)


def _for_torch(weight: Tensor, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, int]:
    """What torch's own product with 4-bit codes takes: W = scale (code - 8) + zero, groups of 32 to 256."""
    codes, scale, zero = taken_apart(weight, n)
    pairs = codes[:, ::2] << 4 | codes[:, 1::2]
    both = torch.stack((scale, zero + 8 * scale), -1).to(dtype).transpose(0, 1).contiguous()
    return torch.ops.aten._convert_weight_to_int4pack(pairs.contiguous(), 8), both, group_of(weight)


def _by_torch(x: Tensor, packed: tuple[Tensor, Tensor, int]) -> Tensor:
    codes, both, group = packed
    return torch.ops.aten._weight_int4pack_mm(x, codes, group, both)


def _examples() -> Sequence[dict[str, Any]]:
    def inputs(m: int, n: int, k: int, group: int, bias: bool) -> dict[str, Any]:
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
        scale = (sample(n, k // group, seed=1).abs() + 0.1) / math.sqrt(20 * k)
        weight = arrange(pack(codes, group), scale, -7.5 * scale)
        return {"x": sample(m, k), "weight": weight, "n": n, "bias": sample(n, seed=2) if bias else None}

    return [inputs(1, 33, 128, 32, True), inputs(5, 16, 384, 64, False), inputs(17, 20, 256, 128, False)]


def _cases() -> Sequence[Case]:
    """Projections of an 8B model and its head, in groups of 128."""

    def make(device: torch.device, seed: int, m: int, n: int, k: int) -> Mapping[str, Any]:
        generator = torch.Generator(device).manual_seed(seed)
        weight = torch.randint(-(2**31), 2**31, (k // CHUNK, n // 16, 272), device=device, generator=generator)
        weight = weight.to(torch.int32)
        scale = torch.rand(k // CHUNK, n // 16, 16, device=device, generator=generator).add(0.1).mul(k**-0.5 / 4)
        weight[..., 256:] = torch.stack((scale, -7.5 * scale), -1).to(torch.bfloat16).view(torch.int32).squeeze(-1)
        x = torch.randn(m, k, device=device, dtype=torch.bfloat16, generator=generator)
        return {"x": x, "weight": weight, "n": n, "bias": None}

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
    ints = dict.fromkeys(("M", "N", "K", "x_m", "out_m", "part_chunks"), "i32")
    pointers = {"x": "*bf16", "weight": "*i32", "out": "*bf16", "parts": "*fp32", "counters": "*i32"}
    constants = {"bias": None, "GROUP": 128, "BM": 16, "BN": 64, "SPLIT": 4, "OFFSET": 128, "DEPENDENT_LAUNCH": False}
    rebuild = {"weight": "*i32", "out": "*bf16", "N": "i32", "K": "i32"}
    return [
        Kernel("codes", _codes, {**pointers, **ints}, constants, divisible=("N", "K", "x_m", "out_m"), stages=4,
               targets=TRITON_TARGETS),
        Kernel("rebuild", _rebuild, rebuild, {"GROUP": 128, "BN": REBUILT_ROWS}, divisible=("N", "K"),
               targets=TRITON_TARGETS),
    ]  # fmt: skip


def _size(inputs: Mapping[str, Any]) -> tuple[int, int, int]:
    x = inputs["x"]
    return x.shape[0], inputs["n"], x.shape[1]


def _runs(name: str, inputs: Mapping[str, Any]) -> bool:
    m, n, _ = _size(inputs)
    return way(m, n) == name and not int4_rows.cuda_refusal(**inputs)


def _tuned(made: type[int4_rows.CudaCodes] | type[int4_hopper.HopperCodes]) -> Callable[..., Tensor]:
    """A kernel to tune: built at the first call."""

    @cache
    def kernel() -> Callable[..., Tensor]:
        return made()

    def launch(x: Tensor, weight: Tensor, n: int, bias: Tensor | None, *, config: Mapping[str, Any]) -> Tensor:
        return kernel()(x, weight, n, bias, dependent_launch=True, config=config)

    return launch


def _in_cuda(
    made: type[int4_rows.CudaCodes] | type[int4_hopper.HopperCodes], source: str, *, dependent_launch: bool
) -> Implementation:
    return Implementation(
        "cuda", lambda: partial(made(), dependent_launch=dependent_launch), ("sm_90",), dtypes=("bfloat16",),
        refusal=int4_rows.cuda_refusal, source=source,
    )  # fmt: skip


register(
    Op(
        name="int4_matmul",
        reference=reference,
        cost=cost,
        implementations={
            "triton": Implementation("triton", available(by_triton), TRITON_TARGETS),
            "cuda": _in_cuda(int4_rows.CudaCodes, "int4_matmul.cu", dependent_launch=False),
            "cuda_dependent": _in_cuda(int4_rows.CudaCodes, "int4_matmul.cu", dependent_launch=True),
            "hopper": _in_cuda(int4_hopper.HopperCodes, "int4_matmul_hopper.cu", dependent_launch=False),
            "hopper_dependent": _in_cuda(int4_hopper.HopperCodes, "int4_matmul_hopper.cu", dependent_launch=True),
        },
        examples=_examples,
        peers={
            "torch": Prepared(_rounded, F.linear),
            "torch_int4": Prepared(_for_torch, _by_torch),
        },
        cases=_cases,
        kernels=_kernels,
        knobs=[
            Knobs("int4_matmul", TRITON_CHOICES, triton_rule, by_triton, dict, _size),
            Knobs(
                "int4_matmul.cu",
                int4_rows.CHOICES,
                int4_rows.rule,
                _tuned(int4_rows.CudaCodes),
                dict,
                _size,
                applies=lambda inputs: _runs("rows", inputs),
            ),
            Knobs(
                "int4_matmul_hopper.cu",
                int4_hopper.CHOICES,
                int4_hopper.rule,
                _tuned(int4_hopper.HopperCodes),
                dict,
                _size,
                applies=lambda inputs: _runs("hopper", inputs),
            ),
        ],
    )
)
