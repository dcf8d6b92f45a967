"""Prefill chunks over a paged cache on Hopper GPUs: the bulk copy engine gathers the blocks of the cache.

The math and the arguments are in ``paged_attention.py``. The roles of the warps, the ring of keys and values, and the
overlap of products and softmax are those of ``packed/hopper.py``. The differences:

* A tile is 128 rows of one key head: queries with the G heads that share it, side by side, as the bulk copy brings them
  from ``[T, H, d]``. It copies powers of two, so for other G (3, 5, 7) each warpgroup loads its own queries, as many as
  fit 64 rows: 21 of 3 heads, 9 of 7. One row of 64 is then idle, where the next power of two would leave 16 or 8 idle.
* Heads of 96 are computed as 128: copies that reach past the end of a head give zeros.
* With heads of 256 the sums of 64 rows take half of the registers, and a block has 64 keys instead of 128. Queries come
  as for 3, 5 and 7 heads, and results are stored as the tensor cores leave them: shared memory has no room left.
* The keys of a block come as blocks of the cache from wherever the block table says. Each copy brings 64 columns, the
  width that the copy engine swizzles. Shared memory is swizzled in units of 8 rows of 128 bytes, and a copy fills whole
  units. So the pieces together are the tile that one large copy would have made.
* A slot that the row does not own may hold NaN, and 0 * NaN is NaN. Blocks past the row's end are requested outside of
  the cache, where copies give zeros. The fetching warp overwrites the rest of the last block with zeros before it says
  that the values are there.

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
    async_load,
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
from ..packed.hopper import (
    AHEAD,
    COLUMNS,
    MAX_REGISTERS,
    ROWS,
    _following,
    _mask,
    _matrix,
    _note,
    _reach,
    _run_of,
    _softmax,
    _walk,
    device_refusal,
)
from ..packed.tiling import LOG2E
from .batch import PagedBatch

__all__ = ["device_refusal", "kernels", "prefill", "refusal"]

HEAD_DIMS = (64, 96, 128, 256)
HALF = 64
"""Columns of a head that one copy brings."""
PARTS = 2
"""Warpgroups that compute."""
# The same for the kernels, which read no global that is not a constant of Triton's.
_ROWS, _HALF, _PARTS = (n if gl is None else gl.constexpr(n) for n in (ROWS, HALF, PARTS))


@gluon_kernel
def _find(index, starts, lengths, count, tiles, share, QUERIES: gl.constexpr):  # type: ignore[no-untyped-def]
    """(first token, end of its row's tokens, its position, length of the row, row, key head) of piece ``index``.

    Key heads are taken ``share`` at a time. A tile of a row with one query is empty.
    """
    part = index // (tiles * share)
    rest = index % (tiles * share)
    tile = tiles - 1 - rest // share
    head = part * share + rest % share
    row = _run_of(tile, starts, count, QUERIES)
    begin = gl.load(starts + row)
    end = gl.load(starts + row + 1)
    length = gl.load(lengths + row)
    token = begin + (tile - begin // QUERIES - row) * QUERIES
    position = length - end + token
    if end - begin < 2:
        end = begin
    return token, end, position, length, row, head


@gluon_kernel
def _seek(  # type: ignore[no-untyped-def]
    index, counter, starts, lengths, count, tiles, work, share, QUERIES: gl.constexpr, SHARED_OUT: gl.constexpr,
):  # fmt: skip
    """From piece ``index`` of the work on, the first that this program gets with queries in it."""
    token = 0
    end = 0
    position = 0
    length = 0
    row = 0
    head = 0
    while (index < work) & (token >= end):
        token, end, position, length, row, head = _find(index, starts, lengths, count, tiles, share, QUERIES)
        if token >= end:
            index = _following(counter, work, SHARED_OUT)
    return index, token, end, position, length, row, head


@gluon_kernel
def _blocks(table, start, length, blocks, COLUMNS: gl.constexpr, BLOCK: gl.constexpr):  # type: ignore[no-untyped-def]
    """The blocks of the cache that hold the positions from ``start`` on, every thread all of them; ``blocks``, where
    there is none, for what lies past the row's length."""
    N: gl.constexpr = COLUMNS // BLOCK
    n = gl.arange(0, N, layout=gl.BlockedLayout([N], [32], [1], [0]))
    return gl.load(table + start // BLOCK + n, start + n * BLOCK < length, blocks)


@gluon_kernel
def _one_of(values, place):  # type: ignore[no-untyped-def]
    n = gl.arange(0, values.shape[0], layout=values.type.layout)
    return gl.sum(gl.where(n == place, values, 0), 0)


@gluon_kernel
def _gather(  # type: ignore[no-untyped-def]
    source, wanted, left, head, pieces, full, empty, tail, tails, queue, COLUMNS: gl.constexpr, BLOCK: gl.constexpr,
    SLOTS: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """Ask for the keys or values in the blocks ``wanted`` at place ``queue`` of the ring, when that is free.

    ``left``: how many of their positions, and of those behind, the row has. ``tails``: how many blocks of values were
    cleared at their end so far; returned with this one.
    """
    N: gl.constexpr = COLUMNS // BLOCK
    HALVES: gl.constexpr = pieces.shape[0] // (SLOTS * N)
    PIECE: gl.constexpr = source.block_type.nbytes
    slot = queue % SLOTS
    first = slot * (N * HALVES)
    mbarrier.wait(empty.index(slot), (queue // SLOTS & 1) ^ 1)
    cleared = -1
    if VALUES:
        over = left % BLOCK
        if (left < COLUMNS) & (over > 0):
            cleared = left // BLOCK
            block = _one_of(wanted, cleared)
            mbarrier.expect(tail, HALVES * PIECE)
            for half in gl.static_range(HALVES):
                piece = pieces.index(first + half * N + cleared)
                async_load(source, [block, head, 0, half * _HALF], tail, piece)
            mbarrier.wait(tail, tails & 1)
            tails += 1
            L: gl.constexpr = gl.BlockedLayout([1, 1, 1, 8], [1, 1, 4, 8], [1, 1, 1, 1], [3, 2, 1, 0])
            row = gl.arange(0, BLOCK, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))
            owned = (row < over)[None, None, :, None]
            for half in gl.static_range(HALVES):
                piece = pieces.index(first + half * N + cleared)
                x = piece.load(L)
                piece.store(gl.where(owned, x, gl.zeros_like(x)))
            fence_async_shared()
            block_barrier()
    mbarrier.expect(full.index(slot), N * HALVES * PIECE, pred=cleared < 0)
    if VALUES:
        mbarrier.expect(full.index(slot), (N - 1) * HALVES * PIECE, pred=cleared >= 0)
    for n in gl.static_range(N):
        block = _one_of(wanted, n)
        for half in gl.static_range(HALVES):
            async_load(
                source, [block, head, 0, half * _HALF], full.index(slot), pieces.index(first + half * N + n),
                pred=cleared != n,
            )  # fmt: skip
    return tails


@gluon_kernel
def _gather_pairs(  # type: ignore[no-untyped-def]
    k, v, table, wanted, start, length, head, blocks, number, pieces, full, empty, tail, tails, queue,
    COLUMNS: gl.constexpr, BLOCK: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """``number`` times the keys before position ``start`` and the values from it on, which are in ``wanted``."""
    for _ in range(number):
        before = _blocks(table, start - COLUMNS, length, blocks, COLUMNS, BLOCK)
        _gather(k, before, length, head, pieces, full, empty, tail, tails, queue, COLUMNS, BLOCK, SLOTS, False)
        tails = _gather(
            v, wanted, length - start, head, pieces, full, empty, tail, tails, queue + 1, COLUMNS, BLOCK, SLOTS, True
        )
        wanted = before
        start -= COLUMNS
        queue += 2
    return wanted, start, tails, queue


@gluon_kernel
def _fetch(  # type: ignore[no-untyped-def]
    q, k, v, q_tiles, plan, pieces, q_full, q_empty, full, empty, tail, counter, tables, starts, lengths, count, tiles,
    work, blocks, table_b, share, GROUP: gl.constexpr, COLUMNS: gl.constexpr, BLOCK: gl.constexpr,
    SLOTS: gl.constexpr, SHARED_OUT: gl.constexpr, AHEAD: gl.constexpr, COPIED: gl.constexpr,
):  # fmt: skip
    """The work of the copying warp: it chooses tiles, tells the others, and keeps the ring full."""
    QUERIES: gl.constexpr = _PARTS * (_ROWS // GROUP)
    queue = 0
    told = 0
    tails = 0
    index, token, end, position, length, row, head = _seek(
        gl.program_id(0), counter, starts, lengths, count, tiles, work, share, QUERIES, SHARED_OUT
    )
    while index < work:
        buffer = told % 2
        mbarrier.wait(q_empty.index(buffer), (told // 2 & 1) ^ 1)
        _note(plan, 8 * buffer, token)
        _note(plan, 8 * buffer + 1, end)
        _note(plan, 8 * buffer + 2, position)
        _note(plan, 8 * buffer + 3, length)
        _note(plan, 8 * buffer + 4, head)
        if COPIED:
            mbarrier.expect(q_full.index(buffer), _PARTS * q.block_type.nbytes)
            for part in gl.static_range(_PARTS):
                async_load(
                    q, [token + part * (_ROWS // GROUP), head * GROUP, 0], q_full.index(buffer),
                    q_tiles.index(buffer * _PARTS + part),
                )  # fmt: skip
        else:
            mbarrier.arrive(q_full.index(buffer))
        _, _, _, high = _reach(position, 0, length, 0, QUERIES, COLUMNS, True, False)
        table = tables + row * table_b
        limit = length
        kv_head = head
        start = (high - 1) * COLUMNS
        wanted = _blocks(table, start, limit, blocks, COLUMNS, BLOCK)
        _gather(k, wanted, limit, kv_head, pieces, full, empty, tail, tails, queue, COLUMNS, BLOCK, SLOTS, False)
        early = gl.maximum(high - 1 - AHEAD, 0)
        wanted, start, tails, queue = _gather_pairs(
            k, v, table, wanted, start, limit, kv_head, blocks, early, pieces, full, empty, tail, tails, queue + 1,
            COLUMNS, BLOCK, SLOTS,
        )  # fmt: skip
        index, token, end, position, length, row, head = _seek(
            _following(counter, work, SHARED_OUT), counter, starts, lengths, count, tiles, work, share, QUERIES,
            SHARED_OUT,
        )  # fmt: skip
        wanted, start, tails, queue = _gather_pairs(
            k, v, table, wanted, start, limit, kv_head, blocks, high - 1 - early, pieces, full, empty, tail, tails,
            queue, COLUMNS, BLOCK, SLOTS,
        )  # fmt: skip
        tails = _gather(
            v, wanted, limit - start, kv_head, pieces, full, empty, tail, tails, queue, COLUMNS, BLOCK, SLOTS, True
        )
        queue += 1
        told += 1
    buffer = told % 2
    mbarrier.wait(q_empty.index(buffer), (told // 2 & 1) ^ 1)
    _note(plan, 8 * buffer + 4, -1)
    mbarrier.arrive(q_full.index(buffer))


@gluon_kernel
def _planned(plan, q_full, done):  # type: ignore[no-untyped-def]
    """Wait for the next tile: (first token, end of its row's, its position, length, key head), -1 if there is none."""
    ALL: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    buffer = done % 2
    mbarrier.wait(q_full.index(buffer), done // 2 & 1)
    token = gl.max(plan.index(8 * buffer).load(ALL), 0)
    end = gl.max(plan.index(8 * buffer + 1).load(ALL), 0)
    position = gl.max(plan.index(8 * buffer + 2).load(ALL), 0)
    length = gl.max(plan.index(8 * buffer + 3).load(ALL), 0)
    head = gl.max(plan.index(8 * buffer + 4).load(ALL), 0)
    return token, end, position, length, head


@gluon_kernel
def _attend(  # type: ignore[no-untyped-def]
    part: gl.constexpr, q, q_t, q_h, q_tiles, plan, ring, q_full, q_empty, full, empty, out, scale2, H: gl.constexpr,
    GROUP: gl.constexpr, D: gl.constexpr, SLOTS: gl.constexpr, COPIED: gl.constexpr,
):  # fmt: skip
    """The work of a warpgroup: 64 rows of every tile."""
    DP: gl.constexpr = q_tiles.shape[3]
    COLUMNS: gl.constexpr = ring.shape[1]
    MINE: gl.constexpr = _ROWS // GROUP
    QUERIES: gl.constexpr = _PARTS * MINE
    S: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, 16])
    O: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, DP, 16])
    P: gl.constexpr = gl.DotOperandLayout(operand_index=0, parent=O, k_width=2)
    STORE: gl.constexpr = O if DP == 256 else gl.BlockedLayout([1, 8], [256 // DP, DP // 8], [4, 1], [1, 0])
    r = gl.arange(0, _ROWS, layout=gl.SliceLayout(1, STORE))
    d = gl.arange(0, DP, layout=gl.SliceLayout(0, STORE))
    own = (r < MINE * GROUP)[:, None] & (d < D)[None, :]
    zero = gl.zeros([_ROWS, COLUMNS], gl.float32, S)
    queue = 0
    done = 0
    token, end, position, length, head = _planned(plan, q_full, done)
    while head >= 0:
        mine = token + part * MINE + r // GROUP
        if COPIED:
            tile = q_tiles.index(done % 2 * _PARTS + part).reshape((_ROWS, DP))
        else:
            tile = q_tiles.index(part).reshape((_ROWS, DP))
            at = q + mine[:, None].to(gl.int64) * q_t + (head * GROUP + r % GROUP)[:, None] * q_h + d[None, :]
            x = gl.load(at, own & (mine < end)[:, None], 0.0)
            block_barrier()  # all warps are done with the tile before
            tile.store(x)
            fence_async_shared()
            block_barrier()
        _, _, high_full, high = _reach(position, 0, length, 0, QUERIES, COLUMNS, True, False)
        i = position + part * MINE + gl.arange(0, _ROWS, layout=gl.SliceLayout(1, S)) // GROUP
        acc = gl.zeros([_ROWS, DP], gl.float32, O)
        m = gl.full([_ROWS], -float("inf"), gl.float32, gl.SliceLayout(1, S))
        l = gl.zeros([_ROWS], gl.float32, gl.SliceLayout(1, S))
        queue_end = queue + 2 * high
        slot = queue % SLOTS
        mbarrier.wait(full.index(slot), queue // SLOTS & 1)
        s = warpgroup_mma(tile, _matrix(ring.index(slot)).permute((1, 0)), zero, use_acc=False, is_async=True)
        s = warpgroup_mma_wait(0, (s,))
        mbarrier.arrive(empty.index(slot))
        s = _mask(s, i, (high - 1) * COLUMNS, length, 0, True, False)
        soft, m, l, _ = _softmax(s, m, l, scale2, True)
        p = gl.convert_layout(soft.to(tile.dtype), P)
        queue += 1
        mbarrier.wait(full.index(queue % SLOTS), queue // SLOTS & 1, pred=queue + 1 < queue_end)
        # A tile may begin anywhere, so the block before the last may need a mask as well.
        acc, p, m, l, queue = _walk(
            acc, p, m, l, queue, queue_end, high_full, high - 1, tile, ring, full, empty, i, 0, length, 0, scale2,
            SLOTS, True, False, True, S, P,
        )  # fmt: skip
        acc, p, m, l, queue = _walk(
            acc, p, m, l, queue, queue_end, 0, gl.minimum(high_full, high - 1), tile, ring, full, empty, i, 0, length,
            0, scale2, SLOTS, True, False, False, S, P,
        )  # fmt: skip
        mbarrier.arrive(q_empty.index(done % 2))
        slot = queue % SLOTS
        mbarrier.wait(full.index(slot), queue // SLOTS & 1)
        acc = warpgroup_mma(p, _matrix(ring.index(slot)), acc, is_async=True)
        acc = warpgroup_mma_wait(0, (acc,))
        mbarrier.arrive(empty.index(slot))
        queue += 1
        acc = acc * gl.convert_layout(1.0 / l, gl.SliceLayout(1, O))[:, None]
        at = out + mine[:, None].to(gl.int64) * (H * D) + (head * GROUP + r % GROUP)[:, None] * D + d[None, :]
        gl.store(at, gl.convert_layout(acc.to(out.dtype.element_ty), STORE), own & (mine < end)[:, None])
        done += 1
        token, end, position, length, head = _planned(plan, q_full, done)


@partial(gluon_kernel, sizes=("count", "tiles", "work", "blocks", "table_b", "share"))
def prefill_kernel(  # type: ignore[no-untyped-def]
    q, k, v, out, counter, tables, starts, lengths, count, tiles, work, blocks, table_b, share, scale2, q_t, q_h,
    H: gl.constexpr, GROUP: gl.constexpr, D: gl.constexpr, BLOCK: gl.constexpr, SLOTS: gl.constexpr,
    COLUMNS: gl.constexpr, SHARED_OUT: gl.constexpr, AHEAD: gl.constexpr, COPIED: gl.constexpr,
):  # fmt: skip
    """q describes ``[T, H, d]`` in boxes of 64 rows (without COPIED it points there), k and v the caches in boxes of a
    block and half a head.

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
    plan = gl.allocate_shared_memory(gl.int32, [16, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    q_full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    q_empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    tail = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for buffer in gl.static_range(2):
        mbarrier.init(q_full.index(buffer), count=1)
        mbarrier.init(q_empty.index(buffer), count=_PARTS)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=_PARTS)
    mbarrier.init(tail, count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_attend, (0, q, q_t, q_h, q_tiles, plan, ring, q_full, q_empty, full, empty, out, scale2, H, GROUP, D,
                         SLOTS, COPIED)),
            (_attend, (1, q, q_t, q_h, q_tiles, plan, ring, q_full, q_empty, full, empty, out, scale2, H, GROUP, D,
                         SLOTS, COPIED)),
            (_fetch, (q, k, v, q_tiles, plan, pieces, q_full, q_empty, full, empty, tail, counter, tables, starts,
                      lengths, count, tiles, work, blocks, table_b, share, GROUP, COLUMNS, BLOCK, SLOTS, SHARED_OUT,
                      AHEAD, COPIED)),
        ],
        [4, 1],
        [232, 40],  # registers of a thread that computes, and of one that fetches
    )  # fmt: skip


# --------------------------------------------------------------------------------------------------------- launcher


@cache
def _layout(rank: int) -> Any:
    return gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=rank)


def padded(d: int) -> int:
    """Columns of a tile that holds heads of ``d``."""
    return max(64, next_power_of_2(d))


def _sizes(d: int, group: int) -> dict[str, Any]:
    """Keys of a block, blocks that the ring holds, and whether a copy brings the queries, for ``group`` heads of ``d``
    to a key head."""
    if d > 128:
        return {"COLUMNS": COLUMNS // 2, "SLOTS": 4, "COPIED": False}
    return {"COLUMNS": COLUMNS, "SLOTS": 512 // padded(d), "COPIED": group & (group - 1) == 0}


def refusal(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, batch: PagedBatch, scale: float, window: int | None = None
) -> str | None:
    """Why this kernel does not take these inputs, or None."""
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
    """Attention of the rows with several queries, written to their places in ``out`` ``[T, H, d]``.

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
    # Key heads are worked on so many at a time: keys and values of 16 MB together leave most of the L2 cache free.
    fit = max(1, 2**24 // (4 * d * max(1, longest)))
    share = max(n for n in range(1, kv_heads + 1) if kv_heads % n == 0 and n <= fit)
    sizes = _sizes(d, group)
    prefill_kernel[(programs,)](
        tensor_descriptor(q, [ROWS // group, group, padded(d)], _layout(3)) if sizes["COPIED"] else q,
        tensor_descriptor(k_cache, [1, 1, block, HALF], _layout(4)),
        tensor_descriptor(v_cache, [1, 1, block, HALF], _layout(4)),
        out, counter, tables, starts, lengths, len(lengths), tiles, work, blocks, tables.stride(0), share,
        scale * LOG2E, q.stride(0), q.stride(1), H=heads, GROUP=group, D=d, BLOCK=block, SHARED_OUT=shared_out,
        AHEAD=AHEAD, **sizes,
        num_warps=4, maxnreg=MAX_REGISTERS[PARTS],
    )  # fmt: skip


def kernels() -> Sequence[Kernel]:
    """The kernels to compile ahead of time."""
    if gluon is None:
        return []
    made = []
    for d, group in ((128, 4), (64, 4), (96, 4), (256, 2), (128, 7), (128, 3), (64, 7)):
        block, sizes = 16, _sizes(d, group)
        copied = sizes["COPIED"]
        box = f"tensordesc<bf16[{ROWS // group}, {group}, {padded(d)}],{_layout(3)!r}>"
        tensors = {"q": box if copied else "*bf16"}
        tensors |= dict.fromkeys(("k", "v"), f"tensordesc<bf16[1, 1, {block}, {HALF}],{_layout(4)!r}>")
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
