r"""Product of many rows with a weight of 8 bits where both sides are rounded to 8 bits (W8A8).

    x_ti ~ s_t a_ti        y_to = s_t w_o sum_i a_ti c_oi + b_o        or, with scales of blocks of 128 rows by 128 k,
    x_ti ~ s_tg a_ti       y_to = sum_g s_tg w_og (sum over i in g of a_ti c_oi) + b_o

Rows of x are rounded by ``scaled8_rounding.py``, with scales of blocks where the weight has such. Tensor cores multiply
8 bits at twice the rate of bfloat16. Their sums of fp8 products keep fewer digits than float32 within an instruction
(Hopper: about 14 bits), as in other engines; those of whole numbers are exact.

Shapes: x ``[T, I]``, codes int8 ``[O, I]`` (of fp8 the bits), scale float32 ``[O]`` or ``[O / 128, I / 128]`` rounded
up, bias ``[O]`` or None, result ``[T, O]`` in x's dtype. I a multiple of 16. Inference only. For few rows, where bytes
alone count, ``scaled8_rows.py`` does not round x. ``scaled8_hopper.py`` takes 17 to 256 rows.

Source: Micikevicius et al. 2022, arXiv:2209.05433; scales of blocks: DeepSeek-V3, arXiv:2412.19437, section 3.3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .....costs.work import Cost
from .....hardware.device import target_of
from .....hardware.targets import BULK_TARGETS, FP8_TARGETS, TARGETS
from .... import shapes
from ....lang.jit import INTERPRETED, available, kernel, multiprocessors, tl
from ....lang.tiles import INTERPRETS, after_previous, describe
from ....numerics import compute_dtype, sample
from ....registry import Case, Implementation, Kernel, Op, in_torch, register
from ...few_rows.triton import Counters, add_parts
from ...many_rows.triton import tile_of
from . import scaled8_hopper, scaled8_rounding
from .scaled8_hopper import HopperRows8
from .scaled8_rounding import BLOCK, rounded, triton_rounded


def dense(codes: Tensor, scale: Tensor, fp8: bool, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the values ``[O, I]`` of codes with a scale for each row or for each block."""
    values = (codes.view(torch.float8_e4m3fn) if fp8 else codes).to(dtype)
    if scale.ndim == 1:
        return values * scale.to(dtype)[:, None]
    wide = scale.to(dtype).repeat_interleave(BLOCK, 0)[: len(codes)].repeat_interleave(BLOCK, 1)[:, : codes.shape[1]]
    return values * wide


def reference(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None, fp8: bool = True) -> Tensor:
    """Compute the product by torch; shapes as above. x is rounded to codes from float32."""
    wide = compute_dtype(x.dtype)
    a, s = rounded(x, fp8, scale.ndim == 2)
    shares = (a.view(torch.float8_e4m3fn) if fp8 else a).to(wide)
    own = s[:, None] if s.ndim == 1 else s.repeat_interleave(BLOCK, 1)[:, : x.shape[1]]
    y = (shares * own.to(wide)) @ dense(codes, scale, fp8, wide).T
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)


@kernel
def _tiles(  # type: ignore[no-untyped-def]
    x, weight, x_scale, scale, bias, out, parts, counters, M, N, K, part_k, blocks_k,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, SPLIT: tl.constexpr,
    SWAP: tl.constexpr, BLOCKED: tl.constexpr, WHOLE: tl.constexpr, PROGRAMS: tl.constexpr,
    FLATTEN: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """Share all tiles among PROGRAMS programs (axis 0), or those of each of SPLIT parts of K (axis 1). BULK: x and
    weight are descriptors; else pointers to contiguous rows.

    SWAP: the weight is the left operand of the tensor cores. BLOCKED: scales of blocks, BK is then their length. WHOLE:
    codes are whole numbers.
    """
    after_previous(DEPENDENT_LAUNCH)
    part = tl.program_id(1)
    rows_of_tiles = tl.cdiv(M, BM)
    columns_of_tiles = tl.cdiv(N, BN)
    k_begin = part * part_k
    k_end = min(K, k_begin + part_k)
    SUMS: tl.constexpr = tl.int32 if WHOLE else tl.float32
    for tile in tl.range(tl.program_id(0), rows_of_tiles * columns_of_tiles, PROGRAMS, flatten=FLATTEN):
        tile_m, tile_n = tile_of(tile, rows_of_tiles, columns_of_tiles, GROUP)
        m = tile_m * BM + tl.arange(0, BM)
        n = tile_n * BN + tl.arange(0, BN)
        sums = tl.zeros((BN, BM), SUMS) if SWAP else tl.zeros((BM, BN), SUMS)
        for start in range(k_begin, k_end, BK):
            if BULK:
                a = x.load([tile_m * BM, start])
                b = weight.load([tile_n * BN, start])
            else:
                k = start + tl.arange(0, BK)
                a = tl.load(x + m[:, None].to(tl.int64) * K + k[None, :], (m < M)[:, None] & (k < K)[None, :], 0.0)
                b = tl.load(weight + n[:, None].to(tl.int64) * K + k[None, :], (n < N)[:, None] & (k < K)[None, :], 0.0)
            if INTERPRETS and not WHOLE:
                a = a.to(tl.float32)
                b = b.to(tl.float32)
            if BLOCKED:
                own = tl.dot(b, a.T, out_dtype=tl.float32) if SWAP else tl.dot(a, b.T, out_dtype=tl.float32)
                block = start // BK
                s = tl.load(x_scale + m * blocks_k + block, m < M, 0.0)
                w = tl.load(scale + n // 128 * blocks_k + block, n < N, 0.0)
                # Fused, as in scaled8_hopper_blocks.cu: both give the same bits.
                sums = tl.fma(own, w[:, None] * s[None, :] if SWAP else s[:, None] * w[None, :], sums)
            else:
                sums = tl.dot(b, a.T, sums, out_dtype=SUMS) if SWAP else tl.dot(a, b.T, sums, out_dtype=SUMS)
        acc = sums.to(tl.float32)
        if not BLOCKED:
            s = tl.load(x_scale + m, m < M, 0.0)
            w = tl.load(scale + n, n < N, 0.0)
            acc = acc * (w[:, None] * s[None, :] if SWAP else s[:, None] * w[None, :])
        rows = m[None, :] if SWAP else m[:, None]
        columns = n[:, None] if SWAP else n[None, :]
        inside = (rows < M) & (columns < N)
        done = True
        if SPLIT > 1:
            done, acc = add_parts(acc, parts, counters, tile, part, rows, columns, M, N, SPLIT)
        if done:
            if bias is not None:
                acc += tl.load(bias + columns, columns < N, 0.0).to(tl.float32)
            tl.store(out + rows.to(tl.int64) * N + columns, acc.to(out.dtype.element_ty), inside)


@dataclass(frozen=True, slots=True)
class Tiling8:
    """Tiling of a product: tiles of ``bm`` rows of x by ``bn`` of the weight, ``bk`` of k at a time, K in ``split``
    parts. ``swap``: the weight is the left operand."""

    bm: int
    bn: int
    bk: int
    split: int = 1
    swap: bool = False
    warps: int = 8
    stages: int = 4
    flat: bool = False
    """The loads of a program's next tile begin before the last one ends."""


def choose_tiling(m: int, n: int, k: int, blocks: bool) -> Tiling8:
    """Return the quickest tiling of those tried on an H200 at the shapes of an 8B model, as a rule."""
    if INTERPRETED:
        split = 2 if k > 64 and not blocks else 1
        return Tiling8(16, 16, BLOCK if blocks else 32, split, swap=m < 32, warps=4, flat=split == 1)
    wide, deep, long = n >= 16384, k >= 8192, BLOCK if blocks else 256
    if m <= 64:
        # Also for fewer rows: warpgroups multiply no fewer than 64, and single warps multiply fp8 as float16.
        if wide:
            return Tiling8(64, 64, 128, warps=4, stages=6)
        return Tiling8(64, 128, 128, 4, warps=4, stages=5) if deep else Tiling8(64, 64, long, warps=4)
    if m <= 128:
        if wide or deep:
            return Tiling8(128, 128, 128, 1 if wide else 4)
        return Tiling8(128, 64, 128, swap=True, warps=4, stages=5)
    if m <= 256 and not wide:
        return Tiling8(128, 128, 128, stages=5) if n > 5000 and not deep else Tiling8(128, 64, 128, warps=4, stages=6)
    return Tiling8(128, 128 if blocks else 256, 128, stages=4 if blocks else 3, flat=True)


def choose_portable(m: int, n: int, k: int, blocks: bool) -> Tiling8:
    """Return the tiling for GPUs without bulk copies, whose blocks have 99 KiB of shared memory: the quickest of those
    tried with whole numbers on an H200 that acts as an Ada card, which multiplies fp8 by single warps as float16."""
    if m <= 64:
        bm = 16 if m <= 16 else 32 if m <= 32 else 64
        tiles = -(-n // 64)
        split = 1 if blocks or tiles >= 256 else 2 if tiles >= 128 and k < 8192 else 4
        return Tiling8(bm, 64, 128, split, swap=bm < 64, warps=4, stages=4)
    if m <= 256 and n < 16384:
        return Tiling8(64, 128, 128, warps=4 if blocks else 8, stages=3)
    return Tiling8(128, 64, 128, stages=3) if blocks else Tiling8(128, 128, 64, warps=4)


def copies_in_bulk(device: torch.device) -> bool:
    """Return True if the kernels read tiles by descriptors on ``device``."""
    return INTERPRETED or target_of(device).bulk_copies


class Tiles8:
    """``reference`` by the kernels here, with counters of its own: launches of one instance must be on one stream.
    ``hopper`` runs what it is quicker for. ``unsplit``: K is never split, so that a row's sums do not depend on the
    number of rows."""

    def __init__(
        self, *, dependent_launch: bool = False, hopper: HopperRows8 | None = None, unsplit: bool = False
    ) -> None:
        self._counters, self._dependent, self._hopper = Counters(), dependent_launch, hopper
        self._unsplit = unsplit

    def __call__(
        self,
        x: Tensor,
        codes: Tensor,
        scale: Tensor,
        bias: Tensor | None = None,
        fp8: bool = True,
        *,
        tiling: Tiling8 | None = None,
    ) -> Tensor:
        """Compute ``reference``. Can be captured in a CUDA graph once it has run.

        Raises:
            ValueError: see ``refusal``.
        """
        a, s = triton_rounded(x, fp8, scale.ndim == 2, dependent_launch=self._dependent)
        return self.product(a, s, codes, scale, bias, fp8, dtype=x.dtype, tiling=tiling)

    def product(
        self,
        a: Tensor,
        x_scale: Tensor,
        codes: Tensor,
        scale: Tensor,
        bias: Tensor | None = None,
        fp8: bool = True,
        *,
        dtype: torch.dtype = torch.bfloat16,
        tiling: Tiling8 | None = None,
    ) -> Tensor:
        """Return the product of rows that are rounded already: ``a`` and ``x_scale`` as of
        ``scaled8_rounding.Rounded``."""
        if reason := refusal(a, codes, scale):
            raise ValueError(f"scaled8: {reason}")
        if dtype == torch.bfloat16 and tiling is None:
            made = self._by_hopper(a, x_scale, codes, scale, bias, fp8)
            if made is not None:
                return made
        (m, k), n = a.shape, codes.shape[0]
        out = a.new_empty((m, n), dtype=dtype)
        if not out.numel():
            return out
        blocks = scale.ndim == 2
        units = 2 if INTERPRETED else multiprocessors(a.device)
        bulk = copies_in_bulk(a.device)
        tiling = tiling or (choose_tiling if bulk else choose_portable)(m, n, k, blocks)
        tiling = replace(tiling, split=1) if self._unsplit else tiling
        chunks = -(-k // tiling.bk)
        part_k = -(-chunks // tiling.split) * tiling.bk
        split = -(-k // part_k)
        tiles = -(-m // tiling.bm) * -(-n // tiling.bn)
        parts = held = None
        if split > 1:
            parts = out.new_empty((split, m, n), dtype=torch.float32)
            held = self._counters.get(a.device, tiles)
        kind = torch.float8_e4m3fn if fp8 else torch.int8
        programs = min(tiles, units) if tiling.flat else tiles
        options: dict[str, Any] = {"launch_pdl": True} if self._dependent else {}
        if self._unsplit and not INTERPRETED:  # a sum is rounded before the bias, as in scaled8_hopper.cu
            options["enable_fp_fusion"] = False
        left, right = a.contiguous().view(kind), codes.view(kind)
        if bulk:
            left, right = describe(left, tiling.bm, tiling.bk), describe(right, tiling.bn, tiling.bk)
        _tiles[(programs, split)](
            left, right, x_scale, scale, bias, out, parts, held, m, n, k, part_k, -(-k // BLOCK),
            BM=tiling.bm, BN=tiling.bn, BK=tiling.bk, GROUP=8, SPLIT=split, SWAP=tiling.swap, BLOCKED=blocks,
            WHOLE=not fp8, PROGRAMS=programs, FLATTEN=tiling.flat, DEPENDENT_LAUNCH=self._dependent,
            BULK=bulk, num_warps=tiling.warps, num_stages=tiling.stages, **options,
        )  # fmt: skip
        return out

    def gated(self, a: Tensor, x_scale: Tensor, codes: Tensor, scale: Tensor, fp8: bool = True) -> Tensor | None:
        """Multiply rows by a weight of 8 bits and return ``silu(first half) * second half``, bfloat16 ``[T, O / 2]``.

        Returns None if no launch does both.
        """
        reason = refusal(a, codes, scale)
        return None if reason else self._by_hopper(a, x_scale, codes, scale, fp8=fp8, gated=True)

    def _by_hopper(
        self,
        a: Tensor,
        x_scale: Tensor,
        codes: Tensor,
        scale: Tensor,
        bias: Tensor | None = None,
        fp8: bool = True,
        *,
        gated: bool = False,
    ) -> Tensor | None:
        kind = scaled8_hopper.kind_of(fp8, scale.ndim == 2)
        if self._hopper is None or self._hopper.kind is not kind or scaled8_hopper.refusal(a, codes, scale, kind):
            return None
        if len(a) < scaled8_hopper.LEAST_ROWS and not self._unsplit:
            return None
        (m, k), n = a.shape, codes.shape[0]
        tiling = scaled8_hopper.choose_tiling(m, n, k, gated, multiprocessors(a.device), self._unsplit, kind)
        if tiling is None:
            return None
        return self._hopper(
            a, x_scale, codes, scale, bias, tiling=tiling, gated=gated, dependent_launch=self._dependent
        )


def refusal(x: Tensor, codes: Tensor, scale: Tensor) -> str | None:
    """Return the reason why these kernels do not take such arguments; None if they do."""
    if x.shape[1] % 16 or x.shape[1] != codes.shape[1]:
        return f"rows of {x.shape[1]} numbers must be as long as the weight's, and a multiple of 16 for bulk copies"
    if not codes.is_contiguous() or codes.data_ptr() % 16:
        return "the codes must be contiguous, at an address that is a multiple of 16 bytes"
    return scales_refusal(codes, scale)


def scales_refusal(codes: Tensor, scale: Tensor) -> str | None:
    """Return the reason why a kernel cannot read these as scales of ``codes``; None if it can."""
    wanted = (len(codes),) if scale.ndim == 1 else (-(-len(codes) // BLOCK), -(-codes.shape[1] // BLOCK))
    fits = scale.shape == wanted and scale.is_contiguous() and scale.dtype == torch.float32
    return None if fits else f"the scales must be {list(wanted)}, float32 and contiguous"


def _kernels() -> list[Kernel]:
    scalars = dict.fromkeys(("M", "N", "K", "part_k", "blocks_k"), "i32")
    tensors = {"x_scale": "*fp32", "scale": "*fp32", "out": "*bf16"}
    common = {"bias": None, "parts": None, "counters": None, "GROUP": 8, "SPLIT": 1, "PROGRAMS": 132,
              "DEPENDENT_LAUNCH": False, "BULK": True}  # fmt: skip

    def tiles(name: str, kind: str, tiling: Tiling8, blocks: bool = False) -> Kernel:
        operands = {
            "x": f"tensordesc<{kind}[{tiling.bm}, {tiling.bk}]>",
            "weight": f"tensordesc<{kind}[{tiling.bn}, {tiling.bk}]>",
        }
        constants = {"BM": tiling.bm, "BN": tiling.bn, "BK": tiling.bk, "SWAP": tiling.swap, "BLOCKED": blocks,
                     "WHOLE": kind == "i8", "FLATTEN": tiling.flat}  # fmt: skip
        return Kernel(name, _tiles, {**operands, **tensors, **scalars}, common | constants, ("M", "N", "K"),
                      tiling.warps, tiling.stages, targets=BULK_TARGETS)  # fmt: skip

    def portable(name: str, kind: str, rows: int, blocks: bool = False) -> Kernel:
        made = tiles(name, kind, choose_portable(rows, 6144, 4096, blocks), blocks)
        pointers = {"x": f"*{kind}", "weight": f"*{kind}"}
        known = {**made.constants, "BULK": False}
        only = tuple(each.name for each in TARGETS.values() if each.nvidia and not each.bulk_copies)
        if kind != "i8":
            only = tuple(each for each in only if TARGETS[each].fp8_products)
        divisible = ("N", "K", "part_k")
        return replace(
            made, arguments={**made.arguments, **pointers}, constants=known, targets=only, divisible=divisible
        )

    few, many = (choose_tiling(rows, 28672, 4096, False) for rows in (64, 4096))
    return [
        *scaled8_rounding.kernels(),
        tiles("8 bits, few rows", "fp8e4nv", few),
        tiles("8 bits, many rows", "fp8e4nv", many),
        tiles("8 bits, blocks", "fp8e4nv", choose_tiling(4096, 28672, 4096, True), True),
        tiles("whole numbers, many rows", "i8", many),
        *(portable(f"portable, {rows} rows", "fp8e4nv", rows) for rows in (16, 64, 256, 4096)),
        portable("portable, blocks, 64 rows", "fp8e4nv", 64, True),
        portable("portable, blocks, many rows", "fp8e4nv", 4096, True),
        portable("portable, whole numbers, 64 rows", "i8", 64),
        portable("portable, whole numbers, many rows", "i8", 4096),
    ]


def cost(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None, fp8: bool = True) -> Cost:
    """Count a product and a sum for each weight and row; three FLOPs for each number of x, whose codes are kept."""
    tokens, outputs = x.shape[0], codes.shape[0]
    read = x.nbytes + x.numel() + codes.nbytes + scale.nbytes + (0 if bias is None else bias.nbytes)
    flops = 2 * tokens * codes.numel() + 3 * x.numel() + tokens * outputs
    return Cost(flops, read, x.numel() + tokens * outputs * x.element_size())


def _inputs(x: Tensor, outputs: int, fp8: bool, blocks: bool, biased: bool, seed: int = 1) -> dict[str, Any]:
    generator = torch.Generator(x.device).manual_seed(seed)
    values = torch.randn(outputs, x.shape[1], device=x.device, generator=generator)
    codes, scale = rounded(values, fp8)
    if blocks:
        held = (-(-outputs // BLOCK), -(-x.shape[1] // BLOCK))
        scale = torch.rand(held, device=x.device, generator=generator) / 64 + 1e-3
    bias = torch.randn(outputs, device=x.device, generator=generator).to(x.dtype) if biased else None
    return {"x": x, "codes": codes, "scale": scale, "bias": bias, "fp8": fp8}


def _examples() -> Sequence[dict[str, Any]]:
    return [
        _inputs(sample(3, 96), 40, fp8=True, blocks=False, biased=True),
        _inputs(sample(17, 48), 21, fp8=False, blocks=False, biased=False),
        _inputs(sample(5, 272), 130, fp8=True, blocks=True, biased=False),
    ]


def _cases() -> Sequence[Case]:
    def case(rows: int, fp8: bool, blocks: bool = False) -> Case:
        def make(device: torch.device, seed: int) -> Mapping[str, Any]:
            generator = torch.Generator(device).manual_seed(seed)
            x = torch.randn(rows, 4096, device=device, dtype=torch.bfloat16, generator=generator)
            return _inputs(x, 14336, fp8, blocks, biased=False, seed=seed)

        kind = ("fp8" if fp8 else "int8") + (", blocks" if blocks else "")
        return Case(f"up of {shapes.LLAMA_8B.name}, {kind}, {rows} rows", make)

    return [case(rows, fp8) for fp8 in (True, False) for rows in (64, 2048)] + [case(2048, True, True)]


def _refusal(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None, fp8: bool = True) -> str | None:
    return refusal(x, codes, scale)


def _hopper_implementation(kind: scaled8_hopper.Kernels8) -> Implementation:
    """Return the implementation of one kind of numbers and scales."""

    def hopper_refusal(
        x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None, fp8: bool = True
    ) -> str | None:
        if scaled8_hopper.kind_of(fp8, scale.ndim == 2) is not kind:
            return f"it takes {kind.name}"
        return refusal(x, codes, scale) or scaled8_hopper.refusal(x.contiguous(), codes, scale, kind)

    return Implementation(
        "cuda",
        lambda: Tiles8(hopper=HopperRows8(kind=kind)),
        ("sm_90",),
        dtypes=("bfloat16",),
        refusal=hopper_refusal,
        source=f"{kind.source}.cu",
    )


register(
    Op(
        name="scaled8_tiles",
        reference=reference,
        cost=cost,
        implementations={
            "torch": in_torch(reference),
            # No float32: Hopper's sums of fp8 products keep about 14 bits.
            "triton": Implementation(
                "triton", available(Tiles8()), FP8_TARGETS, dtypes=("bfloat16", "float16"), refusal=_refusal
            ),
            "cuda": _hopper_implementation(scaled8_hopper.FP8),
            "cuda_int8": _hopper_implementation(scaled8_hopper.WHOLE),
            "cuda_blocks": _hopper_implementation(scaled8_hopper.BLOCKS),
        },
        examples=_examples,
        peers={"torch": reference},
        keeps_dtype=("scale",),
        directions=("forward",),
        cases=_cases,
        kernels=_kernels,
        error_ratio=4.0,
        error_note="tensor cores' sums of fp8 keep fewer digits; a share next to a half may be rounded the other way",
    )
)
