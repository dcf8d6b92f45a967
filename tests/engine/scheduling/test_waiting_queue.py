"""Who leaves the queue leaves it altogether, and the order of the others stays."""

import gc
import random

import pytest
from small_engine import make, order_of_ends, recorded_batches, request

from transect.engine.scheduling.policies.admission import QueueFull
from transect.engine.scheduling.request import RequestState


def test_nothing_of_an_aborted_request_stays_while_the_engine_is_busy():
    core = make(max_num_seqs=1, max_queue=10)
    core.add(request("busy", max_tokens=50))
    core.add(request("waits"))
    core.step()
    for number in range(50):  # one client after the other comes, waits a little and leaves
        core.add(request(f"gone{number}", prompt=30))
        core.abort(f"gone{number}")
    core.step()
    gc.collect()
    alive = [each.spec.request_id for each in gc.get_objects() if type(each) is RequestState and each.max_length == 34]
    assert not alive
    assert core.stats().waiting == 1


def test_order_of_the_others_is_kept():
    rng = random.Random(3)
    core = make(max_num_seqs=1, max_num_batched_tokens=64, scheduling_policy="priority")
    core.add(request("first"))
    core.step()
    names = [f"{priority}{number:02}" for number, priority in enumerate(rng.choices("012", k=30))]
    for name in names:
        core.add(request(name, priority=int(name[0])))
    left = rng.sample(names, 12)
    for name in left:
        core.abort(name)
    ended = order_of_ends(recorded_batches(core)[1])
    assert [name for name in ended if name not in left] == ["first", *sorted(set(names) - set(left))]


def test_those_who_left_make_room():
    core = make(max_num_seqs=1, max_queue=2)
    core.add(request("busy", max_tokens=50))
    core.step()
    for name in "ab":
        core.add(request(name))
    with pytest.raises(QueueFull, match="2 requests wait already"):
        core.add(request("c"))
    core.abort("a")
    core.add(request("c"))
    assert core.stats().waiting == 2
