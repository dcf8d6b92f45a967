"""The portable Triton kernel of the forward pass of ``flash_attention.py``, which has the math."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ....hardware.targets import BULK_TARGETS
from ...lang.jit import TRITON_TARGETS, kernel, tl
from ...lang.tiles import dot
from ...registry import Kernel
from .tiling import find_tile, keys_of, load_tile, seen


@kernel
def _walk_keys(  # type: ignore[no-untyped-def]
    acc, l, m, q, k, v, first, last, i, end, kv_head, k_t, k_h, v_t, v_h, scale2, window,
    D: tl.constexpr, DP: tl.constexpr, BN: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr,
    MASK: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """Run the online softmax over the keys from ``first`` to ``last``."""
    for start in range(first, last, BN):
        keys = load_tile(k, start, end, kv_head, k_t, k_h, D, DP, BN, BULK)
        s = dot(q, keys.T, tl.zeros((q.shape[0], BN), tl.float32))
        if MASK:
            s = tl.where(
                seen(i[:, None], start + tl.arange(0, BN)[None, :], end, window, CAUSAL, WINDOW), s, -float("inf")
            )
        new_m = tl.maximum(m, tl.max(s, 1) * scale2)
        shift = new_m
        if MASK:
            shift = tl.where(new_m == -float("inf"), 0.0, new_m)  # nothing seen yet: exp2(-inf) is 0, not NaN
        p = tl.exp2(s * scale2 - shift[:, None])
        fade = tl.exp2(m - shift)
        l = l * fade + tl.sum(p, 1)
        acc = acc * fade[:, None]
        values = load_tile(v, start, end, kv_head, v_t, v_h, D, DP, BN, BULK)
        acc = dot(p.to(q.dtype), values, acc)
        m = new_m
    return acc, l, m


@kernel
def _forward(  # type: ignore[no-untyped-def]
    q, k, v, out, lse, cu, documents, tokens, scale2, window, q_t, q_h, k_t, k_h, v_t, v_h,
    H: tl.constexpr, GROUP: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr,
    CAUSAL: tl.constexpr, WINDOW: tl.constexpr, BULK: tl.constexpr,
):  # fmt: skip
    """Attend with BM queries of one head. Axis 0: tiles of queries, the last first (they see most); axis 1: heads."""
    document, tile = find_tile(tl.num_programs(0) - 1 - tl.program_id(0), cu, documents, BM)
    begin = tl.load(cu + document)
    end = tl.load(cu + document + 1)
    first_i = begin + tile * BM
    if first_i < end:
        head = tl.program_id(1)
        kv_head = head // GROUP
        i = first_i + tl.arange(0, BM)
        queries = load_tile(q, first_i, end, head, q_t, q_h, D, DP, BM, False)
        acc = tl.zeros((BM, DP), tl.float32)
        l = tl.zeros((BM,), tl.float32)
        m = tl.full((BM,), -float("inf"), tl.float32)
        low, low_full, high_full, high = keys_of(first_i, begin, end, window, BM, BN, CAUSAL, WINDOW)
        if WINDOW:
            acc, l, m = _walk_keys(
                acc, l, m, queries, k, v, low, low_full, i, end, kv_head, k_t, k_h, v_t, v_h, scale2, window,
                D, DP, BN, CAUSAL, WINDOW, True, BULK,
            )  # fmt: skip
        acc, l, m = _walk_keys(
            acc, l, m, queries, k, v, low_full, high_full, i, end, kv_head, k_t, k_h, v_t, v_h, scale2, window,
            D, DP, BN, CAUSAL, WINDOW, False, BULK,
        )  # fmt: skip
        acc, l, m = _walk_keys(
            acc, l, m, queries, k, v, high_full, high, i, end, kv_head, k_t, k_h, v_t, v_h, scale2, window,
            D, DP, BN, CAUSAL, WINDOW, True, BULK,
        )  # fmt: skip
        d = tl.arange(0, DP)
        at = out + i[:, None].to(tl.int64) * (H * D) + head * D + d[None, :]
        tl.store(at, (acc / l[:, None]).to(out.dtype.element_ty), (i < end)[:, None] & (d < D)[None, :])
        tl.store(lse + head.to(tl.int64) * tokens + i, m + tl.log2(l), i < end)


def kernels() -> Sequence[Kernel]:
    """List the kernels for ahead-of-time compilation."""
    strides = dict.fromkeys(("q_t", "q_h", "k_t", "k_h", "v_t", "v_h"), "i32")
    half = dict.fromkeys(("q", "k", "v"), "*bf16")
    ints: dict[str, str] = {"cu": "*i32", "documents": "i32", "tokens": "i32", "window": "i32", **strides}
    base = {"H": 32, "GROUP": 4, "D": 128, "DP": 128, "CAUSAL": True, "WINDOW": False, "BULK": False}
    forward_kernel = Kernel(
        name="forward",
        function=_forward,
        arguments={**half, "out": "*bf16", "lse": "*fp32", "scale2": "fp32", **ints},
        constants={**base, "BM": 64, "BN": 64},
        divisible=tuple(strides),
        warps=4,
        stages=2,
        targets=TRITON_TARGETS,
    )
    bulk = dict.fromkeys(("k", "v"), "tensordesc<bf16[128, 1, 128]>")
    return [
        forward_kernel,
        replace(
            forward_kernel,
            name="forward_bulk",
            arguments={**forward_kernel.arguments, **bulk},
            constants={**forward_kernel.constants, "BN": 128, "BULK": True},
            targets=BULK_TARGETS,
        ),
    ]
