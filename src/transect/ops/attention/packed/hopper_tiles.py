"""Share parts of Hopper's kernels of attention over packed documents (``hopper.py``) and over a paged cache
(``paged/prefill_hopper.py``): the reach of a tile of queries, masks, online softmax, the loop over blocks of keys.
"""

from __future__ import annotations

from ...lang.gluon_language import gl, gluon_kernel, mbarrier, warpgroup_mma, warpgroup_mma_wait

ROWS = 64
"""Queries of a warpgroup."""
COLUMNS = 128
"""Keys of a block."""
AHEAD = 4
"""Blocks before the end of a tile at which its successor is asked for."""
MAX_REGISTERS = {2: 168, 3: 128}
"""Registers of a thread at the start, by number of computing warpgroups; then they are reassigned by role."""


@gluon_kernel
def exp2(x):  # type: ignore[no-untyped-def]
    """Compute 2^x by the hardware's instruction; results under 2^-126 are 0."""
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=gl.float32, is_pure=True, pack=1
    )  # fmt: skip


@gluon_kernel
def run_of(tile, starts, count, SIZE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Find which of ``count`` runs of tokens a tile belongs to; tiles are numbered as in
    ``tiling.find_tile``."""
    low = 0
    high = count
    while high - low > 1:
        middle = (low + high) // 2
        if gl.load(starts + middle) // SIZE + middle <= tile:
            low = middle
        else:
            high = middle
    return low


@gluon_kernel
def reach(  # type: ignore[no-untyped-def]
    first_i, begin, end, window, ROWS: gl.constexpr, COLUMNS: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr
):
    """Return two ranges of the document's blocks of keys: [low, high) are seen by some query of the tile, [low_full,
    high_full) by all."""
    i = first_i - begin
    n = end - begin
    low = 0
    low_full = 0
    high = n
    high_full = n // COLUMNS
    if CAUSAL:
        high = gl.minimum(n, i + ROWS)
        high_full = gl.minimum(n, i + 1) // COLUMNS
    if WINDOW:
        low = gl.maximum(i - window + 1, 0) // COLUMNS
        low_full = (gl.maximum(i + ROWS - window, 0) + COLUMNS - 1) // COLUMNS
        if not CAUSAL:
            high = gl.minimum(n, i + ROWS + window - 1)
            high_full = gl.minimum(n, i + window) // COLUMNS
    high = (high + COLUMNS - 1) // COLUMNS
    high_full = gl.maximum(high_full, low)
    return low, gl.minimum(low_full, high_full), high_full, high


@gluon_kernel
def mask(s, i, start, end, window, CAUSAL: gl.constexpr, WINDOW: gl.constexpr):  # type: ignore[no-untyped-def]
    """Set scores to -inf where query i must not see the key; the block begins at key ``start``."""
    j = start + gl.arange(0, s.shape[1], layout=gl.SliceLayout(0, s.type.layout))
    last = gl.zeros([s.shape[0]], gl.int32, gl.SliceLayout(1, s.type.layout)) + end - 1
    if CAUSAL:
        last = gl.minimum(i, last)
    seen = j[None, :] <= last[:, None]
    if WINDOW:
        seen = seen & (i[:, None] - j[None, :] < window) & (j[None, :] - i[:, None] < window)
    return gl.where(seen, s, -float("inf"))


@gluon_kernel
def softmax(s, m, l, scale2, MASK: gl.constexpr):  # type: ignore[no-untyped-def]
    """Do one step of the online softmax: (probabilities, m, l, the factor to multiply the output so far by)."""
    top = gl.maximum(m, gl.max(s, 1) * scale2)
    shift = top
    if MASK:
        shift = gl.where(top == -float("inf"), 0.0, top)  # nothing seen yet: exp2(-inf) is 0, not NaN
    p = exp2(s * scale2 - shift[:, None])
    fade = exp2(m - shift)
    return p, top, l * fade + gl.sum(p, 1), fade


@gluon_kernel
def walk(  # type: ignore[no-untyped-def]
    acc, p, m, l, queue, queue_end, first, last, low_full, high_full, q, ring, full, empty, i, begin, end, window,
    scale2, SLOTS: gl.constexpr, CAUSAL: gl.constexpr, WINDOW: gl.constexpr, MASK: gl.constexpr, S: gl.constexpr,
    P: gl.constexpr,
):  # fmt: skip
    """Process the blocks from ``last`` - 1 down to ``first``, each one step ahead: p holds the previous block's
    probabilities.

    MASK: those outside of [low_full, high_full) are masked. One loop for both kinds: between two loops the compiler
    swaps the halves of every register of p, there and back in each step.

    ``queue`` is the place of this step's keys in the queue; the values of the block before come right after them. The
    keys have arrived when a step begins: the wait for them stands between the softmax and the end of p v, where it also
    keeps the compiler from ending p v earlier.
    """
    ROWS: gl.constexpr = q.shape[0]
    COLUMNS: gl.constexpr = ring.shape[1]
    zero = gl.zeros([ROWS, COLUMNS], gl.float32, S)
    for step in range(last - first):
        k_slot = queue % SLOTS
        v_slot = (queue + 1) % SLOTS
        s = warpgroup_mma(q, matrix(ring.index(k_slot)).permute((1, 0)), zero, use_acc=False, is_async=True)
        mbarrier.wait(full.index(v_slot), (queue + 1) // SLOTS & 1)
        acc = warpgroup_mma(p, matrix(ring.index(v_slot)), acc, is_async=True)
        s = warpgroup_mma_wait(1, (s,))
        mbarrier.arrive(empty.index(k_slot))
        block = last - 1 - step
        if MASK and (block >= high_full) | (block < low_full):
            s = mask(s, i, begin + block * COLUMNS, end, window, CAUSAL, WINDOW)
        soft, m, l, fade = softmax(s, m, l, scale2, MASK)
        queue += 2
        mbarrier.wait(full.index(queue % SLOTS), queue // SLOTS & 1, pred=queue + 1 < queue_end)
        acc = warpgroup_mma_wait(0, (acc,))
        mbarrier.arrive(empty.index(v_slot))
        acc = acc * gl.convert_layout(fade, gl.SliceLayout(1, acc.type.layout))[:, None]
        p = gl.convert_layout(soft.to(q.dtype), P)
    return acc, p, m, l, queue


@gluon_kernel
def matrix(tile):  # type: ignore[no-untyped-def]
    """View ``[tokens, 1, d]`` in shared memory as ``[tokens, d]``."""
    return tile.reshape((tile.shape[0], tile.shape[2]))


@gluon_kernel
def note_plan(plan, place, value):  # type: ignore[no-untyped-def]
    """Write a number of the next tile, which the copying warp tells the others."""
    plan.index(place).store(gl.zeros([1], gl.int32, gl.BlockedLayout([1], [32], [1], [0])) + value)


@gluon_kernel
def next_item(counter, work, SHARED_OUT: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return the next work item that no program has begun."""
    index = work
    if SHARED_OUT:
        index = gl.num_programs(0) + gl.atomic_add(counter, 1)
    return index
