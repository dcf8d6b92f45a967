"""The copying warps of prefill chunks over a paged cache on Hopper GPUs: one for keys, one for values.

They belong to ``prefill_hopper.py``, which has the warps that compute. A ring in shared memory holds blocks of 128 keys
or values, one queue in the order of use: K0, K1, V0, K2, V1, ... The first warp chooses the tiles of queries, notes
them for the others, and asks the bulk copy engine for queries and keys; the second asks for values.

* The keys of a place in the ring come as blocks of the cache from wherever the block table says. Each copy brings 64
  columns, the width that the copy engine swizzles. Shared memory is swizzled in units of 8 rows of 128 bytes, and a
  copy fills whole units. So the pieces together are the tile that one large copy would have made.
* Where these blocks are neighbours in the cache and in order, as those of a prompt mostly are
  (``engine/scheduling/sequence_blocks.py``), one copy for every 64 columns brings them all. A warp issues 2 copies
  then where it would issue 16, each with a number from the table.
* A slot that the row does not own may hold NaN, and 0 * NaN is NaN. Blocks past the row's end are requested outside of
  the cache, where copies give zeros. Values of the last block come to a barrier of their own; the warp overwrites its
  end with zeros before it says that the values are there.
"""

from __future__ import annotations

from ...lang.gluon_language import (
    async_load,
    block_barrier,
    fence_async_shared,
    gl,
    gluon_kernel,
    mbarrier,
    reinterpreted,
)
from ..packed.hopper_tiles import ROWS, next_item, note_plan, reach, run_of

HALF = 64
"""Columns of a head that one copy brings."""
PARTS = 2
"""Warpgroups that compute."""
# The same for the kernels, which read no global that is not a constant of Triton's.
_ROWS, _HALF, _PARTS = (n if gl is None else gl.constexpr(n) for n in (ROWS, HALF, PARTS))


@gluon_kernel
def _find(index, starts, lengths, count, tiles, share, QUERIES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return (first token, end of its row's tokens, its position, length of the row, row, key head) of work item
    ``index``.

    Key heads are taken ``share`` at a time. A tile of a row with one query is empty.
    """
    part = index // (tiles * share)
    rest = index % (tiles * share)
    tile = tiles - 1 - rest // share
    head = part * share + rest % share
    row = run_of(tile, starts, count, QUERIES)
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
    """Find the first work item from ``index`` on that belongs to this program and has queries."""
    token = 0
    end = 0
    position = 0
    length = 0
    row = 0
    head = 0
    while (index < work) & (token >= end):
        token, end, position, length, row, head = _find(index, starts, lengths, count, tiles, share, QUERIES)
        if token >= end:
            index = next_item(counter, work, SHARED_OUT)
    return index, token, end, position, length, row, head


@gluon_kernel
def _numbers(N: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return 0 to N - 1, all of them in every thread: the compiler then knows that values computed from them are the
    same in the whole warp."""
    return gl.arange(0, N, layout=gl.BlockedLayout([N], [32], [1], [0]))


@gluon_kernel
def _look(table, start, length, blocks, COLUMNS: gl.constexpr, BLOCK: gl.constexpr):  # type: ignore[no-untyped-def]
    """Look up the cache's blocks that hold the positions from ``start`` on; past the row's length the result is
    ``blocks``, which does not exist."""
    n = _numbers(COLUMNS // BLOCK)
    return gl.load(table + start // BLOCK + n, (start >= 0) & (start + n * BLOCK < length), blocks)


@gluon_kernel
def _run(wanted, left, COLUMNS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return the first block if all blocks are consecutive and full of the row's positions; else -1."""
    apart = wanted - _numbers(wanted.shape[0])
    first = gl.min(apart, 0)
    return gl.where((first == gl.max(apart, 0)) & (left >= COLUMNS), first, -1)


@gluon_kernel
def _gather(cache, wanted, head, pieces, slot, barrier, HALVES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Ask for keys or values block by block."""
    N: gl.constexpr = wanted.shape[0]
    mbarrier.expect(barrier, N * HALVES * cache.block_type.nbytes)
    for n in gl.static_range(N):
        block = gl.sum(gl.where(_numbers(N) == n, wanted, 0), 0)
        for half in gl.static_range(HALVES):
            piece = pieces.index((slot * HALVES + half) * N + n)
            async_load(cache, [block, head, 0, half * _HALF], barrier, piece)


@gluon_kernel
def _clear(pieces, slot, left, COLUMNS: gl.constexpr, BLOCK: gl.constexpr, HALVES: gl.constexpr):  # type: ignore[no-untyped-def]
    """Write zeros after the first ``left`` positions of a slot, up to the end of their block; 8 rows at a time."""
    UNITS: gl.constexpr = COLUMNS // 8
    L: gl.constexpr = gl.BlockedLayout([1, 1, 1, 8], [1, 1, 4, 8], [1, 1, 1, 1], [3, 2, 1, 0])
    row = gl.arange(0, 8, layout=gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, L))))
    units = reinterpreted(pieces, pieces.dtype, [pieces.shape[0] * BLOCK // 8, 1, 1, 8, _HALF], pieces.layout)
    for unit in range(left // 8, (left // BLOCK + 1) * (BLOCK // 8)):
        owned = (8 * unit + row < left)[None, None, :, None]
        for half in gl.static_range(HALVES):
            some = units.index((slot * HALVES + half) * UNITS + unit)
            x = some.load(L)
            some.store(gl.where(owned, x, gl.zeros_like(x)))
    fence_async_shared()
    block_barrier()


@gluon_kernel
def _copy(  # type: ignore[no-untyped-def]
    cache, many, wanted, left, head, pieces, runs, full, empty, cleared, queue, COLUMNS: gl.constexpr,
    BLOCK: gl.constexpr, SLOTS: gl.constexpr, VALUES: gl.constexpr,
):  # fmt: skip
    """Ask for the keys or values of the blocks ``wanted`` at place ``queue`` of the ring, when that is free.

    ``cache`` describes it in boxes of a block, ``many`` in boxes of as many as a slot holds. ``left``: how many
    positions the row has from the first of these on. ``cleared``: how often values were cleared so far; returned with
    this one.
    """
    HALVES: gl.constexpr = runs.shape[0] // SLOTS
    slot = queue % SLOTS
    run = _run(wanted, left, COLUMNS)
    mbarrier.wait(empty.index(slot), (queue // SLOTS & 1) ^ 1)
    if run >= 0:
        mbarrier.expect(full.index(slot), HALVES * many.block_type.nbytes)
        for half in gl.static_range(HALVES):
            async_load(many, [run, head, 0, half * _HALF], full.index(slot), runs.index(slot * HALVES + half))
    else:
        ends = VALUES and (left < COLUMNS) & (left % BLOCK > 0)
        barrier = full.index(SLOTS if ends else slot)
        _gather(cache, wanted, head, pieces, slot, barrier, HALVES)
        if ends:
            mbarrier.wait(barrier, cleared & 1)
            cleared += 1
            _clear(pieces, slot, left, COLUMNS, BLOCK, HALVES)
            mbarrier.arrive(full.index(slot))
    return cleared


@gluon_kernel
def _fetch_keys(  # type: ignore[no-untyped-def]
    q, cache, many, q_tiles, plan, pieces, runs, q_full, q_empty, full, empty, counter, tables, starts, lengths,
    count, tiles, work, blocks, table_b, share, GROUP: gl.constexpr, COLUMNS: gl.constexpr, BLOCK: gl.constexpr,
    SLOTS: gl.constexpr, SHARED_OUT: gl.constexpr, AHEAD: gl.constexpr, COPIED: gl.constexpr,
):  # fmt: skip
    """Run the first copying warp: choose tiles, announce them to the warpgroups, and request queries and keys."""
    QUERIES: gl.constexpr = _PARTS * (_ROWS // GROUP)
    queue = 0
    told = 0
    cleared = 0
    index, token, end, position, length, row, head = _seek(
        gl.program_id(0), counter, starts, lengths, count, tiles, work, share, QUERIES, SHARED_OUT
    )
    while index < work:
        buffer = told % 2
        mbarrier.wait(q_empty.index(buffer), (told // 2 & 1) ^ 1)
        note_plan(plan, 8 * buffer, token)
        note_plan(plan, 8 * buffer + 1, end)
        note_plan(plan, 8 * buffer + 2, position)
        note_plan(plan, 8 * buffer + 3, length)
        note_plan(plan, 8 * buffer + 4, head)
        note_plan(plan, 8 * buffer + 5, row)
        if COPIED:
            mbarrier.expect(q_full.index(buffer), _PARTS * q.block_type.nbytes)
            for part in gl.static_range(_PARTS):
                async_load(
                    q, [token + part * (_ROWS // GROUP), head * GROUP, 0], q_full.index(buffer),
                    q_tiles.index(buffer * _PARTS + part),
                )  # fmt: skip
        else:
            mbarrier.arrive(q_full.index(buffer))
        _, _, _, high = reach(position, 0, length, 0, QUERIES, COLUMNS, True, False)
        table = tables + row * table_b
        limit = length
        kv_head = head
        start = (high - 1) * COLUMNS
        following = _look(table, start, limit, blocks, COLUMNS, BLOCK)
        early = gl.maximum(high - AHEAD, 0)
        for step in range(high):
            if step == early:
                index, token, end, position, length, row, head = _seek(
                    next_item(counter, work, SHARED_OUT), counter, starts, lengths, count, tiles, work, share, QUERIES,
                    SHARED_OUT,
                )  # fmt: skip
            wanted = following
            following = _look(table, start - COLUMNS, limit, blocks, COLUMNS, BLOCK)  # a step ahead
            cleared = _copy(
                cache, many, wanted, limit - start, kv_head, pieces, runs, full, empty, cleared,
                queue + gl.maximum(2 * step - 1, 0), COLUMNS, BLOCK, SLOTS, False,
            )  # fmt: skip
            start -= COLUMNS
        queue += 2 * high
        told += 1
    buffer = told % 2
    mbarrier.wait(q_empty.index(buffer), (told // 2 & 1) ^ 1)
    note_plan(plan, 8 * buffer + 4, -1)
    mbarrier.arrive(q_full.index(buffer))


@gluon_kernel
def _fetch_values(  # type: ignore[no-untyped-def]
    cache, many, plan, pieces, runs, q_full, q_empty, full, empty, tables, blocks, table_b, GROUP: gl.constexpr,
    COLUMNS: gl.constexpr, BLOCK: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """Run the second copying warp: request values, each block of them two places after its keys."""
    queue = 0
    done = 0
    cleared = 0
    _, _, position, length, head, row = _planned(plan, q_full, done, 1)
    while head >= 0:
        mbarrier.arrive(q_empty.index(done % 2))
        _, _, _, high = reach(position, 0, length, 0, _PARTS * (_ROWS // GROUP), COLUMNS, True, False)
        table = tables + row * table_b
        start = (high - 1) * COLUMNS
        following = _look(table, start, length, blocks, COLUMNS, BLOCK)
        for step in range(high):
            wanted = following
            following = _look(table, start - COLUMNS, length, blocks, COLUMNS, BLOCK)
            cleared = _copy(
                cache, many, wanted, length - start, head, pieces, runs, full, empty, cleared,
                queue + gl.minimum(2 * step + 2, 2 * high - 1), COLUMNS, BLOCK, SLOTS, True,
            )  # fmt: skip
            start -= COLUMNS
        queue += 2 * high
        done += 1
        _, _, position, length, head, row = _planned(plan, q_full, done, 1)


@gluon_kernel
def _planned(plan, q_full, done, WARPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Wait for the next tile: (first token, end of its row's, its position, length, key head, row); the head is -1 if
    there is none."""
    ALL: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    buffer = done % 2
    mbarrier.wait(q_full.index(buffer), done // 2 & 1)
    token = gl.max(plan.index(8 * buffer).load(ALL), 0)
    end = gl.max(plan.index(8 * buffer + 1).load(ALL), 0)
    position = gl.max(plan.index(8 * buffer + 2).load(ALL), 0)
    length = gl.max(plan.index(8 * buffer + 3).load(ALL), 0)
    head = gl.max(plan.index(8 * buffer + 4).load(ALL), 0)
    row = gl.max(plan.index(8 * buffer + 5).load(ALL), 0)
    return token, end, position, length, head, row
