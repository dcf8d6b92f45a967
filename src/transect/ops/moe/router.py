r"""The router of a mixture of experts: a score of each expert for each token, in float32 whatever a model computes in.

    l_te = sum_i x_ti w_ei + b_e

A product of two numbers of 8 or 11 significant bits is exact in float32, and tensor cores add such products up in
float32. So the kernel reads x and w as they are, and neither is written again in float32.

Shapes: x ``[T, D]``, weight ``[E, D]``, bias ``[E]`` or None; result ``[T, E]`` float32 (float64 for float64).
Source: Shazeer et al. 2017, arXiv:1701.06538; that it is kept in float32: Fedus et al. 2021, arXiv:2101.03961.

Bound by reading the weights for few tokens, half a megabyte for 128 experts of width 2048: less than a launch. From
some hundred tokens on by reading x.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ...costs.work import Cost
from ..lang.jit import INTERPRETED, in_triton, kernel, require, rows_of, tl
from ..lang.tiles import dot
from ..linear.linear import fixed_rows
from ..numerics import compute_dtype, sample
from ..registry import Case, Kernel, Op, in_torch, register


def reference(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute the scores of x ``[T, D]`` -> ``[T, E]``."""
    wide = compute_dtype(x.dtype)
    return F.linear(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))


def by_fixed_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``reference``, where a token's scores do not depend on the other tokens; see ``linear.fixed_rows``."""
    wide = compute_dtype(x.dtype)
    return fixed_rows(x.to(wide), weight.to(wide), None if bias is None else bias.to(wide))


@kernel
def _router(  # type: ignore[no-untyped-def]
    x, weight, bias, out, T, E, D, row_stride,
    BIAS: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
):  # fmt: skip
    """Compute the scores of BM tokens for BN experts."""
    t = tl.program_id(0) * BM + tl.arange(0, BM)
    e = tl.program_id(1) * BN + tl.arange(0, BN)
    acc = tl.zeros([BM, BN], tl.float32)
    for start in range(0, D, BK):
        d = start + tl.arange(0, BK)
        a = tl.load(x + t.to(tl.int64)[:, None] * row_stride + d[None, :], (t < T)[:, None] & (d < D)[None, :], 0.0)
        b = tl.load(weight + e[None, :] * D + d[:, None], (e < E)[None, :] & (d < D)[:, None], 0.0)
        acc = dot(a, b, acc)
    if BIAS:
        acc += tl.load(bias + e, e < E, 0.0).to(tl.float32)[None, :]
    tl.store(out + t.to(tl.int64)[:, None] * E + e[None, :], acc, (t < T)[:, None] & (e < E)[None, :])


def tiling(tokens: int) -> tuple[int, int, int]:
    """Choose BM, BN, BK: small tiles for few tokens, so that they occupy many multiprocessors."""
    if INTERPRETED:
        return 16, 16, 32
    if tokens <= 64:
        return 16, 16, 256
    return (32, 32, 128) if tokens <= 1024 else (64, 64, 64)


FIXED = (64, 32, 64)
"""The tiling of ``triton_fixed_router``."""


def triton_fixed_router(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute ``triton_router``, where a token's result does not depend on the other tokens."""
    return triton_router(x, weight, bias, fixed=True)


def triton_router(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, fixed: bool = False) -> Tensor:
    """Compute ``reference`` in Triton; x and weight of one type of at most 32 bits. Can be captured in a CUDA graph.
    ``fixed``: use the same tiles for any number of tokens."""
    require("expert_router", x, weight)
    x, weight = rows_of(x), weight.contiguous()
    tokens, width = x.shape
    experts = len(weight)
    out = torch.empty(tokens, experts, dtype=torch.float32, device=x.device)
    if tokens:
        bm, bn, bk = FIXED if fixed and not INTERPRETED else tiling(tokens)
        _router[(-(-tokens // bm), -(-experts // bn))](
            x, weight, weight if bias is None else bias.contiguous(), out, tokens, experts, width, x.stride(0),
            BIAS=bias is not None, BM=bm, BN=bn, BK=bk, num_warps=4,
        )  # fmt: skip
    return out


def cost(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Cost:
    """Count a product and a sum for each token and weight."""
    tokens, experts = len(x), len(weight)
    flops = 2 * tokens * weight.numel() + (0 if bias is None else tokens * experts)
    return Cost(flops, x.nbytes + weight.nbytes + (0 if bias is None else bias.nbytes), 4 * tokens * experts)


def _examples() -> Sequence[dict[str, Any]]:
    return [
        {"x": sample(5, 96), "weight": sample(20, 96, seed=1), "bias": None},
        {"x": sample(17, 33), "weight": sample(7, 33, seed=1), "bias": sample(7, seed=2)},
        {"x": sample(0, 16), "weight": sample(4, 16, seed=1), "bias": None},
    ]


def _cases() -> Sequence[Case]:
    def case(tokens: int) -> Case:
        def make(device: torch.device, seed: int) -> Mapping[str, Any]:
            generator = torch.Generator(device).manual_seed(seed)
            options: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "generator": generator}
            x, weight = (torch.randn(rows, 2048, **options) for rows in (tokens, 128))
            return {"x": x, "weight": weight, "bias": None}

        return Case(f"qwen3-30b-a3b, {tokens} tokens", make)

    return [case(tokens) for tokens in (1, 64, 8192)]


def _kernels() -> Sequence[Kernel]:
    types = {"x": "*bf16", "weight": "*bf16", "bias": "*bf16", "out": "*fp32"}
    types |= dict.fromkeys(("T", "E", "D", "row_stride"), "i32")
    sizes = ("E", "D", "row_stride")
    few = {"BIAS": False, "BM": 16, "BN": 16, "BK": 256}
    many = {"BIAS": True, "BM": 64, "BN": 64, "BK": 64}
    return [Kernel("few tokens", _router, types, few, sizes), Kernel("many tokens", _router, types, many, sizes)]


register(
    Op(
        name="expert_router",
        reference=reference,
        cost=cost,
        implementations={
            "torch": in_torch(reference),
            "torch_fixed_rows": in_torch(by_fixed_rows, batch_invariant=True),
            "triton": in_triton(triton_router),
            "triton_fixed_rows": in_triton(triton_fixed_router, batch_invariant=True),
        },
        examples=_examples,
        peers={"torch": reference},
        cases=_cases,
        kernels=_kernels,
        error_ratio=4.0,
        error_note="float32 is summed along D one product after another, which a library does in parts",
    )
)
