"""Views of a running engine: its log in pieces, growing bills, and the map of KV blocks."""

import random

import pytest
from decision_logs import log_for
from small_engine import make, request

from transect.engine.scheduling.decisions import read_records
from transect.engine.scheduling.snapshot import snapshot
from transect.explain.engine.bill import bill
from transect.explain.engine.growing_bill import GrowingBill
from transect.explain.engine.kv_map import CACHED, FREE, HIDDEN, KVMap
from transect.explain.engine.live_log import LiveLog
from transect.explain.engine.log import build
from transect.explain.engine.work import StepWork


class Ticking:
    """A clock on which every look takes a moment."""

    def __init__(self):
        self.time = 0.0

    def now(self):
        self.time += 1.0
        return self.time


def engine(**limits):
    core = make(**limits)
    core.scheduler.clock = Ticking()
    core.decisions = log_for(core)
    return core


def watched(core):
    """A log that is followed from now on, and a function that reads on."""
    ring = core.decisions.ring
    log = LiveLog(next(iter(read_records(ring.header))))
    position = 0

    def read():
        nonlocal position
        news = log.take(ring.since(position))
        position = ring.count
        return news

    return log, read


@pytest.mark.parametrize("seed", range(6))
def test_bills_that_grow_end_as_bills_of_the_whole_log(seed):
    rng = random.Random(seed)
    core = engine(num_blocks=rng.choice([14, 24, 64]), max_num_seqs=rng.choice([2, 4]), enable_prefix_caching=seed % 2)
    log, read = watched(core)
    work = StepWork.of(log.header, None)
    names = [f"r{i}" for i in range(8)]
    waiting = [request(name, rng.randint(1, 30), 0, i, max_tokens=rng.randint(1, 12)) for i, name in enumerate(names)]
    found = {name: GrowingBill(name, work) for name in names}
    while core.has_work or waiting:
        if waiting and rng.random() < 0.4:
            core.add(waiting.pop())
        core.step()
        if rng.random() < 0.3:
            news = read()
            for each in found.values():
                each.take(news)
    news = read()
    for each in found.values():
        each.take(news)
    assert not log.requests
    whole = build(core.decisions.ring.records())
    for name, growing in found.items():
        expected, last = bill(whole, name, work), growing.to_dict()
        for span, whole_span in ((last["ttft"], expected.ttft), (last["decode"], expected.decode)):
            if whole_span is None:
                assert span is None
                continue
            assert span["parts_ms"] == pytest.approx(whole_span.to_dict()["parts_ms"])
            assert (span["ms"], span["tokens"]) == (pytest.approx(1e3 * whole_span.seconds), whole_span.tokens)
        assert (last["output_tokens"], last["finish_reason"]) == (expected.output_tokens, expected.finish_reason)


def test_a_bill_of_a_running_request_adds_up_and_says_why_it_waits():
    core = engine(max_num_seqs=1)
    log, read = watched(core)
    for name in "ab":
        core.add(request(name, first=ord(name), max_tokens=20))
    growing = GrowingBill("chatcmpl-b", StepWork.of(log.header, None))
    for _ in range(5):
        core.step()
    growing.take(read())
    found = growing.to_dict()
    assert not found["first_token"] and found["decode"] is None
    assert max(found["ttft"]["parts_ms"], key=found["ttft"]["parts_ms"].get) == "queue: places"
    assert sum(found["ttft"]["parts_ms"].values()) == pytest.approx(found["ttft"]["ms"])
    assert GrowingBill("none", StepWork.of(log.header, None)).to_dict()["known"] is False


def test_a_log_that_is_followed_late_knows_all_unfinished_requests():
    core = engine()
    core.add(request("early", prompt=4, max_tokens=30))
    core.add(request("short", first=7, max_tokens=2))
    core.add(request("two", first=9, n=2, max_tokens=30))
    for _ in range(8):
        core.step()
    core.abort("two", 1)
    seen = snapshot(core.scheduler, requests=True)
    log = LiveLog(next(iter(read_records(core.decisions.ring.header))))
    log.take(core.decisions.ring.since(core.decisions.ring.count - 2))  # nothing of how they began
    log.adopt(seen.requests)
    assert {each.request_id for each in log.requests.values()} == {"early", "two"}
    assert next(each.known for each in seen.requests if each.request_id == "two")[1] == -1
    position = core.decisions.ring.count
    core.abort("two", 0)
    news = log.take(core.decisions.ring.since(position))
    assert [(end.choice, end.reason) for end in news.ends] == [(0, "abort")]
    assert {each.request_id for each in log.requests.values()} == {"early"}


def test_steps_whose_rows_are_not_known_are_left_out_and_the_others_are_complete():
    core = engine()
    core.add(request("a", max_tokens=12))
    while core.has_work:
        core.step()
    ring = core.decisions.ring
    whole = build(ring.records())
    log = LiveLog(whole.header)
    news = log.take(ring.since(0))
    assert [(step.number, step.rows, step.begins, step.at) for step in news.steps] == [
        (step.number, step.rows, step.begins, step.at) for step in whole.steps
    ]
    late = LiveLog(whole.header).take(ring.since(6))
    assert all(step.rows for step in late.steps) and len(late.steps) < len(news.steps)


def owners_of(runs, size):
    owners = [None] * size
    for first, count, owner, users in zip(*[iter(runs)] * 4, strict=True):
        for block in range(first, first + count):
            owners[block] = owner, users
    return owners


def test_the_map_of_blocks_shows_owners_shared_prefixes_cached_and_evicted_blocks():
    core = engine(num_blocks=16)
    core.add(request("a", prompt=13, max_tokens=20))
    for _ in range(3):
        core.step()
    core.add(request("b", prompt=13, max_tokens=20))  # the same prompt: three full blocks are shared
    for _ in range(3):
        core.step()
    seen = snapshot(core.scheduler)
    first = KVMap.of(seen)
    shown = owners_of(first.runs(), 16)
    tables = {table.leader: table for table in seen.tables}
    a, b = sorted(tables)
    assert sum(each == (a, 2) for each in shown) == 3 and tables[b].reused == 3
    assert sum(each == (FREE, 0) for each in shown) == core.scheduler.cache.num_free
    assert not first.runs(first)
    own = owners_of(first.shown({b}).runs(), 16)
    assert {each[0] for each in own} == {b, HIDDEN}
    while core.has_work:
        core.step()
    second = KVMap.of(snapshot(core.scheduler), first)
    cached = sum(each[0] == CACHED for each in owners_of(second.runs(), 16))
    assert cached == core.scheduler.cache.num_cached > 0
    changed = owners_of(second.runs(first), 16)
    assert [each for each in changed if each is not None and each[0] >= 0] == []
    core.add(request("c", prompt=50, first=9, max_tokens=4))
    core.step()
    third = KVMap.of(snapshot(core.scheduler), second)
    assert len(third.evicted) == core.scheduler.cache.evictions > 0
    assert all(second.owners[block] == CACHED and third.owners[block] >= 0 for block in third.evicted)


def test_a_snapshot_lists_the_queue_in_its_order_with_preempted_sequences():
    core = engine(num_blocks=8, enable_prefix_caching=False)
    for name in "abc":
        core.add(request(name, prompt=9, first=ord(name), max_tokens=20))
    preempted = False
    while core.has_work:
        core.step()
        seen = snapshot(core.scheduler)
        assert [seq for seq, _ in seen.waiting] == [seq.seq_id for seq in core.scheduler.waiting]
        assert seen.stats.waiting == sum(not again for _, again in seen.waiting)
        preempted = preempted or any(again for _, again in seen.waiting)
    assert preempted
