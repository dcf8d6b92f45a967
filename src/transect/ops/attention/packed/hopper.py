"""Flash attention forward for Hopper GPUs: warps that only load, warps that only compute, products beside the softmax.

The math, the arguments and the kernel for every other GPU (and for the interpreter) are in ``flash_attention.py``. This
file computes the same o and L in 16-bit formats, with what only Hopper has. It is written in Gluon, the dialect of
Triton that spells out layouts, shared memory, barriers and the roles of warps.

A tile is 128 queries of one head. The warps of a program have two kinds of roles (``forward_kernel``):

* One warp *fetches*. It chooses the tile, and has the bulk copy engine (TMA) bring its queries, and then blocks of 128
  keys and values into a ring in shared memory, as far ahead as the ring has room. It needs only 24 registers a thread.
* Two *warpgroups* of 4 warps *attend*, each for 64 of the queries, with 240 registers a thread: 64 for the output, 64
  for the scores of a block, 32 for its probabilities. (For full attention with heads of 64 there are three, and 192
  queries: half the output to hold, and more exponentials to hide behind each product.)

They meet at barriers in shared memory (mbarriers): ``full[slot]`` when a copy has arrived, ``empty[slot]`` when every
warpgroup has read it. The ring is one queue in the order of use: K0, K1, V0, K2, V1, ... Blocks run from the last key
to the first, so that the one which needs a mask comes first.

In a warpgroup the tensor cores and the exponentials take turns by default. So a step issues two products without
waiting: the scores of the *next* block, q k', and the output of *this* one, p v. The softmax of the next block starts
when its scores are there, and runs while p v still does (``walk``). Between the warpgroups nothing is arranged: while
one waits for its scores, the other computes exponentials.

There is one program for each multiprocessor. It takes tiles from a shared counter, those with most keys first, and
loads the queries of the next tile while it finishes this one. Which program computes a tile changes from run to run.
The result does not, to the bit, because nothing is added up across programs.

Bound by the tensor cores, and for heads of 64 as much by the exponential units. For each block with heads of 128 a
multiprocessor spends 2048 cycles on products, and its exponential units, 16 a cycle, spend 1024 on the softmax beside
them. Little overlaps at the beginning and the end of a tile (the first block's scores and softmax, the last product,
the stores), so short documents pay more.

Source: Shah et al. 2024, arXiv:2407.08608 (roles, overlap); Milakov & Gimelshein 2018, arXiv:1805.02867 (softmax).
Counters, and what was tried and lost, are in ``docs/lab-notes/attention.md``.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache, partial
from typing import Any

import torch
from torch import Tensor

from ....hardware.device import target_of
from ...lang.gluon_language import (
    GLUON_MISSING,
    async_load,
    fence_async_shared,
    gl,
    gluon,
    gluon_kernel,
    mbarrier,
    tensor_descriptor,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ...lang.jit import INTERPRETED, multiprocessors, triton
from ...registry import Kernel, Unavailable
from .hopper_tiles import (
    AHEAD,
    COLUMNS,
    MAX_REGISTERS,
    ROWS,
    mask,
    matrix,
    next_item,
    note_plan,
    reach,
    run_of,
    softmax,
    walk,
)
from .tiling import LOG2E, check, fits_descriptor

HEAD_DIMS = (64, 96, 128)


# ---------------------------------------------------------------------------------------------------------- kernels


@gluon_kernel
def _find(index, cu, documents, tiles, SHARE: gl.constexpr, ROWS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return (first query, begin and end of its document, head) of work item ``index``.

    Heads are taken SHARE at a time, so that their keys and values stay in the L2 cache; of a document the last tile
    comes first, because with a causal mask it takes longest.
    """
    part = index // (tiles * SHARE)
    rest = index % (tiles * SHARE)
    tile = tiles - 1 - rest // SHARE
    head = part * SHARE + rest % SHARE
    document = run_of(tile, cu, documents, ROWS)
    begin = gl.load(cu + document)
    end = gl.load(cu + document + 1)
    return begin + (tile - begin // ROWS - document) * ROWS, begin, end, head


@gluon_kernel
def _attend(  # type: ignore[no-untyped-def]
    part: gl.constexpr, PARTS: gl.constexpr, q_tiles, plan, ring, q_full, q_empty, full, empty, out, lse, tokens,
    scale2, window, H: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    """Run a warpgroup: attend with 64 queries of every tile."""
    ROWS: gl.constexpr = q_tiles.shape[1]
    COLUMNS: gl.constexpr = ring.shape[1]
    DP: gl.constexpr = q_tiles.shape[3]
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DP, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O, k_width=2)
    STORE: gl.constexpr = gl.BlockedLayout([1, 8], [256 // DP, DP // 8], [4, 1], [1, 0])
    zero = gl.zeros([ROWS, COLUMNS], gl.float32, S)
    queue = 0
    done = 0
    first_i, begin, end, head = _planned(plan, q_full, done)
    while head >= 0:
        q = matrix(q_tiles.index(done % 2 * PARTS + part))
        low, low_full, high_full, high = reach(first_i, begin, end, window, PARTS * ROWS, COLUMNS, CAUSAL, WINDOW)
        i = first_i + part * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, S))
        acc = gl.zeros([ROWS, DP], gl.float32, O)
        m = gl.full([ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, S))
        l = gl.zeros([ROWS], gl.float32, gl.SliceLayout(1, S))
        queue_end = queue + 2 * (high - low)
        # The last block: always masked, and mostly the only one that needs it.
        slot = queue % SLOTS
        mbarrier.wait(full.index(slot), queue // SLOTS & 1)
        s = warpgroup_mma(q, matrix(ring.index(slot)).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, (s,))
        mbarrier.arrive(empty.index(slot))
        s = mask(s, i, begin + (high - 1) * COLUMNS, end, window, CAUSAL, WINDOW)
        soft, m, l, _ = softmax(s, m, l, scale2, True)
        p = gl.convert_layout(soft.to(q.dtype), P)
        queue += 1
        mbarrier.wait(full.index(queue % SLOTS), queue // SLOTS & 1, pred=queue + 1 < queue_end)
        acc, p, m, l, queue = walk(
            acc, p, m, l, queue, queue_end, low, high - 1, low_full, high_full, q, ring, full, empty, i, begin, end,
            window, scale2, SLOTS, CAUSAL, WINDOW, WINDOW or (CAUSAL and PARTS * ROWS > COLUMNS), S, P,
        )  # fmt: skip
        mbarrier.arrive(q_empty.index(done % 2))
        slot = queue % SLOTS
        mbarrier.wait(full.index(slot), queue // SLOTS & 1)
        acc = warpgroup_mma(p, matrix(ring.index(slot)), acc, is_async=True)
        gl.store(lse + head.to(gl.int64) * tokens + i, m + gl.log2(l), i < end)
        acc = warpgroup_mma_wait(0, (acc,))
        mbarrier.arrive(empty.index(slot))
        queue += 1
        acc = acc * gl.convert_layout(1.0 / l, gl.SliceLayout(1, O))[:, None]
        token = first_i + part * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, STORE))
        d = gl.arange(0, DP, layout=gl.SliceLayout(0, STORE))
        at = out + token[:, None].to(gl.int64) * (H * D) + head * D + d[None, :]
        inside = (token < end)[:, None] & (d < D)[None, :]
        gl.store(at, gl.convert_layout(acc.to(out.dtype.element_ty), STORE), inside)
        done += 1
        first_i, begin, end, head = _planned(plan, q_full, done)


@gluon_kernel
def _planned(plan, q_full, done):  # type: ignore[no-untyped-def]
    """Wait for the next tile: (first query, begin and end of its document, head), head -1 when there is none."""
    ALL: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    buffer = done % 2
    mbarrier.wait(q_full.index(buffer), done // 2 & 1)
    first_i = gl.max(plan.index(4 * buffer).load(ALL), 0)
    begin = gl.max(plan.index(4 * buffer + 1).load(ALL), 0)
    end = gl.max(plan.index(4 * buffer + 2).load(ALL), 0)
    head = gl.max(plan.index(4 * buffer + 3).load(ALL), 0)
    return first_i, begin, end, head


@gluon_kernel
def _copy(source, token, head, ring, full, empty, queue, SLOTS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Ask for the next block of ``source`` at place ``queue`` of the ring, when that is free."""
    slot = queue % SLOTS
    mbarrier.wait(empty.index(slot), (queue // SLOTS & 1) ^ 1)
    mbarrier.expect(full.index(slot), source.block_type.nbytes)
    async_load(source, [token, head, 0], full.index(slot), ring.index(slot))


@gluon_kernel
def _seek(  # type: ignore[no-untyped-def]
    index, counter, cu, documents, tiles, work, SHARE: gl.constexpr, ROWS: gl.constexpr, SHARED_OUT: gl.constexpr
):
    """Find the first work item from ``index`` on that belongs to this program and has queries."""
    first_i = 0
    begin = 0
    end = 0
    head = 0
    while (index < work) & (first_i >= end):
        first_i, begin, end, head = _find(index, cu, documents, tiles, SHARE, ROWS)
        if first_i >= end:
            index = next_item(counter, work, SHARED_OUT)
    return index, first_i, begin, end, head


@gluon_kernel
def _copy_pairs(k, v, start, head, count, ring, full, empty, queue, SLOTS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Copy ``count`` times the keys before token ``start`` and the values from it on."""
    COLUMNS: gl.constexpr = ring.shape[1]
    for _ in range(count):
        _copy(k, start - COLUMNS, head, ring, full, empty, queue, SLOTS)
        _copy(v, start, head, ring, full, empty, queue + 1, SLOTS)
        start -= COLUMNS
        queue += 2
    return start, queue


@gluon_kernel
def _fetch(  # type: ignore[no-untyped-def]
    q, k, v, q_tiles, plan, ring, q_full, q_empty, full, empty, counter, cu, documents, tiles, work, window,
    PARTS: gl.constexpr, GROUP: gl.constexpr, SLOTS: gl.constexpr, SHARE: gl.constexpr, CAUSAL: gl.constexpr,
    WINDOW: gl.constexpr, SHARED_OUT: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Run the copying warp: choose tiles, announce them to the warpgroups, and keep the ring full.

    It requests the next tile AHEAD blocks before the end of this one: late, so that the first free block gets the tile,
    and early enough for its queries to arrive in time.
    """
    ROWS: gl.constexpr = q_tiles.shape[1]
    COLUMNS: gl.constexpr = ring.shape[1]
    queue = 0
    told = 0
    index, first_i, begin, end, head = _seek(
        gl.program_id(0), counter, cu, documents, tiles, work, SHARE, PARTS * ROWS, SHARED_OUT
    )
    while index < work:
        buffer = told % 2
        mbarrier.wait(q_empty.index(buffer), (told // 2 & 1) ^ 1)
        note_plan(plan, 4 * buffer, first_i)
        note_plan(plan, 4 * buffer + 1, begin)
        note_plan(plan, 4 * buffer + 2, end)
        note_plan(plan, 4 * buffer + 3, head)
        mbarrier.expect(q_full.index(buffer), PARTS * q.block_type.nbytes)
        for part in gl.static_range(PARTS):
            async_load(q, [first_i + part * ROWS, head, 0], q_full.index(buffer), q_tiles.index(buffer * PARTS + part))
        low, _, _, high = reach(first_i, begin, end, window, PARTS * ROWS, COLUMNS, CAUSAL, WINDOW)
        kv_head = head // GROUP
        start = begin + (high - 1) * COLUMNS
        _copy(k, start, kv_head, ring, full, empty, queue, SLOTS)
        pairs = high - low - 1
        early = gl.maximum(pairs - AHEAD, 0)
        start, queue = _copy_pairs(k, v, start, kv_head, early, ring, full, empty, queue + 1, SLOTS)
        index, first_i, begin, end, head = _seek(
            next_item(counter, work, SHARED_OUT), counter, cu, documents, tiles, work, SHARE, PARTS * ROWS, SHARED_OUT
        )
        start, queue = _copy_pairs(k, v, start, kv_head, pairs - early, ring, full, empty, queue, SLOTS)
        _copy(v, start, kv_head, ring, full, empty, queue, SLOTS)
        queue += 1
        told += 1
    buffer = told % 2
    mbarrier.wait(q_empty.index(buffer), (told // 2 & 1) ^ 1)
    note_plan(plan, 4 * buffer + 3, -1)
    mbarrier.arrive(q_full.index(buffer))


@partial(gluon_kernel, sizes=("documents", "tokens", "tiles", "work", "window"))
def forward_kernel(  # type: ignore[no-untyped-def]
    q, k, v, out, lse, counter, cu, documents, tokens, tiles, work, scale2, window, PARTS: gl.constexpr,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr, SHARE: gl.constexpr,
    CAUSAL: gl.constexpr, WINDOW: gl.constexpr, SHARED_OUT: gl.constexpr, AHEAD: gl.constexpr,
):  # fmt: skip
    """Attend with tiles of 64 PARTS queries; q, k and v are descriptors of [T, H, d].

    Program n begins with piece n of ``work`` = tiles * H, and if SHARED_OUT takes its next ones from ``counter``, which
    starts at 0.
    """
    DTYPE: gl.constexpr = out.dtype.element_ty
    q_tiles = gl.allocate_shared_memory(DTYPE, [2 * PARTS, q.block_shape[0], 1, q.block_shape[2]], q.layout)
    ring = gl.allocate_shared_memory(DTYPE, [SLOTS, k.block_shape[0], 1, k.block_shape[2]], k.layout)
    plan = gl.allocate_shared_memory(gl.int32, [8, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(2):
        mbarrier.init(q_full.index(buffer), count=1)
        mbarrier.init(q_empty.index(buffer), count=PARTS)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=PARTS)
    fence_async_shared()
    if PARTS == 2:
        gl.warp_specialize(
            [
                (_attend, (0, PARTS, q_tiles, plan, ring, q_full, q_empty, full, empty, out, lse, tokens, scale2,
                           window, H, D, SLOTS, CAUSAL, WINDOW)),
                (_attend, (1, PARTS, q_tiles, plan, ring, q_full, q_empty, full, empty, out, lse, tokens, scale2,
                           window, H, D, SLOTS, CAUSAL, WINDOW)),
                (_fetch, (q, k, v, q_tiles, plan, ring, q_full, q_empty, full, empty, counter, cu, documents, tiles,
                          work, window, PARTS, GROUP, SLOTS, SHARE, CAUSAL, WINDOW, SHARED_OUT, AHEAD)),
            ],
            [4, 1],
            [240, 24],
        )  # fmt: skip
    else:
        gl.warp_specialize(
            [
                (_attend, (0, PARTS, q_tiles, plan, ring, q_full, q_empty, full, empty, out, lse, tokens, scale2,
                           window, H, D, SLOTS, CAUSAL, WINDOW)),
                (_attend, (1, PARTS, q_tiles, plan, ring, q_full, q_empty, full, empty, out, lse, tokens, scale2,
                           window, H, D, SLOTS, CAUSAL, WINDOW)),
                (_attend, (2, PARTS, q_tiles, plan, ring, q_full, q_empty, full, empty, out, lse, tokens, scale2,
                           window, H, D, SLOTS, CAUSAL, WINDOW)),
                (_fetch, (q, k, v, q_tiles, plan, ring, q_full, q_empty, full, empty, counter, cu, documents, tiles,
                          work, window, PARTS, GROUP, SLOTS, SHARE, CAUSAL, WINDOW, SHARED_OUT, AHEAD)),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- launcher


def takes(q: Tensor, k: Tensor, v: Tensor) -> bool:
    """Return True if this kernel takes these inputs without a copy or a conversion.

    It needs 16 bits on an sm_90, heads of 64, 96 (computed as 128) or 128, and rows that the bulk copy engine can
    address.
    """
    return not _input_refusal(q, k, v) and all(fits_descriptor(t) and min(t.stride()) > 0 for t in (q, k, v))


def pays(q: Tensor, documents: int) -> bool:
    """Return True if this kernel is faster than the portable one, whose tiles have half as many queries.

    Measured on an H200: if every multiprocessor gets a tile, for documents of 96 tokens or more on average.
    """
    tokens, heads = q.shape[:2]
    return tokens >= 96 * documents and tokens * heads >= 2 * ROWS * multiprocessors(q.device)


def refusal(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = True, window: int | None = None
) -> str | None:
    """Return the reason why this kernel does not take heads of this size; None if it does."""
    return None if q.shape[2] in HEAD_DIMS else f"the Hopper kernel takes heads of {HEAD_DIMS}, not of {q.shape[2]}"


def _input_refusal(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    reason = device_refusal() or refusal(q, k, v, q, 1.0)
    if not reason and not (q.is_cuda and target_of(q.device).hopper):
        reason = f"the Hopper kernel runs on an sm_90, and the inputs are on {q.device}"
    if not reason and not (q.dtype == k.dtype == v.dtype and q.dtype in (torch.bfloat16, torch.float16)):
        reason = f"the Hopper kernel takes bfloat16 or float16, not {q.dtype}, {k.dtype} and {v.dtype}"
    return reason


def _columns(d: int) -> int:
    return 64 if d <= 64 else 128


@cache
def _layout() -> Any:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)


def _descriptor(t: Tensor, rows: int) -> Any:
    return tensor_descriptor(t, [rows, 1, _columns(t.shape[2])], _layout())


@lru_cache(1024)
def share_of(heads: int, group: int, tokens: int, documents: int, d: int) -> int:
    """Return the number of heads processed at a time.

    Their keys and values take 16 MB together, which leaves most of the L2 cache free; heads that share a key head are
    never separated.
    """
    key_heads = max(1, 2**24 // (4 * d * max(1, tokens // documents)))
    return max(n for n in range(1, heads + 1) if heads % n == 0 and n <= max(group, key_heads * group))


def forward(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = True, window: int | None = None,
    *, parts: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run ``flash_attention.forward`` by this kernel; inputs that the bulk copy engine cannot address are copied.

    ``parts``: warpgroups that compute, 2, or 3 for heads of 64.

    Raises:
        ValueError: shapes that do not fit each other, or inputs that this kernel does not take.
    """
    q, k, v = check(q, k, v, cu_seqlens)
    tokens, heads, d = q.shape
    parts = parts or (3 if d <= 64 and not causal and window is None else 2)
    reason = _input_refusal(q, k, v) or (parts == 3 and d > 64 and "3 parts are for heads of 64") or None
    if reason:
        raise ValueError(f"{reason}; use flash_attention.forward")
    q, k, v = (t if fits_descriptor(t) and min(t.stride()) > 0 else t.clone(memory_format=torch.contiguous_format)
               for t in (q, k, v))  # fmt: skip
    out = torch.empty((tokens, heads, d), dtype=q.dtype, device=q.device)
    lse = torch.empty((heads, tokens), dtype=torch.float32, device=q.device)
    if out.numel() == 0:
        return out, lse
    documents = len(cu_seqlens) - 1
    tiles = triton.cdiv(tokens, ROWS * parts) if documents == 1 else tokens // (ROWS * parts) + documents
    work = tiles * heads
    group = heads // k.shape[1]
    programs = min(work, multiprocessors(q.device))
    shared_out = work > programs
    counter = torch.zeros(1, dtype=torch.int32, device=q.device) if shared_out else cu_seqlens  # else not looked at
    forward_kernel[(programs,)](
        _descriptor(q, ROWS), _descriptor(k, COLUMNS), _descriptor(v, COLUMNS), out, lse, counter, cu_seqlens,
        documents, tokens, tiles, work, scale * LOG2E, window or 0, PARTS=parts, H=heads, GROUP=group, D=d,
        SLOTS=512 // _columns(d), SHARE=share_of(heads, group, tokens, documents, d), CAUSAL=causal,
        WINDOW=window is not None, SHARED_OUT=shared_out, AHEAD=AHEAD, num_warps=4, maxnreg=MAX_REGISTERS[parts],
    )  # fmt: skip
    return out, lse


def flash_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, scale: float, causal: bool = True, window: int | None = None
) -> Tensor:
    """Compute ``flash_attention.flash_attention`` by this kernel."""
    return forward(q, k, v, cu_seqlens, scale, causal, window)[0]


def kernels() -> Sequence[Kernel]:
    """Return the kernels to compile ahead of time."""
    if gluon is None:
        return []
    ints = dict.fromkeys(("documents", "tokens", "tiles", "work", "window"), "i32")
    pointers = {"out": "*bf16", "lse": "*fp32", "counter": "*i32", "cu": "*i32"}
    made = []
    for name, d, parts, causal, window in (
        ("causal", 128, 2, True, False),
        ("full", 128, 2, False, False),
        ("window", 128, 2, True, True),
        ("heads_of_64", 64, 3, False, False),
    ):
        boxes = (("q", ROWS), ("k", COLUMNS), ("v", COLUMNS))
        tensors = {label: f"tensordesc<bf16[{rows}, 1, {d}],{_layout()!r}>" for label, rows in boxes}
        sizes = {"PARTS": parts, "H": 32, "GROUP": 4, "D": d, "SLOTS": 512 // d, "SHARE": 8}
        made.append(
            Kernel(
                name=f"forward_hopper_{name}",
                function=forward_kernel,
                arguments={**tensors, **pointers, "scale2": "fp32", **ints},
                constants={**sizes, "CAUSAL": causal, "WINDOW": window, "SHARED_OUT": True, "AHEAD": AHEAD},
                targets=("sm_90",),
                implementation="hopper",
                options={"maxnreg": MAX_REGISTERS[parts]},
            )
        )
    return made


@cache
def device_refusal() -> str | None:
    """Return the reason why no input at all can run here; None if it can. Every layer asks, so the answer is cached."""
    if gluon is None:
        return f"the Hopper kernel needs Triton's Gluon: {GLUON_MISSING}"
    if INTERPRETED or not torch.cuda.is_available() or torch.version.hip is not None:
        return "the Hopper kernel needs an NVIDIA GPU (sm_90)"
    if not target_of().hopper:
        return "the Hopper kernel is for sm_90 only"
    return None


def available(launcher: Any) -> Any:
    """Return the ``Implementation.load`` of a launcher that may run this kernel.

    Raises (when called):
        Unavailable: no Gluon, or not a Hopper GPU.
    """

    def load() -> Any:
        reason = device_refusal()
        if reason:
            raise Unavailable(reason)
        return launcher

    return load
