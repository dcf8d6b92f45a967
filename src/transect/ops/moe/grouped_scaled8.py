r"""Grouped linear with experts of 8 bits: whole numbers or fp8 (e4m3), with a scale for each output; of fp8 also one
for each block of 128 outputs by 128 inputs.

    y_r = s_e(r) (C_e(r) x_s(r)) + b_e(r)                  rows, experts and order as in ``grouped_linear.py``

Codes are decoded to the activations' dtype, exactly (``linear/packed/eight_bit/scaled8.py``). No expert is rebuilt in
memory.

Shapes: x ``[R, I]`` or ``[T, I]``, codes int8 ``[E O, I]`` (of fp8 the bits), scale float32 ``[E O]`` or
``[E O / 128, I / 128]`` (O a multiple of 128, I rounded up), starts ``[E + 1]`` int32, order ``[R]`` int32 or None,
bias ``[E O]`` or None, result ``[R, O]``. Sums in float32. Inference only: no gradient.
Sources: Gale et al. 2022, arXiv:2211.15841; fp8: Micikevicius et al. 2022, arXiv:2209.05433.

Bound by the bytes of the experts that are touched for few rows: half of bfloat16's. By arithmetic at the activations'
rate from some hundred rows an expert on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...costs.work import Cost, touched
from ...hardware.device import target_of
from ...hardware.targets import BULK_TARGETS, PLAIN_TARGETS
from ..lang.jit import INTERPRETED, in_triton, kernel, next_power_of_2, require, tl
from ..lang.tiles import dot
from ..linear.packed.eight_bit.scaled8_rounding import BLOCK
from ..linear.packed.eight_bit.scaled8_tiles import dense
from ..numerics import compute_dtype, sample
from ..registry import Case, Kernel, Op, in_torch, register
from . import grouped_linear
from .ordering import draw
from .ordering import reference as order_of
from .triton import expert_of_tile, rows_of_tile, tiling


def reference(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    starts: Tensor,
    order: Tensor | None = None,
    bias: Tensor | None = None,
    fp8: bool = True,
) -> Tensor:
    """Compute the product one expert at a time; shapes as above."""
    wide = compute_dtype(x.dtype)
    weight = dense(codes, scale, fp8, wide)
    y = grouped_linear.reference(x.to(wide), weight, starts, order, None if bias is None else bias.to(wide))
    return y.to(x.dtype)


@kernel
def _product(  # type: ignore[no-untyped-def]
    x, codes, scale, bias, starts, order, out, N, K, E, k_choices, across,
    FP8: tl.constexpr, BLOCKED: tl.constexpr, ORDERED: tl.constexpr, BIAS: tl.constexpr, WIDTH: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute as ``triton._grouped_product``. BLOCKED: BK divides 128, and a scale is for 128 by 128 codes."""
    expert, row, end = expert_of_tile(starts, tl.program_id(1), E, BM, WIDTH)
    if expert < E:
        r, inside, source = rows_of_tile(order, row, end, k_choices, BM, ORDERED)
        n = tl.program_id(0) * BN + tl.arange(0, BN)
        first = expert.to(tl.int64) * N
        acc = tl.zeros([BM, BN], tl.float32)
        for start in range(0, K, BK):
            k = start + tl.arange(0, BK)
            a = tl.load(x + source.to(tl.int64)[:, None] * K + k[None, :], inside[:, None] & (k < K)[None, :], 0.0)
            c = tl.load(codes + (first + n)[None, :] * K + k[:, None], (n < N)[None, :] & (k < K)[:, None], 0)
            if FP8:
                bits = c.to(tl.int16)
                half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
                b = half.to(a.dtype)
            else:
                b = c.to(a.dtype)
            if BLOCKED:
                own = dot(a, b, tl.zeros([BM, BN], tl.float32))
                s = tl.load(scale + (first + n) // 128 * across + start // 128, n < N, 0.0)
                acc += own * s[None, :]
            else:
                acc = dot(a, b, acc)
        if not BLOCKED:
            acc = acc * tl.load(scale + first + n, n < N, 0.0)[None, :]
        if FP8:
            acc = acc * 256.0
        if BIAS:
            acc += tl.load(bias + first + n, n < N, 0.0).to(tl.float32)[None, :]
        place = out + r.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(place, acc.to(out.dtype.element_ty), inside[:, None] & (n < N)[None, :])


def triton_grouped_scaled8(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    starts: Tensor,
    order: Tensor | None = None,
    bias: Tensor | None = None,
    fp8: bool = True,
) -> Tensor:
    """Compute ``reference`` in Triton; can be captured in a CUDA graph.

    Raises:
        ValueError: scales of blocks where an expert's outputs are not whole blocks.
    """
    require("grouped_scaled8", x)
    experts, blocked = len(starts) - 1, scale.ndim == 2
    n, k = len(codes) // experts, codes.shape[1]
    if blocked and n % BLOCK:
        raise ValueError(f"grouped_scaled8: experts of {n} outputs are not whole blocks of {BLOCK}")
    x, codes, scale = x.contiguous(), codes.contiguous(), scale.contiguous()
    rows = len(x) if order is None else len(order)
    out = x.new_empty(rows, n)
    if rows and n:
        bm, bn, bk, warps = tiling(rows, experts)
        bk = bk if INTERPRETED else 128
        if bm > 64 and not target_of(x.device).bulk_copies:
            bm = 64
        _product[(-(-n // bn), rows // bm + min(experts, rows))](
            x, codes, scale, scale if bias is None else bias.contiguous(), starts, starts if order is None else order,
            out, n, k, experts, 1 if order is None else rows // len(x), -(-k // BLOCK),
            FP8=fp8, BLOCKED=blocked, ORDERED=order is not None, BIAS=bias is not None,
            WIDTH=next_power_of_2(experts), BM=bm, BN=bn, BK=bk, num_warps=warps,
        )  # fmt: skip
    return out


def cost(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    starts: Tensor,
    order: Tensor | None = None,
    bias: Tensor | None = None,
    fp8: bool = True,
) -> Cost:
    """Return the cost, as ``grouped_linear`` has it: the experts that random routing touches."""
    experts = len(starts) - 1
    rows, outputs = len(x) if order is None else len(order), len(codes) // experts
    share = touched(rows, 1, experts) / experts
    read = x.nbytes + share * (codes.nbytes + scale.nbytes) + starts.nbytes
    read += sum(t.nbytes for t in (order, bias) if t is not None)
    return Cost(rows * outputs * (2 * codes.shape[1] + 1), read, rows * outputs * x.element_size())


def _inputs(
    tokens: int, experts: int, k: int, outputs: int, inputs: int, fp8: bool, blocked: bool, device: torch.device | str
) -> dict[str, Any]:
    generator = torch.Generator(device).manual_seed(tokens)
    whole = torch.randint(-127, 128, (experts * outputs, inputs), device=device, generator=generator)
    codes = (whole.float() * 3).to(torch.float8_e4m3fn).view(torch.int8) if fp8 else whole.to(torch.int8)
    shape = (experts * outputs // BLOCK, -(-inputs // BLOCK)) if blocked else (experts * outputs,)
    scale = torch.rand(shape, device=device, generator=generator) / 64 + 1e-3
    order, _, starts = order_of(draw(tokens, k, experts, tokens, device), experts)
    return {"codes": codes, "scale": scale, "starts": starts, "order": order, "fp8": fp8}


def _examples() -> Sequence[dict[str, Any]]:
    made = []
    for tokens, experts, k, outputs, inputs, fp8, blocked, biased in (
        (5, 4, 2, 24, 48, True, False, True), (40, 3, 1, 16, 33, False, False, False),
        (7, 2, 2, 128, 160, True, True, False),
    ):  # fmt: skip
        bias = sample(experts * outputs, seed=3) if biased else None
        shared = _inputs(tokens, experts, k, outputs, inputs, fp8, blocked, "cpu")
        made.append({"x": sample(tokens, inputs), **shared, "bias": bias})
    return made


def _cases() -> Sequence[Case]:
    def case(tokens: int) -> Case:
        def make(device: torch.device, seed: int) -> Mapping[str, Any]:
            generator = torch.Generator(device).manual_seed(seed)
            x = torch.randn(tokens, 2048, device=device, dtype=torch.bfloat16, generator=generator)
            return {"x": x, **_inputs(tokens, 128, 8, 768, 2048, True, False, device)}

        return Case(f"up of Qwen3-30B-A3B, fp8, {tokens} tokens", make)

    return [case(tokens) for tokens in (1, 16, 64, 256)]


def _kernels() -> Sequence[Kernel]:
    pointers = {"x": "*bf16", "codes": "*i8", "scale": "*fp32", "bias": "*bf16", "out": "*bf16"}
    indices = dict.fromkeys(("starts", "order"), "*i32") | dict.fromkeys(("N", "K", "E", "k_choices", "across"), "i32")
    common = {"FP8": True, "BLOCKED": False, "ORDERED": True, "BIAS": False, "WIDTH": 128}
    few = {"BM": 16, "BN": 64, "BK": 128}
    many = {"BM": 128, "BN": 128, "BK": 128, "FP8": True, "BLOCKED": True}
    arguments, portable = {**pointers, **indices}, common | many | {"BM": 64}
    return [
        Kernel("few rows", _product, arguments, common | few, ("N", "K"), 4),
        Kernel("many rows, blocks", _product, arguments, common | many, ("N", "K"), 8, targets=BULK_TARGETS),
        Kernel("many rows, blocks, portable", _product, arguments, portable, ("N", "K"), 8, targets=PLAIN_TARGETS),
    ]


register(
    Op(
        name="grouped_scaled8",
        reference=reference,
        cost=cost,
        implementations={
            "torch": in_torch(reference),
            "triton": in_triton(triton_grouped_scaled8),
        },
        examples=_examples,
        peers={"torch": reference},
        keeps_dtype=("scale",),
        directions=("forward",),
        cases=_cases,
        kernels=_kernels,
        error_ratio=4.0,
        error_note="float32 is summed along I one product after another, which a library does in parts",
    )
)
