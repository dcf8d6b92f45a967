"""Prefill chunks over a paged cache on Hopper GPUs: the bulk copy engine gathers the blocks of the cache.

The math and the arguments are in ``paged_attention.py``. The roles of the warps, the ring of keys and values, and the
overlap of products and softmax are those of ``packed/hopper.py``. The differences:

* A tile is 128 rows of one key head: queries with the G heads that share it, side by side, as the bulk copy brings them
  from ``[T, H, d]``. It copies powers of two, so for other G (3, 5, 7) each warpgroup loads its own queries, as many as
  fit 64 rows: 21 of 3 heads, 9 of 7. One row of 64 is then idle, where the next power of two would leave 16 or 8 idle.
* Heads of 96 are computed as 128: copies that reach past the end of a head give zeros.
* With heads of 256 the sums of 64 rows take half of the registers, and a block has 64 keys instead of 128. Queries come
  as for 3, 5 and 7 heads, and results are stored as the tensor cores leave them: shared memory has no room left.
* Two warps copy instead of one, out of the pages of the cache (``prefill_copies.py``).

It takes no sliding window: positions before a window would need the same treatment. Rows of one query belong to the
decode kernel. Which program computes a tile changes from run to run; the result does not.

Bound by the tensor cores, as flash attention is; 4 d FLOPs for each visible pair and head.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from ...lang.gluon_language import (
    block_barrier,
    fence_async_shared,
    gl,
    gluon,
    gluon_kernel,
    mbarrier,
    reinterpreted,
    tensor_descriptor,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from ...lang.jit import multiprocessors, next_power_of_2
from ...registry import Kernel
from ..packed.hopper import device_refusal
from ..packed.hopper_tiles import AHEAD, COLUMNS, MAX_REGISTERS, ROWS, mask, matrix, reach, softmax, walk
from ..packed.tiling import LOG2E
from .batch import PagedBatch
from .prefill_copies import _HALF, _PARTS, _ROWS, HALF, PARTS, _fetch_keys, _fetch_values, _planned

__all__ = ["device_refusal", "kernels", "prefill", "refusal"]

HEAD_DIMS = (64, 96, 128, 256)


@gluon_kernel
def _here(x):  # type: ignore[no-untyped-def]
    """Return x, hidden from the compiler until this point, so that values computed from x take no registers earlier."""
    return gl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [x], dtype=gl.int32, is_pure=False, pack=1)


@gluon_kernel
def _attend(  # type: ignore[no-untyped-def]
    part: gl.constexpr, q, q_t, q_h, q_tiles, plan, ring, q_full, q_empty, full, empty, out, scale2, H: gl.constexpr,
    GROUP: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr, COPIED: gl.constexpr,
):  # fmt: skip
    """Run a warpgroup: attend with 64 rows of every tile.

    Where rows are found is computed before the loop over keys and again after it (``_here``). Kept, it would
    leave the loop so few registers that the compiler computes the softmax of a thread's two rows one after the other.
    """
    DP: gl.constexpr = q_tiles.shape[3]
    COLUMNS: gl.constexpr = ring.shape[1]
    MINE: gl.constexpr = _ROWS // GROUP
    QUERIES: gl.constexpr = _PARTS * MINE
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DP, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O, k_width=2)
    STORE: gl.constexpr = O if DP == 256 else gl.BlockedLayout([1, 8], [256 // DP, DP // 8], [4, 1], [1, 0])
    rows = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, STORE))
    d = gl.arange(0, DP, layout=gl.SliceLayout(0, STORE))
    zero = gl.zeros([_ROWS, COLUMNS], gl.float32, S)
    queue = 0
    done = 0
    token, end, position, length, head, _ = _planned(plan, q_full, done, 4)
    while head >= 0:
        if COPIED:
            tile = q_tiles.index(done % 2 * _PARTS + part).reshape((_ROWS, DP))
        else:
            tile = q_tiles.index(part).reshape((_ROWS, DP))
            r = _here(rows)
            mine = token + part * MINE + r // GROUP
            own = (r < MINE * GROUP)[:, None] & (d < D)[None, :]
            at = q + mine[:, None].to(gl.int64) * q_t + (head * GROUP + r % GROUP)[:, None] * q_h + d[None, :]
            x = gl.load(at, own & (mine < end)[:, None], 0.0)
            block_barrier()  # all warps are done with the tile before
            tile.store(x)
            fence_async_shared()
            block_barrier()
        _, _, high_full, high = reach(position, 0, length, 0, QUERIES, COLUMNS, True, False)
        i = position + part * MINE + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, S)) // GROUP
        acc = gl.zeros([_ROWS, DP], gl.float32, O)
        m = gl.full([_ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, S))
        l = gl.zeros([_ROWS], gl.float32, gl.SliceLayout(1, S))
        queue_end = queue + 2 * high
        slot = queue % SLOTS
        mbarrier.wait(full.index(slot), queue // SLOTS & 1)
        s = warpgroup_mma(tile, matrix(ring.index(slot)).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, (s,))
        mbarrier.arrive(empty.index(slot))
        s = mask(s, i, (high - 1) * COLUMNS, length, 0, True, False)
        soft, m, l, _ = softmax(s, m, l, scale2, True)
        p = gl.convert_layout(soft.to(tile.dtype), P)
        queue += 1
        mbarrier.wait(full.index(queue % SLOTS), queue // SLOTS & 1, pred=queue + 1 < queue_end)
        # A tile may begin anywhere, so the block before the last may need a mask as well.
        acc, p, m, l, queue = walk(
            acc, p, m, l, queue, queue_end, 0, high - 1, 0, high_full, tile, ring, full, empty, i, 0, length, 0, scale2,
            SLOTS, True, False, True, S, P,
        )  # fmt: skip
        mbarrier.arrive(q_empty.index(done % 2))
        slot = queue % SLOTS
        mbarrier.wait(full.index(slot), queue // SLOTS & 1)
        acc = warpgroup_mma(p, matrix(ring.index(slot)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, (acc,))
        mbarrier.arrive(empty.index(slot))
        queue += 1
        acc = acc * gl.convert_layout(1.0 / l, gl.SliceLayout(1, O))[:, None]
        r = _here(rows)
        mine = token + part * MINE + r // GROUP
        own = (r < MINE * GROUP)[:, None] & (d < D)[None, :]
        at = out + mine[:, None].to(gl.int64) * (H * D) + (head * GROUP + r % GROUP)[:, None] * D + d[None, :]
        gl.store(at, gl.convert_layout(acc.to(out.dtype.element_ty), STORE), own & (mine < end)[:, None])
        done += 1
        token, end, position, length, head, _ = _planned(plan, q_full, done, 4)


@partial(gluon_kernel, sizes=("count", "tiles", "work", "blocks", "table_b", "share"))
def prefill_kernel(  # type: ignore[no-untyped-def]
    q, k, v, k_runs, v_runs, out, counter, tables, starts, lengths, count, tiles, work, blocks, table_b, share, scale2,
    q_t, q_h, H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, SLOTS: gl.constexpr,
    COLUMNS: gl.constexpr, SHARED_OUT: gl.constexpr, AHEAD: gl.constexpr, COPIED: gl.constexpr,
):  # fmt: skip
    """Attend to a paged cache. q describes ``[T, H, d]`` in boxes of 64 rows (without COPIED it is a pointer), k and v
    the caches in boxes of a block and 64 columns, k_runs and v_runs in boxes of as many blocks as hold COLUMNS keys.

    Program n begins with piece n of ``work`` = tiles * K, and if SHARED_OUT takes its next ones from ``counter``, which
    starts at 0.
    """
    DTYPE: gl.constexpr = out.dtype.element_ty
    DP: gl.constexpr = 64 if D == 64 else 256 if D == 256 else 128
    LAYOUT: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=3)
    # Queries come a tile ahead where they are copied.
    q_tiles = gl.allocate_shared_memory(
        DTYPE,
        [2 * _PARTS if COPIED else _PARTS, _ROWS // GROUP if COPIED else _ROWS, GROUP if COPIED else 1, DP],
        LAYOUT,
    )
    ring = gl.allocate_shared_memory(DTYPE, [SLOTS, COLUMNS, 1, DP], LAYOUT)
    pieces = reinterpreted(ring, DTYPE, [SLOTS * (COLUMNS // BLOCK) * (DP // _HALF), 1, 1, BLOCK, _HALF], k.layout)
    runs = reinterpreted(ring, DTYPE, [SLOTS * (DP // _HALF), COLUMNS // BLOCK, 1, BLOCK, _HALF], k.layout)
    plan = gl.allocate_shared_memory(gl.int32, [16, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [SLOTS + 1, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(2):
        mbarrier.init(q_full.index(buffer), count=1)
        mbarrier.init(q_empty.index(buffer), count=_PARTS + 1)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=_PARTS)
    mbarrier.init(full.index(SLOTS), count=1)  # for values of which a part is cleared
    fence_async_shared()
    gl.warp_specialize(
        [
            (_attend, (0, q, q_t, q_h, q_tiles, plan, ring, q_full, q_empty, full, empty, out, scale2, H, GROUP, D,
                         SLOTS, COPIED)),
            (_attend, (1, q, q_t, q_h, q_tiles, plan, ring, q_full, q_empty, full, empty, out, scale2, H, GROUP, D,
                         SLOTS, COPIED)),
            (_fetch_keys, (q, k, k_runs, q_tiles, plan, pieces, runs, q_full, q_empty, full, empty, counter,
                           tables, starts, lengths, count, tiles, work, blocks, table_b, share, GROUP, COLUMNS, BLOCK,
                           SLOTS, SHARED_OUT, AHEAD, COPIED)),
            (_fetch_values, (v, v_runs, plan, pieces, runs, q_full, q_empty, full, empty, tables, blocks, table_b,
                             GROUP, COLUMNS, BLOCK, SLOTS)),
        ],
        [4, 1, 1],
        [232, 40, 40],  # registers of a thread that computes, and of those that fetch
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- launcher


@cache
def _layout(rank: int) -> Any:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


def padded(d: int) -> int:
    """Return the columns of a tile that holds heads of ``d``."""
    return max(64, next_power_of_2(d))


def _sizes(d: int, group: int) -> dict[str, Any]:
    """Choose the keys of a block, the number of blocks in the ring, and if a copy loads the queries, for ``group``
    heads of ``d`` to a key head."""
    if d > 128:
        return {"COLUMNS": COLUMNS // 2, "SLOTS": 4, "COPIED": False}
    return {"COLUMNS": COLUMNS, "SLOTS": 512 // padded(d), "COPIED": group & (group - 1) == 0}


def refusal(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, scale: float, window: int | None = None
) -> str | None:
    """Return the reason why this kernel does not take these inputs; None if it does."""
    group = q.shape[1] // k_cache.shape[1]
    block = k_cache.shape[2]
    reason = device_refusal()
    if not reason and batch.decodes_only(len(q)):
        reason = "rows of one query are for the decode kernel"
    if not reason and window is not None:
        reason = "it attends without a window"
    if not reason and not (q.dtype == k_cache.dtype == v_cache.dtype and q.dtype in (torch.bfloat16, torch.float16)):
        reason = f"it takes bfloat16 or float16, not {q.dtype}, {k_cache.dtype} and {v_cache.dtype}"
    if not reason and (q.shape[2] not in HEAD_DIMS or group > ROWS):
        reason = f"it takes heads of {HEAD_DIMS}, up to {ROWS} to a key head, not {group} of {q.shape[2]}"
    most = _sizes(q.shape[2], group)["COLUMNS"]
    if not reason and (block & (block - 1) or not 8 <= block <= most):
        reason = f"it takes blocks of 8 to {most} tokens, a power of two, not of {block}"
    if not reason and any(
        t.stride(-1) != 1 or t.data_ptr() % 16 or any(s % 8 or s <= 0 for s in t.stride()[:-1])
        for t in (q, k_cache, v_cache)
    ):
        reason = "it takes tensors whose rows begin at multiples of 16 bytes"
    return reason


def prefill(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, tables: Tensor, starts: Tensor, lengths: Tensor, longest: int,
    scale: float, out: Tensor,
) -> None:  # fmt: skip
    """Compute attention of the rows with several queries, and write it to their places in ``out`` ``[T, H, d]``.

    Arguments are those of ``PagedBatch``; ``longest``: a bound of the lengths.
    """
    tokens, heads, d = q.shape
    blocks, kv_heads, block, _ = k_cache.shape
    group = heads // kv_heads
    tiles = tokens // (PARTS * (ROWS // group)) + len(lengths)
    work = tiles * kv_heads
    # Little work needs no counter, which would have to be cleared by a launch of its own.
    units = multiprocessors(q.device)
    programs = work if work <= 2 * units else units
    shared_out = work > programs
    counter = torch.zeros(1, dtype=torch.int32, device=q.device) if shared_out else lengths  # else not looked at
    # This many key heads are processed at a time: keys and values of 16 MB together leave most of the L2 cache free.
    fit = max(1, 2**24 // (4 * d * max(1, longest)))
    share = max(n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and n <= fit)
    sizes = _sizes(d, group)
    prefill_kernel[(programs,)](
        tensor_descriptor(q, [ROWS // group, group, padded(d)], _layout(3)) if sizes["COPIED"] else q,
        *(
            tensor_descriptor(cache, [many, 1, block, HALF], _layout(4))
            for many in (1, sizes["COLUMNS"] // block)
            for cache in (k_cache, v_cache)
        ),
        out, counter, tables, starts, lengths, len(lengths), tiles, work, blocks, tables.stride(0), share,
        scale * LOG2E, q.stride(0), q.stride(1), H=heads, GROUP=group, D=d, BLOCK=block, SHARED_OUT=shared_out,
        AHEAD=AHEAD, **sizes,
        num_warps=4, maxnreg=MAX_REGISTERS[PARTS],
    )  # fmt: skip


def kernels() -> Sequence[Kernel]:
    """Return the kernels to compile ahead of time."""
    if gluon is None:
        return []
    made = []
    for d, group in ((128, 4), (64, 4), (96, 4), (256, 2), (128, 7), (128, 3), (64, 7)):
        block, sizes = 16, _sizes(d, group)
        copied = sizes["COPIED"]
        box = f"tensordesc<bf16[{ROWS // group}, {group}, {padded(d)}],{_layout(3)!r}>"
        tensors = {"q": box if copied else "*bf16"}
        for names, many in ((("k", "v"), 1), (("k_runs", "v_runs"), sizes["COLUMNS"] // block)):
            tensors |= dict.fromkeys(names, f"tensordesc<bf16[{many}, 1, {block}, {HALF}],{_layout(4)!r}>")
        pointers = {"out": "*bf16", **dict.fromkeys(("counter", "tables", "starts", "lengths"), "*i32")}
        ints = dict.fromkeys(("count", "tiles", "work", "blocks", "table_b", "share", "q_t", "q_h"), "i32")
        sizes |= {"H": 4 * group, "GROUP": group, "D": d, "BLOCK": block}
        made.append(
            Kernel(
                name=f"prefill_hopper_{d}" if copied else f"prefill_hopper_{d}_of_{group}",
                function=prefill_kernel,
                arguments={**tensors, **pointers, "scale2": "fp32", **ints},
                constants={**sizes, "SHARED_OUT": True, "AHEAD": AHEAD},
                divisible=("q_t", "q_h"),
                targets=("sm_90",),
                options={"maxnreg": MAX_REGISTERS[PARTS]},
            )
        )
    return made
