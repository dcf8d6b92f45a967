r"""Dequantize 4-bit codes in groups; training over a frozen 4-bit base multiplies by the result.

    W[n, k] = scale[n, k // G] * code[n, k] + zero[n, k // G]

The packing is that of ``int4_packing.py``: byte j of pair p of a row holds code 2 p G + j in its low half and code (2 p
+ 1) G + j in its high half. With thousands of rows a product is bound by arithmetic, so it pays to rebuild the weight
once and use the fast dense product. With few rows take ``int4_matmul``.

Shapes: codes uint8 ``[N, K / 2]``, scale and zero ``[N, K / G]``, result ``[N, K]`` in the dtype of ``scale``; float32
inside, rounded once. No gradient: the base is frozen.

Bound by bytes: 1/2 + 4 / G bytes read and 2 written for each weight in bfloat16. A program takes one pair of groups, so
it loads a scale once for a row and divides nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from .....costs.work import Cost
from .... import shapes
from ....lang.jit import in_triton, kernel, require, tl
from ....numerics import compute_dtype, sample
from ....registry import Case, Kernel, Op, register
from .int4_packing import pack, unpack

ROWS, WARPS = 8, 4
"""Rows of W that a program takes from one pair of groups, and its warps."""


def reference(codes: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """Dequantize ``-> [N, K]`` in the dtype of ``scale``."""
    group = 2 * codes.shape[1] // scale.shape[1]
    dtype = compute_dtype(scale.dtype)
    wide, base = (t.to(dtype).repeat_interleave(group, dim=1) for t in (scale, zero))
    return (wide * unpack(codes, group).to(dtype) + base).to(scale.dtype)


@kernel
def _dequantize_kernel(
    codes_ptr, scale_ptr, zero_ptr, out_ptr, n, pairs, out_row, G: tl.constexpr, ROWS: tl.constexpr
):  # fmt: skip
    """Dequantize one pair of groups of ROWS rows a program: each byte yields two weights that lie G apart."""
    pair = tl.program_id(0) % pairs
    row = (tl.program_id(0) // pairs * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    j = tl.arange(0, G)
    inside = row < n
    at = row * pairs + pair
    code = tl.load(codes_ptr + at[:, None] * G + j[None, :], mask=inside[:, None], other=0)
    for half in tl.static_range(2):
        group = 2 * at + half
        scale = tl.load(scale_ptr + group, mask=inside, other=0.0).to(tl.float32)
        zero = tl.load(zero_ptr + group, mask=inside, other=0.0).to(tl.float32)
        value = ((code >> (4 * half)) & 15).to(tl.float32) * scale[:, None] + zero[:, None]
        out = out_ptr + row[:, None] * out_row + (2 * pair + half) * G + j[None, :]
        tl.store(out, value.to(out_ptr.dtype.element_ty), mask=inside[:, None])


def triton_dequantize(codes: Tensor, scale: Tensor, zero: Tensor, *, out: Tensor | None = None) -> Tensor:
    """Compute ``reference`` in Triton; strided inputs are copied. ``out``: the tensor to write the result to; its rows
    may have any stride. ValueError if the shapes do not fit each other."""
    require("int4_dequantize", scale, zero)
    n, half = codes.shape
    if scale.shape != zero.shape or scale.shape[0] != n or scale.dtype != zero.dtype or (2 * half) % scale.shape[1]:
        raise ValueError(
            f"int4_dequantize: codes [N, K / 2] need scale and zero [N, K / G] of one dtype; got {list(codes.shape)}, "
            f"{list(scale.shape)} {scale.dtype} and {list(zero.shape)} {zero.dtype}"
        )
    codes, scale, zero = codes.contiguous(), scale.contiguous(), zero.contiguous()
    out = torch.empty(n, 2 * half, dtype=scale.dtype, device=codes.device) if out is None else out
    if out.shape != (n, 2 * half) or out.dtype != scale.dtype or out.stride(1) != 1:
        raise ValueError(f"int4_dequantize: out must be [{n}, {2 * half}] of {scale.dtype}, with whole rows")
    if codes.numel():
        group = 2 * half // scale.shape[1]
        pairs = half // group
        grid = (pairs * -(-n // ROWS),)
        _dequantize_kernel[grid](codes, scale, zero, out, n, pairs, out.stride(0), G=group, ROWS=ROWS, num_warps=WARPS)
    return out


def cost(codes: Tensor, scale: Tensor, zero: Tensor) -> Cost:
    """Count one multiply-add a weight."""
    return Cost(4 * codes.numel(), codes.nbytes + scale.nbytes + zero.nbytes, 2 * codes.numel() * scale.element_size())


def _examples() -> Sequence[dict[str, Any]]:
    made = []
    for n, k, group in ((1, 64, 32), (5, 384, 64), (7, 512, 128)):
        codes = torch.randint(0, 16, (n, k), dtype=torch.uint8, generator=torch.Generator().manual_seed(k))
        scale, zero = sample(n, k // group), sample(n, k // group, seed=1)
        made.append({"codes": pack(codes, group), "scale": scale, "zero": zero})
    return made


def _cases() -> Sequence[Case]:
    def case(shape: shapes.ModelShape) -> Case:
        def make(device: torch.device, seed: int) -> Mapping[str, Any]:
            generator = torch.Generator(device).manual_seed(seed)
            n, k, group = shape.ffn_dim, shape.dim, 64
            codes = torch.randint(0, 256, (n, k // 2), dtype=torch.uint8, device=device, generator=generator)
            scale, zero = torch.randn(2, n, k // group, device=device, dtype=torch.bfloat16, generator=generator)
            return {"codes": codes, "scale": scale, "zero": zero}

        return Case(f"up of {shape.name}", make)

    return [case(shape) for shape in shapes.MODELS]


def _kernels() -> Sequence[Kernel]:
    arguments = {
        "codes_ptr": "*u8", "scale_ptr": "*bf16", "zero_ptr": "*bf16", "out_ptr": "*bf16", "n": "i32", "pairs": "i32",
        "out_row": "i32",
    }  # fmt: skip
    constants = {"G": 64, "ROWS": ROWS}
    return [Kernel("dequantize", _dequantize_kernel, arguments, constants, divisible=("n", "pairs", "out_row"))]


register(
    Op(
        name="int4_dequantize",
        reference=reference,
        cost=cost,
        implementations={"triton": in_triton(triton_dequantize)},
        examples=_examples,
        peers={"torch": reference},
        cases=_cases,
        kernels=_kernels,
    )
)
