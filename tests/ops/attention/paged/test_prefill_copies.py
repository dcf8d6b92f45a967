"""The copying warps of prefill chunks on a processor: every tile finds its keys and values in the ring, in order."""

from __future__ import annotations

import numpy as np
import pytest

from tests.helpers.copying_warps import Box, Machine, Pointer, Shared
from transect.ops.attention.packed.hopper_tiles import AHEAD, ROWS
from transect.ops.attention.paged import prefill_copies as module

SLOTS, HALF = 4, 64
CASES = [
    # (tokens of this step, tokens in all) of rows; how their blocks lie
    (((128, 128),), "side by side"),
    (((40, 700), (1, 300), (2, 129), (0, 0), (90, 515)), "side by side"),
    (((40, 700), (1, 300), (2, 129), (0, 0), (90, 515)), "scattered"),
    (((33, 1000), (70, 777)), "in runs"),
]


@pytest.mark.parametrize(("rows", "how"), CASES, ids=lambda case: str(case).replace(" ", "_"))
@pytest.mark.parametrize(("group", "d", "block"), [(4, 128, 16), (7, 64, 8), (3, 96, 128)])
def test_keys_and_values_come_in_order(rows: tuple, how: str, group: int, d: int, block: int) -> None:
    generator = np.random.default_rng(len(rows) + d)
    kv_heads, columns, halves = 2, 128, -(-d // HALF)
    needed = [-(-length // block) for _, length in rows]
    blocks = sum(needed) + 3
    tables = np.full((len(rows), max(needed)), 2**30)
    k_cache, v_cache = (np.full((blocks, kv_heads, block, d), np.nan) for _ in range(2))
    for row, (_, length) in enumerate(rows):
        own = np.arange(needed[row]) + 3 + sum(needed[:row])
        if how == "scattered":
            generator.shuffle(own)
        elif how == "in runs":
            own = np.roll(own, needed[row] // 3)
        tables[row, : needed[row]] = own
        for n, place in enumerate(own):
            for cache in (k_cache, v_cache):
                owned = min(block, length - n * block)
                cache[place, :, :owned] = generator.standard_normal((kv_heads, owned, d))
    starts = np.cumsum([0, *(new for new, _ in rows)])
    lengths = np.array([length for _, length in rows])
    queries = 2 * (ROWS // group)
    tiles = int(starts[-1]) // queries + len(rows)
    work = tiles * kv_heads

    machine = Machine(seed=d)
    f = machine.functions(module)
    ring = np.full((SLOTS * halves * columns, HALF), np.nan)
    pieces = Shared(ring, [SLOTS * halves * columns // block, 1, 1, block, HALF])
    runs = Shared(ring, [SLOTS * halves, columns // block, 1, block, HALF])
    plan = Shared(np.zeros((16, 1), np.int64), [16, 1])
    plan.index = lambda i: Shared(plan.rows[i : i + 1], [1])  # type: ignore[method-assign]
    q_full, q_empty = machine.barriers(1, 1), machine.barriers(3, 3)
    full, empty = machine.barriers(*[1] * (SLOTS + 1)), machine.barriers(*[2] * SLOTS)
    boxes = [
        Box(cache, [many, 1, block, HALF]) for cache in (k_cache, v_cache) for many in (1, columns // block)
    ]  # fmt: skip
    table = Pointer(tables.reshape(-1))
    seen: list[list[tuple[int, int, int]]] = [[], []]

    def keys() -> None:
        f["_fetch_keys"](
            None, boxes[0], boxes[1], None, plan, pieces, runs, q_full, q_empty, full, empty, Pointer(np.zeros(1, int)),
            table, Pointer(starts), Pointer(lengths), len(rows), tiles, work, blocks, tables.shape[1], 1, group,
            columns, block, SLOTS, True, AHEAD, False,
        )  # fmt: skip

    def values() -> None:
        f["_fetch_values"](
            boxes[2], boxes[3], plan, pieces, runs, q_full, q_empty, full, empty, table, blocks, tables.shape[1], group,
            columns, block, SLOTS,
        )  # fmt: skip

    def attend(part: int) -> None:
        """A warpgroup: it looks at what it would multiply, in the order in which it would."""
        queue = done = 0
        while True:
            token, _, position, length, head, row = f["_planned"](plan, q_full, done, 4)
            if head < 0:
                return
            high = -(-min(length, position + queries) // columns)
            order = [("k", high - 1)]
            for n in range(high - 1, 0, -1):
                order += [("k", n - 1), ("v", n)]
            for what, n in [*order, ("v", 0)]:
                machine.wait(full.index(queue % SLOTS), queue // SLOTS & 1)
                slot = ring.reshape(SLOTS, halves, columns, HALF)[queue % SLOTS]
                found = slot.transpose(1, 0, 2).reshape(columns, -1)[:, :d]
                owned = min(columns, length - n * columns)
                places = n * columns + np.arange(owned)
                cache = k_cache if what == "k" else v_cache
                expected = cache[tables[row][places // block], head, places % block]
                np.testing.assert_array_equal(found[:owned], expected)
                if what == "v":
                    assert not found[owned:].any()  # a NaN here would reach the sums
                empty.index(queue % SLOTS).settle(1, 0)
                queue += 1
            seen[part].append((row, head, token))
            q_empty.index(done % 2).settle(1, 0)
            done += 1

    machine.run(keys, values, lambda: attend(0), lambda: attend(1))
    wanted = [
        (row, head, token)
        for row, (new, _) in enumerate(rows)
        if new > 1
        for head in range(kv_heads)
        for token in range(int(starts[row]), int(starts[row + 1]), queries)
    ]
    assert sorted(seen[0]) == wanted
    assert seen[0] == seen[1]
