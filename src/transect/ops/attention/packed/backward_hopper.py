"""The gradient of flash attention for Hopper GPUs: one kernel for dq, dk and dv, 5 products in place of 7.

The math and the kernels for every other GPU (and for the interpreter) are in ``packed/backward.py``. This file computes
the same gradients in 16-bit formats, with what only Hopper has. It is written in Gluon, the dialect of Triton that
spells out layouts, shared memory, barriers and the roles of warps.

A program owns 128 keys of one key head. It walks over the queries that see them, 64 at a time, of all query heads that
share the key head, one head after another. So the sum over a group of heads happens in registers and costs nothing.
Scores have the keys as rows. For each tile of queries:

    s' = k q'     dp' = v g'     p' = exp2(scale2 s' - L)     ds' = p' (dp' - D)
    dv += p' g    dk += ds' q    dq += ds k

p' is then the left operand of dv as it lies in registers. ds' goes through shared memory once, for dk and, transposed,
for dq. One warp only *fetches* (``_fetch``): it brings k, v, the tiles of q and g, L and D into a ring of STAGES tiles,
and has 24 registers a thread. Two warpgroups *work* (``_work``), each on 64 of the keys, with 240 registers a thread:
128 for dk and dv, 64 for s' and dp'. ``full[slot]`` says that a copy has arrived, ``empty[slot]`` that both warpgroups
have read it.

A step issues its products without waiting: dp' runs while p' is computed, dv while ds' is, dk while dq is added to
memory, and on into the next step's s'.

dq is a sum over keys, and so over programs. Each adds its part to a float32 workspace, in no fixed order. So dk and dv
are the same to the bit in every run, and dq up to the rounding of float32 sums. With
``torch.use_deterministic_algorithms`` the two kernels of ``packed/backward.py`` run instead. The workspace holds each
tile of dq in the order in which threads hold it (``_in_fragment_order``): 512 bytes for each instruction of a warp. A
last kernel puts dq in order, scaled and rounded (``finish_kernel``).

Bound by the tensor cores and by the data path of shared memory, which feeds them: a product of 64 rows and 64 columns
with both operands in shared memory asks for all 128 bytes a cycle, and s', dp' and dq are such products. The rest is
mostly waiting at barriers: the warpgroups meet twice in a step, because dq needs the ds' of both.

Source: Dao 2023, arXiv:2307.08691 (loop order, atomic dq); Shah et al. 2024, arXiv:2407.08608 (roles, overlap).
Counters, and what was tried and lost, are in ``docs/lab-notes/attention.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ...lang.gluon_language import (
    async_load,
    block_barrier,
    fence_async_shared,
    gl,
    gluon,
    gluon_kernel,
    mbarrier,
    tensor_descriptor,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)
from ...lang.jit import kernel, tl
from ...registry import Kernel
from .hopper import takes
from .tiling import LOG2E, check, find_tile, fits_descriptor, seen

BM = 64
"""Queries of a tile."""
BN = 128
"""Keys of a program: 64 for each of two warpgroups."""
STAGES = 3
"""Tiles of queries in shared memory."""


# ---------------------------------------------------------------------------------------------------------- kernels


@gluon_kernel
def _copied(x, CONSTRAINT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Copy x by an instruction that the compiler can neither move nor analyse."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", CONSTRAINT, [x], dtype=x.dtype, is_pure=False, pack=1)


@gluon_kernel
def _fetch(  # type: ignore[no-untyped-def]
    q, k, v, g, lse, delta, q_ring, g_ring, lse_ring, delta_ring, k_tile, v_tile, kv_full, full, empty, total, first_j,
    kv_head, low, high, end, tokens, GROUP: gl.constexpr, BM: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Run the loading warp: request k, v and the tiles of queries from the copy engine, and load L and D itself."""
    mbarrier.expect(kv_full, 2 * k.block_type.nbytes)
    async_load(k, [first_j, kv_head, 0], kv_full, k_tile.index(0))
    async_load(v, [first_j, kv_head, 0], kv_full, v_tile.index(0))
    start = low
    head = kv_head * GROUP
    lane = gl.arange(0, BM, layout=gl.BlockedLayout([1], [32], [1], [0]))
    for n in range(total):
        slot = n % STAGES
        at = head.to(gl.int64) * tokens + start
        there = start + lane < end
        big_l = gl.load(lse + at + lane, there, 0.0)
        at_delta = gl.load(delta + at + lane, there, 0.0)
        mbarrier.wait(empty.index(slot), (n // STAGES + 1) % 2)
        arrived = full.index(slot)
        mbarrier.expect(arrived, 2 * q.block_type.nbytes)
        async_load(q, [start, head, 0], arrived, q_ring.index(slot))
        async_load(g, [start, head, 0], arrived, g_ring.index(slot))
        lse_ring.index(slot).store(big_l)
        delta_ring.index(slot).store(at_delta)
        mbarrier.arrive(arrived, count=1)
        start += BM
        if start >= high:
            start = low
            head += 1


@gluon_kernel
def _in_fragment_order(x, BM: gl.constexpr, DP: gl.constexpr):  # type: ignore[no-untyped-def]
    """Reorder dq of a tile, ``[BM * DP]``, so that the 4 numbers that a thread adds at a time are adjacent, and so are
    those of adjacent threads: 512 bytes for each instruction of a warp. In row order a warp would access 8 rows, 32
    bytes of each."""
    x = x.reshape([4, 2, 8, 2, DP // 16, 4, 2])  # rows: warp, half, lane; columns: warpgroup, 8s, lane, pair
    return x.permute((3, 0, 4, 2, 5, 1, 6)).reshape([BM * DP])


@gluon_kernel
def _work(  # type: ignore[no-untyped-def]
    dq, dk, dv, q_ring, g_ring, lse_ring, delta_ring, k_tile, v_tile, ds_tile, kv_full, full, empty, total, first_j,
    kv_head, low, high, end, first_block, blocks, scale, scale2, window, H: gl.constexpr, GROUP: gl.constexpr,
    D: gl.constexpr, DP: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr, STAGES: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr,
):  # fmt: skip
    """Run the two warpgroups that compute."""
    HALF: gl.constexpr = q_ring.dtype
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, BM, 16])
    KEYS: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, DP, 16])
    QUERIES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, DP // 2, 16])
    no_scores = gl.zeros([BN, BM], gl.float32, layout=SCORES)
    no_queries = gl.zeros([BM, DP], gl.float32, layout=QUERIES)
    # Zeros that are there before the first product: where the compiler may set them later it finds instructions that
    # write accumulators between asynchronous products, and makes all of them wait.
    zero = gl.zeros([BN, DP], gl.float32, layout=KEYS)
    grad_k = warpgroup_mma_init(_copied(zero, "=f,f"))
    grad_v = _copied(zero, "=f,f")
    block = first_block
    start = low
    mbarrier.wait(kv_full, 0)
    for n in range(total):
        slot = n % STAGES
        # An index of 0 that the compiler does not know: else it keeps 40 addresses of these tiles in registers.
        only = _copied(n * 0, "=r,r")
        keys = k_tile.index(only).reshape([BN, DP])
        values = v_tile.index(only).reshape([BN, DP])
        ds_at = ds_tile.index(only)
        queries = q_ring.index(slot).reshape([BM, DP])
        upstream = g_ring.index(slot).reshape([BM, DP])
        mbarrier.wait(full.index(slot), n // STAGES % 2)
        s = warpgroup_mma(keys, queries.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        dp = warpgroup_mma(values, upstream.permute((1, 0)), no_scores, use_acc=False, is_async=True)
        s, grad_k = warpgroup_mma_wait(1, deps=[s, grad_k])
        big_l = lse_ring.index(slot).load(gl.SliceLayout(0, SCORES))
        p = gl.exp2(s * scale2 - big_l[None, :])
        masked = (first_j + BN > end) | (start + BM > end)
        if CAUSAL:
            masked = masked | (start < first_j + BN - 1)
        if WINDOW:
            masked = masked | (start + BM > first_j + window)
            if not CAUSAL:
                masked = masked | (start < first_j + BN - window)
        if masked:
            j = first_j + gl.arange(0, BN, layout=gl.SliceLayout(1, SCORES))
            i = start + gl.arange(0, BM, layout=gl.SliceLayout(0, SCORES))
            p = gl.where(seen(i[None, :], j[:, None], end, window, CAUSAL, WINDOW), p, 0.0)
        half_p = gl.convert_layout(p.to(HALF), gl.DotOperandLayout(0, KEYS, 2))
        grad_v = warpgroup_mma(half_p, upstream, grad_v, is_async=True)
        dp = warpgroup_mma_wait(1, deps=[dp])
        at_delta = delta_ring.index(slot).load(gl.SliceLayout(0, SCORES))
        # Its own products of the step before, which read its rows of this tile (dk), are done; everyone's dq too.
        ds_at.store((p * (dp - at_delta[None, :])).to(HALF))
        fence_async_shared()
        block_barrier()
        # Every warp is past its products of the step before, so that step's tiles may be overwritten.
        mbarrier.arrive(empty.index((n + STAGES - 1) % STAGES), count=1, pred=n > 0)
        grad_q = warpgroup_mma(ds_at.permute((1, 0)), keys, no_queries, use_acc=False, is_async=True)
        grad_k = warpgroup_mma(ds_at, queries, warpgroup_mma_init(grad_k), is_async=True)
        grad_q, grad_v = warpgroup_mma_wait(1, deps=[grad_q, grad_v])
        part = _in_fragment_order(grad_q, BM, DP)
        at = gl.arange(0, BM * DP, layout=part.type.layout)
        gl.atomic_add(dq + block.to(gl.int64) * (BM * DP) + at, part, sem="relaxed")
        start += BM
        block += 1
        if start >= high:
            block += blocks - (start - low) // BM
            start = low
    grad_k = warpgroup_mma_wait(0, deps=[grad_k])
    token = first_j + gl.arange(0, BN, layout=gl.SliceLayout(1, KEYS))
    d = gl.arange(0, DP, layout=gl.SliceLayout(0, KEYS))
    out = token[:, None].to(gl.int64) * (H // GROUP * D) + kv_head * D + d[None, :]
    inside = (token < end)[:, None] & (d < D)[None, :]
    gl.store(dk + out, (grad_k * scale).to(HALF), inside)
    gl.store(dv + out, grad_v.to(HALF), inside)


@gluon_kernel
def gradient_kernel(  # type: ignore[no-untyped-def]
    q, k, v, g, lse, delta, dq, dk, dv, cu, documents, tokens, blocks, scale, scale2, window,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, DP: gl.constexpr, BM: gl.constexpr, BN: gl.constexpr,
    STAGES: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Compute the gradients of BN keys of one key head, and add to dq. Axis 0: tiles of keys (with a causal mask the
    first of a document take longest and come first); axis 1: key heads. dq: float32 workspace ``[H, blocks, BM * DP]``
    of zeros, one block for each tile of queries of each document, numbered as in ``find_tile``."""
    document, tile = find_tile(gl.program_id(0), cu, documents, BN)
    begin = gl.load(cu + document)
    end = gl.load(cu + document + 1)
    first_j = begin + tile * BN
    if first_j < end:
        kv_head = gl.program_id(1)
        # Queries [low, high) see some key of the tile; low is at a multiple of BM.
        low = begin
        high = end
        if CAUSAL:
            low = begin + (first_j - begin) // BM * BM
        if WINDOW:
            high = min(end, first_j + BN + window - 1)
            if not CAUSAL:
                low = max(begin, begin + (first_j - window + 1 - begin) // BM * BM)
        total = (high - low + BM - 1) // BM * GROUP
        first_block = kv_head * GROUP * blocks + begin // BM + document + (low - begin) // BM
        gl.assume(total > 0)
        ROW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        q_ring = gl.allocate_shared_memory(q.dtype, [STAGES, BM, 1, DP], q.layout)
        g_ring = gl.allocate_shared_memory(q.dtype, [STAGES, BM, 1, DP], g.layout)
        lse_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BM], ROW)
        delta_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BM], ROW)
        k_tile = gl.allocate_shared_memory(q.dtype, [1, BN, 1, DP], k.layout)
        v_tile = gl.allocate_shared_memory(q.dtype, [1, BN, 1, DP], v.layout)
        ds_tile = gl.allocate_shared_memory(
            q.dtype, [1, BN, BM], gl.NVMMASharedLayout.get_default_for([BN, BM], q.dtype)
        )
        kv_full = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
        mbarrier.init(kv_full, count=1)
        for stage in gl.static_range(STAGES):
            mbarrier.init(full.index(stage), count=2)  # the copies; L and D
            mbarrier.init(empty.index(stage), count=1)
        fence_async_shared()
        gl.warp_specialize(
            [
                (_work, (
                    dq, dk, dv, q_ring, g_ring, lse_ring, delta_ring, k_tile, v_tile, ds_tile, kv_full, full, empty,
                    total, first_j, kv_head, low, high, end, first_block, blocks, scale, scale2, window, H, GROUP, D,
                    DP, BM, BN, STAGES, CAUSAL, WINDOW,
                )),
                (_fetch, (
                    q, k, v, g, lse, delta, q_ring, g_ring, lse_ring, delta_ring, k_tile, v_tile, kv_full, full, empty,
                    total, first_j, kv_head, low, high, end, tokens, GROUP, BM, STAGES,
                )),
            ],
            [1],
            [24],
        )  # fmt: skip


@kernel
def finish_kernel(  # type: ignore[no-untyped-def]
    workspace, dq, cu, documents, blocks, scale, H: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, BM: tl.constexpr,
):  # fmt: skip
    """Write one tile of queries of one head from the workspace ``[H, blocks, BM * DP]`` to dq ``[T, H, D]``, times the
    scale."""
    document, tile = find_tile(tl.program_id(0), cu, documents, BM)
    start = tl.load(cu + document) + tile * BM
    end = tl.load(cu + document + 1)
    if start < end:
        head = tl.program_id(1)
        from_block = workspace + (head.to(tl.int64) * blocks + tl.program_id(0)) * (BM * DP)
        part = tl.load(from_block + tl.arange(0, BM * DP)).reshape(2, 4, DP // 16, 8, 4, 2, 2)
        part = part.permute(1, 5, 3, 0, 2, 4, 6).reshape(BM, DP)  # back from ``_in_fragment_order``
        i = start + tl.arange(0, BM)
        d = tl.arange(0, DP)
        at = (i[:, None].to(tl.int64) * H + head) * D + d[None, :]
        tl.store(dq + at, (part * scale).to(dq.dtype.element_ty), (i < end)[:, None] & (d < D)[None, :])


# --------------------------------------------------------------------------------------------------------- launcher


def _columns(d: int) -> int:
    return 64 if d <= 64 else 128


def _tile_layout() -> Any:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)


def backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, cu_seqlens: Tensor, scale: float,
    causal: bool = True, window: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute the gradients of q, k and v from the upstream gradient, L and D ``[H, T]`` float32.

    Raises:
        ValueError: shapes that do not fit each other, or inputs that this kernel does not take.
    """
    q, k, v = check(q, k, v, cu_seqlens)
    g, lse, delta = g.contiguous(), lse.contiguous(), delta.contiguous()
    if not takes(q, k, v) or not fits_descriptor(g):
        raise ValueError(
            f"the Hopper kernel takes bfloat16 or float16 on an sm_90, heads of 64, 96 or 128 and rows at multiples of "
            f"16 bytes, not {q.dtype} with heads of {q.shape[2]} on {q.device}; use flash_attention_backward.backward"
        )
    tokens, heads, d = q.shape
    columns = _columns(d)
    dq, dk, dv = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v))
    documents = len(cu_seqlens) - 1
    blocks = tokens // BM + documents
    workspace = torch.zeros((heads, blocks, BM * columns), dtype=torch.float32, device=q.device)
    q_tiles, g_tiles = (tensor_descriptor(t, [BM, 1, columns], _tile_layout()) for t in (q, g))
    k_tiles, v_tiles = (tensor_descriptor(t, [BN, 1, columns], _tile_layout()) for t in (k, v))
    gradient_kernel[(tokens // BN + documents, k.shape[1])](
        q_tiles, k_tiles, v_tiles, g_tiles, lse, delta, workspace, dk, dv, cu_seqlens, documents, tokens,
        blocks, scale, scale * LOG2E, window or 0, H=heads, GROUP=heads // k.shape[1], D=d, DP=columns, BM=BM, BN=BN,
        STAGES=STAGES, CAUSAL=causal, WINDOW=window is not None, num_warps=8,
    )  # fmt: skip
    finish_kernel[(blocks, heads)](
        workspace, dq, cu_seqlens, documents, blocks, scale, H=heads, D=d, DP=columns, BM=BM, num_warps=4
    )  # fmt: skip
    return dq, dk, dv


def kernels() -> Sequence[Kernel]:
    """Return the kernels to compile ahead of time."""
    if gluon is None:
        return []
    tiles = {
        n: f"tensordesc<bf16[{size}, 1, 128],{_tile_layout()!r}>"
        for n, size in {"q": BM, "k": BN, "v": BN, "g": BM}.items()
    }
    rows = dict.fromkeys(("lse", "delta"), "*fp32")
    ints = dict.fromkeys(("documents", "tokens", "blocks", "window"), "i32")
    return [
        Kernel(
            name=f"backward_hopper_{name}",
            function=gradient_kernel,
            arguments={
                **tiles, **rows, "dq": "*fp32", "dk": "*bf16", "dv": "*bf16", "cu": "*i32", "scale": "fp32",
                "scale2": "fp32", **ints,
            },
            constants={
                "H": 32, "GROUP": 4, "D": 128, "DP": 128, "BM": BM, "BN": BN, "STAGES": STAGES, "CAUSAL": causal,
                "WINDOW": window,
            },
            warps=8,
            targets=("sm_90",),
            implementation="hopper",
        )
        for name, causal, window in (("causal", True, False), ("full", False, False), ("window", True, True))
    ]  # fmt: skip
