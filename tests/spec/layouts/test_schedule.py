"""Pipeline schedules: complete, without deadlock, with the bubbles that the papers say."""

from collections import Counter
from itertools import product

import pytest

from transect.spec.layouts.schedule import Action, drawn, most_kept, schedule, simulate

CASES = [
    *(("gpipe", p, m, 1) for p, m in product((1, 2, 3, 4), (1, 3, 4, 8))),
    *(("1f1b", p, m, 1) for p, m in product((1, 2, 3, 4), (1, 3, 4, 8))),
    *(("interleaved", p, k * p, v) for p, k, v in product((1, 2, 3, 4), (1, 2, 3), (2, 3))),
]


@pytest.mark.parametrize(("name", "stages", "micro_batches", "chunks"), CASES)
def test_every_pass_is_done_once_and_no_rank_waits_for_ever(name, stages, micro_batches, chunks):
    actions = schedule(name, stages, micro_batches, chunks)
    each = {Action(kind, i, c) for kind, i, c in product("FB", range(micro_batches), range(chunks))}
    assert all(Counter(rank) == Counter(each) for rank in actions)
    timeline = simulate(actions)
    assert timeline.kept == [most_kept(name, rank, stages, micro_batches, chunks) for rank in range(stages)]
    if micro_batches >= stages:
        bubble = (stages - 1) / (chunks * micro_batches + stages - 1)
        assert timeline.bubbles == pytest.approx([bubble] * stages)
    if name == "1f1b":
        assert timeline.kept == [min(stages - rank, micro_batches) for rank in range(stages)]
    if name == "gpipe":
        assert timeline.kept == [micro_batches] * stages


def test_a_link_delays_and_a_wrong_order_is_found():
    actions = schedule("1f1b", 2, 4)
    assert simulate(actions, link=0.5).length > simulate(actions).length
    actions[1] = list(reversed(actions[1]))
    with pytest.raises(ValueError, match="waits for ever"):
        simulate(actions)


def test_a_timeline_is_drawn():
    lines = drawn(simulate(schedule("1f1b", 2, 2)))
    assert [line.rstrip() for line in lines] == ["F0 F1 ......B0    ...B1", "...F0 B0    F1 B1"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("interleaved", 4, 6, 2), "take 8"),
        (("interleaved", 4, 8, 1), "needs 2 runs"),
        (("1f1b", 4, 8, 2), "are for schedule"),
        (("zigzag", 4, 8), "one of 1f1b, gpipe, interleaved"),
        (("1f1b", 0, 8), "at least 1"),
    ],
)
def test_what_is_no_schedule_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        schedule(*arguments)
