r"""Product by a weight of 8 bits with a scale for each output: whole numbers, or fp8 (e4m3).

    y_to = s_o sum_i x_ti c_oi + b_o

This is the product that decodes codes everywhere; ``scaled8_rows.py`` and ``scaled8_tiles.py`` are for Hopper.

Codes are decoded to the activations' dtype, exactly: whole numbers up to 127 and fp8 have at most 8 significant bits.
The bits of an fp8 code, shifted by 7, are those of a float16 that is 256 times smaller, also below the normal range;
the factor goes into the scale. So no hardware for fp8 is needed.

Shapes: x ``[T, I]``, codes int8 ``[O, I]`` (of fp8 the bits), scale float32 ``[O]``, bias ``[O]`` or None, result
``[T, O]`` in x's dtype. Sums in float32. Inference only: no gradient.
Source: fp8: Micikevicius et al. 2022, arXiv:2209.05433.

Bound by bytes for few tokens: one byte a weight, so half the time of bfloat16; by arithmetic at the activations' rate
for many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .....costs.work import Cost
from .... import shapes
from ....lang.jit import INTERPRETED, in_triton, kernel, require, rows_of, tl
from ....lang.tiles import dot
from ....numerics import compute_dtype, sample
from ....registry import Case, Implementation, Kernel, Op, in_torch, register
from . import scaled8_rows


def reference(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None, fp8: bool = False) -> Tensor:
    """Compute the product; shapes as above."""
    wide = compute_dtype(x.dtype)
    values = (codes.view(torch.float8_e4m3fn) if fp8 else codes).to(wide)
    y = (x.to(wide) @ values.T) * scale.to(wide)
    return (y if bias is None else y + bias.to(wide)).to(x.dtype)


@kernel
def _product(  # type: ignore[no-untyped-def]
    x, codes, scale, bias, y, T, O, I, x_row,
    FP8: tl.constexpr, BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute one tile of outputs."""
    t = tl.program_id(1) * BM + tl.arange(0, BM)
    o = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, I, BK):
        i = start + tl.arange(0, BK)
        a = tl.load(x + t.to(tl.int64)[:, None] * x_row + i[None, :], (t < T)[:, None] & (i < I)[None, :], 0.0)
        at = codes + o.to(tl.int64)[None, :] * I + i[:, None]
        c = tl.load(at, (o < O)[None, :] & (i < I)[:, None], 0)
        if FP8:
            bits = c.to(tl.int16)
            half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
            b = half.to(a.dtype)
        else:
            b = c.to(a.dtype)
        acc = dot(a, b, acc)
    factor = tl.load(scale + o, o < O, 0.0)
    if FP8:
        factor *= 256.0
    acc = acc * factor[None, :]
    if BIAS:
        acc += tl.load(bias + o, o < O, 0.0).to(tl.float32)[None, :]
    place = y + t.to(tl.int64)[:, None] * O + o[None, :]
    tl.store(place, acc.to(y.dtype.element_ty), (t < T)[:, None] & (o < O)[None, :])


def triton_scaled8(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None, fp8: bool = False) -> Tensor:
    """Compute ``reference`` in Triton; can be captured in a CUDA graph."""
    require("scaled8_linear", x)
    x = rows_of(x)
    tokens, inputs = x.shape
    outputs = codes.shape[0]
    y = x.new_empty(tokens, outputs)
    if y.numel():
        few = tokens <= 16
        bm, bn, bk = (16, 16, 16) if INTERPRETED else (16, 32, 256) if few else (128, 128, 64)
        scale = scale.contiguous()
        _product[(-(-outputs // bn), -(-tokens // bm))](
            x, codes.contiguous(), scale, scale if bias is None else bias.contiguous(), y, tokens, outputs, inputs,
            x.stride(0), FP8=fp8, BIAS=bias is not None, BM=bm, BN=bn, BK=bk, num_warps=4 if few else 8,
        )  # fmt: skip
    return y


def cost(x: Tensor, codes: Tensor, scale: Tensor, bias: Tensor | None = None, fp8: bool = False) -> Cost:
    """Count a product and a sum for each weight and row."""
    tokens, outputs = x.shape[0], codes.shape[0]
    read = x.nbytes + codes.nbytes + scale.nbytes + (0 if bias is None else bias.nbytes)
    return Cost(2 * tokens * codes.numel() + tokens * outputs, read, tokens * outputs * x.element_size())


def _inputs(x: Tensor, outputs: int, fp8: bool, biased: bool, seed: int = 1) -> dict[str, Any]:
    generator = torch.Generator(x.device).manual_seed(seed)
    whole = torch.randint(-127, 128, (outputs, x.shape[1]), device=x.device, generator=generator)
    codes = (whole.float() * 3).to(torch.float8_e4m3fn).view(torch.int8) if fp8 else whole.to(torch.int8)
    scale = torch.rand(outputs, device=x.device, generator=generator) / 64 + 1e-3
    bias = torch.randn(outputs, device=x.device, generator=generator).to(x.dtype) if biased else None
    return {"x": x, "codes": codes, "scale": scale, "bias": bias, "fp8": fp8}


def _examples() -> Sequence[dict[str, Any]]:
    return [
        _inputs(sample(3, 96), 40, fp8=True, biased=False),
        _inputs(sample(17, 33), 21, fp8=False, biased=True),
        _inputs(sample(1, 64), 48, fp8=False, biased=False),
    ]


def _cases() -> Sequence[Case]:
    def case(rows: int, fp8: bool) -> Case:
        def make(device: torch.device, seed: int) -> Mapping[str, Any]:
            generator = torch.Generator(device).manual_seed(seed)
            x = torch.randn(rows, 4096, device=device, dtype=torch.bfloat16, generator=generator)
            return _inputs(x, 14336, fp8, biased=False, seed=seed)

        return Case(f"up of {shapes.LLAMA_8B.name}, {'fp8' if fp8 else 'int8'}, {rows} rows", make)

    return [case(rows, fp8) for fp8 in (True, False) for rows in (1, 64, 2048)]


def _kernels() -> Sequence[Kernel]:
    types = {"x": "*bf16", "codes": "*i8", "scale": "*fp32", "bias": "*bf16", "y": "*bf16"}
    types |= dict.fromkeys(("T", "O", "I", "x_row"), "i32")
    few = {"FP8": True, "BIAS": False, "BM": 16, "BN": 32, "BK": 256}
    many = {"FP8": False, "BIAS": True, "BM": 128, "BN": 128, "BK": 64}
    return [
        Kernel("few rows", _product, types, few, ("O", "I", "x_row")),
        Kernel("many rows", _product, types, many, ("O", "I", "x_row"), 8),
    ]


register(
    Op(
        name="scaled8_linear",
        reference=reference,
        cost=cost,
        implementations={
            "torch": in_torch(reference),
            "triton": in_triton(triton_scaled8),
            "cuda": Implementation(
                "cuda",
                lambda: scaled8_rows.CudaRows8(),
                ("sm_90",),
                dtypes=("bfloat16",),
                refusal=lambda x, codes, scale, bias=None, fp8=False: scaled8_rows.refusal(x, codes, scale, bias),
                source="scaled8.cu",
            ),
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
