"""Share parts of the Triton kernels of paged attention: load a tile of keys and values, and loop over tiles.

The arithmetic is in ``paged_attention.py``; ``queries`` ``[BM, DP]`` all read the same key head. ``oldest`` and
``high`` bound the positions that some of them see; ``position`` is the position of each query.

CAPPED: scores s become ``softcap * tanh(s / softcap)``; ``squeeze`` is the scale over ``softcap`` then, and ``scale2``
is ``softcap`` times log2(e). CHUNKED: a query sees its own chunk of ``span`` positions alone.
"""

from __future__ import annotations

from ...lang.jit import kernel, tl
from ...lang.tiles import dot

LOG2E = tl.constexpr(1.4426950408889634) if tl is not None else 1.4426950408889634
"""A compile-time constant inside kernels."""


@kernel
def walk(  # type: ignore[no-untyped-def]
    queries, k_cache, v_cache, table, block, first, end, oldest, high, position, acc, m, l, kv_head, scale2, window,
    cache_b, cache_k, squeeze, span,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, BN: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr,
    CAPPED: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """Return (acc, m, l) after the tiles that begin at ``first``, ``first + BN``, ... before ``end``.

    ``block``: where the first tile's positions lie; those of the next are loaded a tile ahead.
    """
    n = tl.arange(0, BN)
    for start in range(first, end, BN):
        j = start + n
        this = block
        block = tl.load(table + tl.minimum(j + BN, end - 1) // BLOCK)
        acc, m, l = attend(
            queries, k_cache, v_cache, this, j, oldest, high, position, acc, m, l, kv_head, scale2, window, cache_b,
            cache_k, squeeze, span, D, DP, BLOCK, WINDOW, MASK, CAPPED, CHUNKED,
        )  # fmt: skip
    return acc, m, l


@kernel
def attend(  # type: ignore[no-untyped-def]
    queries, k_cache, v_cache, block, j, oldest, high, position, acc, m, l, kv_head, scale2, window, cache_b, cache_k,
    squeeze, span,
    D: tl.constexpr, DP: tl.constexpr, BLOCK: tl.constexpr, WINDOW: tl.constexpr, MASK: tl.constexpr,
    CAPPED: tl.constexpr, CHUNKED: tl.constexpr,
):  # fmt: skip
    """Process one tile of keys and values, at the positions ``j``, in the cache's blocks ``block``, and return the
    updated (acc, m, l).

    Without MASK every query sees all of them, and they all exist. A cache in int8 has a scale after each head's codes
    (``cache_codes.py``): those of keys multiply scores, those of values the weights of the sum.
    """
    d = tl.arange(0, DP)
    SCALED: tl.constexpr = k_cache.dtype.element_ty == tl.int8
    WIDTH: tl.constexpr = D + 4 if SCALED else D
    at = block.to(tl.int64) * cache_b + kv_head * cache_k + (j % BLOCK) * WIDTH
    owned = (j < high) & (j >= oldest)
    inside = (d < D)[None, :]
    if MASK:
        inside = owned[:, None] & inside
    keys = _load(k_cache + at[:, None] + d[None, :], inside, MASK or D < DP)
    s = dot(queries, keys.to(queries.dtype).T, tl.zeros((queries.shape[0], j.shape[0]), tl.float32))
    if SCALED:
        s *= _scales(k_cache, at + D, owned)[None, :]
    if CAPPED:
        s = _tanh(s * squeeze)
    if MASK:
        seen = owned[None, :] & (j[None, :] <= position[:, None])
        if WINDOW:
            seen = seen & (j[None, :] > position[:, None] - window)
        if CHUNKED:
            seen = seen & (j[None, :] >= (position // span * span)[:, None])
        s = tl.where(seen, s, -float("inf"))
    new_m = tl.maximum(m, tl.max(s, 1) * scale2)
    shift = new_m
    if MASK:
        shift = tl.where(new_m == -float("inf"), 0.0, new_m)
    p = tl.exp2(s * scale2 - shift[:, None])
    fade = tl.exp2(m - shift)
    l = l * fade + tl.sum(p, 1)
    values = _load(v_cache + at[:, None] + d[None, :], inside, MASK or D < DP)
    if SCALED:
        p *= _scales(v_cache, at + D, owned)[None, :]
    acc = dot(p.to(queries.dtype), values.to(queries.dtype), acc * fade[:, None])
    return acc, new_m, l


@kernel
def merged(acc, m, l, own_acc, own_m, own_l):  # type: ignore[no-untyped-def]
    """Return (acc, m, l) of the positions so far and of those after them, which have ``own_acc``, ``own_m``,
    ``own_l``. The multiply-adds are written out, so that every kernel rounds alike."""
    new_m = tl.maximum(m, own_m)
    shift = tl.where(new_m == -float("inf"), 0.0, new_m)
    fade = tl.exp2(m - shift)
    weight = tl.exp2(own_m - shift)
    whole = tl.fma(own_acc, tl.broadcast_to(weight[:, None], own_acc.shape), acc * fade[:, None])
    return whole, new_m, tl.fma(own_l, weight, l * fade)


@kernel
def with_sink(acc, m, l, sinks, head, real):  # type: ignore[no-untyped-def]
    """Return (acc, l) with one more score for each head, ``sinks[head]``, in the softmax, which has no value."""
    sink = tl.load(sinks + head, real, 0.0).to(tl.float32) * LOG2E
    highest = tl.maximum(m, sink)
    fade = tl.exp2(m - highest)
    return acc * fade[:, None], l * fade + tl.exp2(sink - highest)


@kernel
def _tanh(x):  # type: ignore[no-untyped-def]
    """Compute tanh, by its series where the difference of exponentials would lose digits."""
    square = x * x
    near = x * (1.0 - square * (1.0 / 3.0 - square * (2.0 / 15.0 - square * (17.0 / 315.0 - square * (62.0 / 2835.0)))))
    e = tl.exp2(tl.abs(x) * (-2.0 * LOG2E))
    far = (1.0 - e) / (1.0 + e)
    return tl.where(square < 0.0625, near, tl.where(x < 0.0, -far, far))


@kernel
def _scales(cache, at, owned):  # type: ignore[no-untyped-def]
    return tl.load((cache + at).to(tl.pointer_type(tl.float32), bitcast=True), owned, 0.0)


@kernel
def _load(at, inside, MASK: tl.constexpr):  # type: ignore[no-untyped-def]
    if MASK:
        tile = tl.load(at, inside, 0.0)
    else:
        tile = tl.load(at)
    return tile
