"""Who comes next: arrival, priority and the shares of clients."""

import pytest
from msgspec import structs
from small_engine import make, order_of_ends, recorded_batches, request

from transect.engine.scheduling.policies.order import MOST_CLIENTS, Order


def of(client, name, weight=1.0, **options):
    return structs.replace(request(name, **options), client=client, weight=weight)


def test_under_fcfs_a_priority_is_refused():
    core = make()
    with pytest.raises(ValueError, match=r"priority is 3, .* --scheduling-policy priority"):
        core.add(request("a", priority=3))
    core.add(request("a"))
    assert order_of_ends(recorded_batches(core)[1]) == ["a"]


def test_waiting_raises_the_rank():
    """An urgent request overtakes what waits, and a stream of urgent ones does not do so for ever."""
    core = make(max_num_seqs=1, max_num_batched_tokens=4, scheduling_policy="priority")
    core.add(request("runs", max_tokens=2))
    core.step()
    core.add(request("patient", priority=5, max_tokens=2))
    ended, count = [], 0
    while "patient" not in ended:
        if len(core.scheduler.waiting) < 3:
            core.add(request(f"urgent{count}", priority=-5, max_tokens=2))
            count += 1
        ended += [output.request_id for output in core.step() if output.finish_reason]
        assert count < 200, "it starves"
    assert count > 10, "the urgent ones went first for a while"


def test_a_newcomer_goes_before_the_backlog_of_another_client():
    core = make(max_num_seqs=1)
    for number in range(10):
        core.add(of("a", f"a{number}"))
    core.step()
    core.add(of("b", "b0"))
    ended = order_of_ends(recorded_batches(core)[1])
    assert ended.index("b0") == 1 and [each for each in ended if each[0] == "a"] == [f"a{n}" for n in range(10)]


@pytest.mark.parametrize("weight", [1.0, 3.0])
def test_clients_share_by_tokens_and_weights(weight):
    core = make(max_num_seqs=1)
    for number in range(24):
        core.add(of("a", f"a{number}", weight=weight))
    for number in range(12):  # twice as long
        core.add(of("b", f"b{number}", prompt=12, max_tokens=8))
    ended = order_of_ends(recorded_batches(core)[1])
    half = ended[: len(ended) // 2]
    tokens = {name: sum(10 if each[0] == "a" else 20 for each in half if each[0] == name) for name in "ab"}
    assert tokens["a"] / tokens["b"] == pytest.approx(weight, rel=0.35)


def test_short_answers_are_not_charged_as_long_ones():
    order = Order()
    first = order.enter("a", 1.0, 0, 10, 100, 1)
    order.admitted(first)
    order.ended(first, 15)
    assert order.key("a", 0, 1)[0] == pytest.approx(15)


def test_clients_without_a_claim_are_forgotten():
    order = Order()
    for number in range(3 * MOST_CLIENTS):
        turn = order.enter(f"c{number}", 1.0, 0, 4, 4, 1)
        order.admitted(turn)
        order.ended(turn, 0)
    assert len(order._ends) <= MOST_CLIENTS + 1


def test_a_lone_client_is_served_in_the_order_of_arrival_whatever_ends_early():
    order, turns = Order(), []
    for number in range(40):
        turns.append(order.enter("a", 1.0, 0, 5, 200, 1))
        if number >= 5:
            order.admitted(turns[number - 5])
            order.ended(turns[number - 5], 1)
    starts = [turn.key for turn in turns]
    assert starts == sorted(starts)
