"""The Triton kernels of ``sampling.py``, launched in this order: ``_groups``, ``_settle``, ``_collect``, ``_choose``.

What each does for a row is said there. Noise comes twice: quickly and to 1e-4 (``_nearly``), to see which tokens may
win, then exactly for those. ``SPREAD``: the row lies in parts on several GPUs (``sampling.LogitShards``). ``away`` says
for each part how far from ``logits`` it begins, less its first id.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..lang.jit import kernel, tl
from ..lang.philox import noise_of, word_of, words_of
from ..lang.tiles import let_next_begin, wait_for_previous
from ..registry import Kernel

CANDIDATES = 8192
"""The most tokens of a row that can be collected; at most this many can have a probability of 2**-13."""


@kernel
def _scaled(x, peak, t):  # type: ignore[no-untyped-def]
    """Compute z in float32, divided as the CPU divides; never -0, so that equal values have equal bits."""
    z = tl.div_rn(x - peak, t)
    return tl.where(z == 0, 0.0, z)


@kernel
def _key(z):  # type: ignore[no-untyped-def]
    """Map floats to int32 in the same order."""
    bits = z.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@kernel
def _value(key):  # type: ignore[no-untyped-def]
    """Return the float of a key."""
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@kernel
def _largest(x):  # type: ignore[no-untyped-def]
    """Return the largest of some floats, none NaN, by their keys: a warp has an instruction for integers."""
    return _value(tl.max(_key(x), 0))


@kernel
def _seed(seeds, choices, positions, row):  # type: ignore[no-untyped-def]
    """Return position, choice, and the halves of the seed, as uint32."""
    seed = tl.load(seeds + row)
    low = (seed & 0xFFFFFFFF).to(tl.uint32)
    high = ((seed >> 32) & 0xFFFFFFFF).to(tl.uint32)
    return tl.load(positions + row).to(tl.uint32), tl.load(choices + row).to(tl.uint32), low, high


@kernel
def _log_nearly(x, HOPPER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute the log of a normal float32; with HOPPER by the hardware, to 2e-7 or a relative 3e-7."""
    if HOPPER:
        log2 = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1)
        return log2 * 0.6931471805599453
    else:
        return tl.log(x)


@kernel
def _noise_nearly(word, HOPPER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute ``noise_of`` to 1e-4, in float32."""
    u = (word.to(tl.float32) + 0.5) * 2.3283064365386963e-10
    rest = ((word ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * 2.3283064365386963e-10  # 1 - u
    e = tl.where(rest < 0.01, rest * (1.0 + rest * (0.5 + rest * 0.3333333)), -_log_nearly(u, HOPPER))
    return -_log_nearly(e, HOPPER)


@kernel
def _nearly(first, position, choice, low, high, STREAM: tl.constexpr, BLOCK: tl.constexpr, HOPPER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Compute the noise of BLOCK ids from ``first`` on, a multiple of 4, to 1e-4: a quarter of the rounds, no
    float64."""
    quarter = (first // 4 + tl.arange(0, BLOCK // 4)).to(tl.uint32)
    w0, w1, w2, w3 = words_of(quarter, position, choice, low, high, STREAM)
    even = tl.join(_noise_nearly(w0, HOPPER), _noise_nearly(w2, HOPPER))
    odd = tl.join(_noise_nearly(w1, HOPPER), _noise_nearly(w3, HOPPER))
    return tl.join(even, odd).reshape((BLOCK,))


@kernel
def _sum_of_group(e):  # type: ignore[no-untyped-def]
    """Sum ``[lanes, groups, 2, 2, vector]``, lanes last, as only that sum needs other lanes."""
    return tl.sum(tl.sum(tl.sum(tl.sum(e, 4), 2), 2), 0)


@kernel
def _groups(  # type: ignore[no-untyped-def]
    logits, temperature, peaks, masses, raw_masses, kept, V, G, row_stride, kept_stride, first,
    GROUPS: tl.constexpr, PAIRS: tl.constexpr, RAW: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """Compute the largest logit of each group of 128 (+inf if the group holds NaN or +inf), and its mass relative to
    that.

    Instructions bound this pass over half logits: its memory allows about nine an element. So few lanes share a group,
    each with four stretches of its own. With bfloat16 logits (PAIRS) it loads words of 32 bits, because one instruction
    turns a half into a float32.

    With SPREAD the V logits here begin at group ``first`` of G. They are copied to ``kept``, where the other ranks read
    them, and the groups of other ranks get zeros, for the sum that joins all ranks' groups.
    """
    let_next_begin(DEPENDENT_LAUNCH)
    row = tl.program_id(1)
    start = tl.program_id(0) * GROUPS
    group = start + tl.arange(0, GROUPS)
    if PAIRS:
        logits = logits.to(tl.pointer_type(tl.int32))
        row_stride //= 2
        V //= 2
        if SPREAD:
            kept = kept.to(tl.pointer_type(tl.int32))
            kept_stride //= 2
    SIZE: tl.constexpr = 64 if PAIRS else 128  # of a group
    VECTOR: tl.constexpr = 128 // logits.dtype.element_ty.primitive_bitwidth  # of one load
    LANES: tl.constexpr = SIZE // 4 // VECTOR
    lane = (tl.arange(0, LANES) * VECTOR)[:, None, None, None, None]
    half = (tl.arange(0, 2) * (SIZE // 2))[None, None, :, None, None]
    quarter = (tl.arange(0, 2) * (SIZE // 4))[None, None, None, :, None]
    inside = lane + half + quarter + tl.arange(0, VECTOR)[None, None, None, None, :]
    own = group - first if SPREAD else group
    ids = own[None, :, None, None, None] * SIZE + inside
    t = tl.load(temperature + row)
    per_t = 1.4426950408889634 / tl.where(t > 0, tl.maximum(t, 1e-30), 1.0)  # log2(e) / t
    logits += row.to(tl.int64) * row_stride
    wait_for_previous(DEPENDENT_LAUNCH)
    if SPREAD:
        here = (ids >= 0) & (ids < V)
        x = tl.load(logits + ids, here, -8323200 if PAIRS else -float("inf"))
        tl.store(kept + row.to(tl.int64) * kept_stride + ids, x, here)
    elif (start + GROUPS) * SIZE <= V:
        x = tl.load(logits + ids)
    else:
        x = tl.load(logits + ids, ids < V, -8323200 if PAIRS else -float("inf"))  # 0xFF80FF80, twice -inf
    if PAIRS:
        x = tl.join((x << 16).to(tl.float32, bitcast=True), (x & -65536).to(tl.float32, bitcast=True))
        x = x.reshape((LANES, GROUPS, 2, 2, 2 * VECTOR))
    x = x.to(tl.float32)
    peak = tl.max(tl.max(tl.max(tl.max(x, 4), 2), 2), 0)
    x -= tl.where((peak == -float("inf")) | (peak == float("inf")), 0.0, peak)[None, :, None, None, None]
    mass = _sum_of_group(tl.exp2(x * per_t))
    real = group < G
    peak = tl.where(mass == mass, peak, float("inf"))
    if SPREAD:
        peak = tl.where((own >= 0) & (own * SIZE < V), peak, 0.0)
    tl.store(peaks + row * G + group, peak, real)
    tl.store(masses + row * G + group, mass, real)
    if RAW:
        tl.store(raw_masses + row * G + group, _sum_of_group(tl.exp2(x * 1.4426950408889634)), real)


@kernel
def _away(away, ids, V, share, SPREAD: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the offset from this rank's part to the part with these ids, so that ids of the whole row address it."""
    if SPREAD:
        return tl.load(away + ids // share, ids < V, 0)
    else:
        return 0


@kernel
def _fours(logits, ids, V):  # type: ignore[no-untyped-def]
    """Load the logits at ``ids`` and at the three after each. With four a lane, a warp has a whole group and needs no
    other."""
    x0 = tl.load(logits + ids, ids < V, -float("inf")).to(tl.float32)
    x1 = tl.load(logits + ids + 1, ids + 1 < V, -float("inf")).to(tl.float32)
    x2 = tl.load(logits + ids + 2, ids + 2 < V, -float("inf")).to(tl.float32)
    x3 = tl.load(logits + ids + 3, ids + 3 < V, -float("inf")).to(tl.float32)
    return x0, x1, x2, x3


@kernel
def _token_of(logits, group, peak, t, V, position, choice, low, high, HOPPER: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the best token of the group drawn: the one near the top by scores to 2e-4, or if there are several, by
    exact scores.

    The group's largest z is above -31 (noise spans 26, a group's mass is at most 128), so what can win is above -58:
    there z and the sum are off by at most 2e-5, the noise by 1e-4.
    """
    per_t = 1.0 / t
    ids = group * 128 + tl.arange(0, 32) * 4
    x0, x1, x2, x3 = _fours(logits, ids, V)
    w0, w1, w2, w3 = words_of((ids >> 2).to(tl.uint32), position, choice, low, high, 0)
    g0 = (x0 - peak) * per_t + _noise_nearly(w0, HOPPER)
    g1 = (x1 - peak) * per_t + _noise_nearly(w1, HOPPER)
    g2 = (x2 - peak) * per_t + _noise_nearly(w2, HOPPER)
    g3 = (x3 - peak) * per_t + _noise_nearly(w3, HOPPER)
    near = _largest(tl.maximum(tl.maximum(g0, g1), tl.maximum(g2, g3))) - 1e-3
    one = tl.arange(0, 32) * 4 + 65536  # as for groups: one more, and which
    packed = tl.where(g0 >= near, one, 0) + tl.where(g1 >= near, one + 1, 0)
    packed += tl.where(g2 >= near, one + 2, 0) + tl.where(g3 >= near, one + 3, 0)
    packed = tl.sum(packed, 0)
    token = packed & 65535
    if packed >= 131072:
        every = group * 128 + tl.arange(0, 128)
        x = tl.load(logits + every, every < V, -float("inf")).to(tl.float32)
        score = _scaled(x, peak, t).to(tl.float64)
        score += noise_of(word_of(every, position, choice, low, high, 0))
        token = tl.argmax(score, 0)
    return group * 128 + token


@kernel
def _settle(  # type: ignore[no-untyped-def]
    logits, temperature, top_k, top_p, min_p, seeds, choices, positions, peaks, masses, raw_masses,
    tokens, logprobs, finite, mode, tops, bars, totals, lses, counts, away, V, G, row_stride, share,
    WIDTH: tl.constexpr, RAW: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """Decide a row from its groups: write the token itself, or the threshold and the mass for the next kernel.

    mode: 0 the row is done, 1 collect what reaches the bar, 2 look at all tokens.
    """
    let_next_begin(DEPENDENT_LAUNCH)
    row = tl.program_id(0)
    logits += row.to(tl.int64) * row_stride
    t = tl.load(temperature + row)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    least = tl.load(min_p + row)
    position, choice, seed_low, seed_high = _seed(seeds, choices, positions, row)
    group = tl.arange(0, WIDTH)
    guess = _nearly(0, position, choice, seed_low, seed_high, 1, WIDTH, DEPENDENT_LAUNCH)
    wait_for_previous(DEPENDENT_LAUNCH)
    peak_G = tl.load(peaks + row * G + group, group < G, -float("inf"))
    mass_G = tl.load(masses + row * G + group, group < G, 0.0)
    if RAW:
        raw_G = tl.load(raw_masses + row * G + group, group < G, 0.0)
    peak = _largest(peak_G)
    good = (peak < float("inf")) & (peak > -float("inf"))
    todo = 0
    token = tl.full((), 0, tl.int32)
    lse = tl.full((), 0.0, tl.float64)
    if good:
        if RAW:
            lse = peak + tl.log(tl.sum(raw_G.to(tl.float64) * tl.exp((peak_G - peak).to(tl.float64)), 0))
            tl.store(lses + row, lse)
        limited = (k > 0) & (k < V)
        if t == 0:
            best = tl.min(tl.where(peak_G == peak, group, WIDTH), 0)
            ids = best * 128 + tl.arange(0, 32) * 4
            x0, x1, x2, x3 = _fours(logits + _away(away, best * 128, V, share, SPREAD), ids, V)
            first = tl.where(x0 == peak, 0, tl.where(x1 == peak, 1, tl.where(x2 == peak, 2, 3)))
            here = (x0 == peak) | (x1 == peak) | (x2 == peak) | (x3 == peak)
            token = tl.min(tl.where(here, ids + first, 2147483647), 0)
        else:
            t = tl.maximum(t, 1e-30)
            if (p < 1) | limited | (least > 0):
                todo = 1
                tl.store(counts + row, 0)
                tl.store(tops + row, peak)
                z_G = _scaled(peak_G, peak, t)
                total = tl.sum(tl.exp(z_G.to(tl.float64)) * mass_G.to(tl.float64), 0)
                tl.store(totals + row, total)
                floor = tl.where(least > 0, tl.log(tl.maximum(least, 1e-38).to(tl.float64)), -float("inf"))
                low = _key(floor.to(tl.float32))
                if limited & (k <= G):
                    key_G = _key(z_G)
                    end = 0
                    while end > low:
                        middle = low + (end - low + 1) // 2
                        enough = tl.sum((key_G >= middle).to(tl.int32), 0) >= k
                        low = tl.where(enough, middle, low)
                        end = tl.where(enough, end, middle - 1)
                bar = _value(low)
                if (least <= 0) & (limited == 0):
                    bar = (tl.log(total) - 9.010913347279289).to(tl.float32)  # 2**-13
                if bar == -float("inf"):
                    todo = 2
                tl.store(bars + row, bar)
            else:
                # Scores to 2e-4 name the best group, or few candidates; exact scores decide between those.
                guess += (peak_G - peak) * (1.0 / t) + _log_nearly(mass_G, DEPENDENT_LAUNCH)
                guess = tl.where(mass_G > 0, guess, -float("inf"))
                near = guess + 1e-3 >= _largest(guess)
                packed = tl.sum(tl.where(near, group + 65536, 0), 0)  # how many, and which if one
                best = packed & 65535
                if packed >= 131072:
                    top = tl.full((), -float("inf"), tl.float64)
                    one = tl.min(tl.where(near, group, WIDTH), 0)
                    while one < WIDTH:
                        z = _scaled(tl.load(peaks + row * G + one), peak, t).to(tl.float64)
                        score = tl.log(tl.load(masses + row * G + one).to(tl.float64)) + z
                        score += noise_of(word_of(one, position, choice, seed_low, seed_high, 1))
                        best = tl.where(score > top, one, best)
                        top = tl.maximum(score, top)
                        one = tl.min(tl.where(near & (group > one), group, WIDTH), 0)
                there = logits + _away(away, best * 128, V, share, SPREAD)
                token = _token_of(there, best, peak, t, V, position, choice, seed_low, seed_high, DEPENDENT_LAUNCH)
    tl.store(mode + row, todo)
    tl.store(finite + row, good.to(tl.uint8))
    if todo == 0:
        tl.store(tokens + row, token.to(tl.int64))
        if RAW:
            x = tl.load(logits + _away(away, token, V, share, SPREAD) + token).to(tl.float64)
            tl.store(logprobs + row, tl.where(good, x - lse, float("nan")).to(tl.float32))


@kernel
def _collect(  # type: ignore[no-untyped-def]
    logits, temperature, peaks, mode, tops, bars, counts, found_z, found_id, away, V, G, row_stride, share,
    GROUPS: tl.constexpr, CAPACITY: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """Collect z and id of the tokens that reach the threshold, in any order; groups that do not reach it are not
    read."""
    let_next_begin(DEPENDENT_LAUNCH)
    row = tl.program_id(1)
    t = tl.maximum(tl.load(temperature + row), 1e-30)
    wait_for_previous(DEPENDENT_LAUNCH)
    if tl.load(mode + row) == 1:
        bar = tl.load(bars + row)
        peak = tl.load(tops + row)
        for first in range(tl.program_id(0) * GROUPS, G, tl.num_programs(0) * GROUPS):
            group = first + tl.arange(0, GROUPS)
            mine = tl.max(tl.load(peaks + row * G + group, group < G, -float("inf")), 0)
            if _scaled(mine, peak, t) >= bar:
                ids = first * 128 + tl.arange(0, GROUPS * 128)
                there = logits + row.to(tl.int64) * row_stride + _away(away, ids, V, share, SPREAD)
                x = tl.load(there + ids, ids < V, -float("inf")).to(tl.float32)
                z = _scaled(x, peak, t)
                keep = ((z >= bar) & (z > -float("inf"))).to(tl.int32)
                begin = tl.atomic_add(counts + row, tl.sum(keep, 0))
                at = begin + tl.cumsum(keep, 0) - 1
                stored = (keep > 0) & (at < CAPACITY)
                tl.store(found_z + row * CAPACITY + at, z, stored)
                tl.store(found_id + row * CAPACITY + at, ids, stored)


@kernel
def _tile(  # type: ignore[no-untyped-def]
    logits, found_z, found_id, start, n, peak, t, away, share, DENSE: tl.constexpr, BLOCK: tl.constexpr,
    SPREAD: tl.constexpr,
):  # fmt: skip
    """Return z and id of BLOCK tokens, of the row or of those collected; z is -inf past the end."""
    at = start + tl.arange(0, BLOCK)
    if DENSE:
        ids = at
        there = logits + _away(away, at, n, share, SPREAD)
        z = _scaled(tl.load(there + at, at < n, -float("inf")).to(tl.float32), peak, t)
    else:
        ids = tl.load(found_id + at, at < n, 0)
        z = tl.load(found_z + at, at < n, -float("inf"))
    return z, ids


@kernel
def _units(z, keep, DENSE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Sum the mass of the tokens to ``keep``, in units of 2**-42: a sum of integers is the same in any order."""
    if DENSE:
        e = tl.exp(z).to(tl.float64)
    else:
        e = tl.exp(z.to(tl.float64))
    return tl.sum(tl.where(keep, e * 4398046511104.0, 0.0).to(tl.int64), 0)


@kernel
def _select(  # type: ignore[no-untyped-def]
    logits, found_z, found_id, n, peak, t, V, k, p, least, total, bar, position, choice, seed_low, seed_high, away,
    share, DENSE: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr, SPREAD: tl.constexpr,
):  # fmt: skip
    """Choose the token of a truncated row, from all n tokens (DENSE) or from n collected ones that include all kept
    tokens."""
    limited = (k > 0) & (k < V)
    floor = tl.where(least > 0, tl.log(tl.maximum(least, 1e-38).to(tl.float64)), -float("inf"))
    low = tl.maximum(_key(floor.to(tl.float32)), -2139095040)  # above the key of -inf
    if limited:  # the largest key that k tokens reach: three keys are tried at a time, their counts packed in one sum
        end = 0
        if not DENSE:
            low = tl.maximum(low, _key(bar))  # nothing below it is kept
        while end > low:
            step = tl.maximum((end - low + 3) // 4, 1)
            packed = tl.full((), 0, tl.int64)
            for start in range(0, n, BLOCK):
                z, ids = _tile(logits, found_z, found_id, start, n, peak, t, away, share, DENSE, BLOCK, SPREAD)
                above = _key(z) - low
                tries = (above >= step).to(tl.int64) + ((above >= 2 * step).to(tl.int64) << 21)
                packed += tl.sum(tries + ((above >= 3 * step).to(tl.int64) << 42), 0)
            reached = ((packed & 0x1FFFFF) >= k).to(tl.int32)
            reached += (((packed >> 21) & 0x1FFFFF) >= k).to(tl.int32) + ((packed >> 42) >= k).to(tl.int32)
            end = tl.where(reached == 3, end, tl.minimum(end, low + (reached + 1) * step - 1))
            low += reached * step
    wanted = total * p
    if (p < 1) & (limited | (least > 0)):
        units = tl.full((), 0, tl.int64)
        for start in range(0, n, BLOCK):
            z, ids = _tile(logits, found_z, found_id, start, n, peak, t, away, share, DENSE, BLOCK, SPREAD)
            units += _units(z, _key(z) >= low, DENSE)
        wanted = units.to(tl.float64) * 2.2737367544323206e-13 * p
    last_key = -2147483647  # the best of the tokens before this one, in order of (z descending, id), is chosen
    last_id = 0
    settled = 0
    while settled == 0:
        best = tl.full((), -float("inf"), tl.float64)
        best_id = 0
        best_key = 0
        for start in range(0, n, BLOCK):
            z, ids = _tile(logits, found_z, found_id, start, n, peak, t, away, share, DENSE, BLOCK, SPREAD)
            key = _key(z)
            open_ = (key >= low) & ((key > last_key) | ((key == last_key) & (ids < last_id)))
            hopeful = tl.max(open_.to(tl.int32), 0) > 0
            if DENSE:
                guess = z + _nearly(start, position, choice, seed_low, seed_high, 0, BLOCK, DEPENDENT_LAUNCH)
                hopeful = tl.max(tl.where(open_, guess, -float("inf")), 0).to(tl.float64) + 1e-3 >= best
            if hopeful:
                score = z.to(tl.float64) + noise_of(word_of(ids, position, choice, seed_low, seed_high, 0))
                score = tl.where(open_, score, -float("inf"))
                top = tl.max(score, 0)
                if top > best:
                    best = top
                    best_id = tl.min(tl.where(score == top, ids, 2147483647), 0)
                    best_key = tl.max(tl.where((score == top) & (ids == best_id), key, -2147483647), 0)
        settled = 1
        if p < 1:
            units = tl.full((), 0, tl.int64)
            for start in range(0, n, BLOCK):
                z, ids = _tile(logits, found_z, found_id, start, n, peak, t, away, share, DENSE, BLOCK, SPREAD)
                key = _key(z)
                units += _units(z, (key > best_key) | ((key == best_key) & (ids < best_id)), DENSE)
            settled = ((units == 0) | (units.to(tl.float64) * 2.2737367544323206e-13 < wanted)).to(tl.int32)
        last_key = best_key
        last_id = best_id
    return last_id


@kernel
def _choose(  # type: ignore[no-untyped-def]
    logits, temperature, top_k, top_p, min_p, seeds, choices, positions, mode, tops, bars, totals, lses, counts,
    found_z, found_id, tokens, logprobs, away, V, G, row_stride, share,
    CAPACITY: tl.constexpr, BLOCK: tl.constexpr, RAW: tl.constexpr, DEPENDENT_LAUNCH: tl.constexpr,
    SPREAD: tl.constexpr,
):  # fmt: skip
    """Choose the token of each row that ``_settle`` did not decide."""
    let_next_begin(DEPENDENT_LAUNCH)
    row = tl.program_id(0)
    t = tl.maximum(tl.load(temperature + row), 1e-30)
    k = tl.load(top_k + row)
    p = tl.load(top_p + row)
    least = tl.load(min_p + row)
    position, choice, seed_low, seed_high = _seed(seeds, choices, positions, row)
    wait_for_previous(DEPENDENT_LAUNCH)
    todo = tl.load(mode + row)
    if todo > 0:
        logits += row.to(tl.int64) * row_stride
        found_z += row * CAPACITY
        found_id += row * CAPACITY
        total = tl.load(totals + row)
        bar = tl.load(bars + row)
        peak = tl.load(tops + row)
        n = tl.load(counts + row)
        all_tokens = (todo == 2) | (n > CAPACITY)
        if (all_tokens == 0) & (least <= 0) & ((k <= 0) | (k >= V)):  # top-p alone: is its mass among the collected?
            units = tl.full((), 0, tl.int64)
            for start in range(0, n, BLOCK):
                z, _ids = _tile(logits, found_z, found_id, start, n, peak, t, away, share, False, BLOCK, SPREAD)
                units += _units(z, z > -float("inf"), False)
            all_tokens = units.to(tl.float64) * 2.2737367544323206e-13 < total * p
        if all_tokens:
            token = _select(
                logits, found_z, found_id, V, peak, t, V, k, p, least, total, bar, position, choice, seed_low,
                seed_high, away, share, True, BLOCK, DEPENDENT_LAUNCH, SPREAD,
            )  # fmt: skip
        else:
            token = _select(
                logits, found_z, found_id, n, peak, t, V, k, p, least, total, bar, position, choice, seed_low,
                seed_high, away, share, False, BLOCK, DEPENDENT_LAUNCH, SPREAD,
            )  # fmt: skip
        tl.store(tokens + row, token.to(tl.int64))
        if RAW:
            x = tl.load(logits + _away(away, token, V, share, SPREAD) + token).to(tl.float64)
            tl.store(logprobs + row, (x - tl.load(lses + row)).to(tl.float32))


def kernels() -> Sequence[Kernel]:
    """List the kernels for ahead-of-time compilation."""
    ints = dict.fromkeys(("V", "G", "row_stride", "kept_stride", "first", "share"), "i32")
    parameters = {
        "temperature": "*fp32", "top_k": "*i32", "top_p": "*fp32", "min_p": "*fp32", "seeds": "*i64",
        "choices": "*i64", "positions": "*i64",
    }  # fmt: skip
    floats = dict.fromkeys(("peaks", "masses", "raw_masses", "tops", "bars", "found_z", "logprobs"), "*fp32")
    others = {
        "logits": "*fp32", "kept": "*fp32", "away": "*i64", "tokens": "*i64", "finite": "*u8", "found_id": "*i32",
        **dict.fromkeys(("mode", "counts"), "*i32"), **dict.fromkeys(("totals", "lses"), "*fp64"),
    }  # fmt: skip
    arguments = {**parameters, **floats, **others, **ints}
    made = []
    for spread in (False, True):
        how = {"DEPENDENT_LAUNCH": False, "SPREAD": spread}
        some, divisible, label = how | {"CAPACITY": CANDIDATES}, ("V", "row_stride"), " of parts" * spread
        made += [
            Kernel(f"groups{label}", _groups, arguments, how | {"GROUPS": 32, "PAIRS": False, "RAW": False}, divisible),
            Kernel(f"settle{label}", _settle, arguments, how | {"WIDTH": 1024, "RAW": True}, divisible),
            Kernel(f"collect{label}", _collect, arguments, some | {"GROUPS": 16}, divisible),
            Kernel(f"choose{label}", _choose, arguments, some | {"BLOCK": 2048, "RAW": True}, divisible, warps=8),
        ]
    return made
