"""Random schedules of clients, weights and priorities: nobody is overtaken out of turn, and every wait is bounded.

The bound is that of docs/understand/policies.md. While a request waits, another client of weight w is given at most

    w * (start tag of the request + 2 * patience - start tag of that client's first request that waits) + its longest

tokens; ``patience`` is 0 under fcfs.
"""

from collections import defaultdict

from effort import examples
from hypothesis import given
from hypothesis import strategies as st
from share_schedules import WEIGHTS, Coming, Engine, check_order, check_waits

COMING = st.builds(
    Coming,
    st.integers(0, 60),
    st.sampled_from(sorted(WEIGHTS)),
    st.integers(1, 12),
    st.integers(1, 12),
    st.integers(-3, 3),
    st.sampled_from((1, 1, 1, 2)),
)
SCHEDULES = st.lists(COMING, min_size=2, max_size=40)
BACKLOGS = st.tuples(st.integers(5, 25), st.sampled_from(sorted(WEIGHTS)), SCHEDULES).map(
    lambda drawn: [Coming(0, drawn[1], 6, 6, 0, 1)] * drawn[0] + drawn[2]
)


@examples(75, 4000, print_blob=True)
@given(st.one_of(SCHEDULES, BACKLOGS), st.integers(1, 8))
def test_arrival_between_clients_and_within(schedule, tokens):
    engine = Engine("fcfs", 2, max(tokens, 2))
    engine.run([coming for coming in schedule if coming.n <= 2])
    assert len(engine.admitted) == len(engine.states)
    check_order(engine)


@examples(75, 4000, print_blob=True)
@given(st.sampled_from(("fcfs", "priority")), st.one_of(SCHEDULES, BACKLOGS), st.integers(1, 8))
def test_every_wait_is_bounded(policy, schedule, tokens):
    engine = Engine(policy, 1, tokens)
    engine.run([Coming(each.step, each.client, each.prompt, each.outputs, each.priority, 1) for each in schedule])
    assert len(engine.admitted) == len(engine.states)
    check_order(engine)
    check_waits(engine)


@examples(50, 2000, print_blob=True)
@given(st.sampled_from(("fcfs", "priority")), BACKLOGS, st.integers(2, 6))
def test_places_are_shared(policy, schedule, places):
    """A client that waits without a place gets one within a few steps while another client has several and more than
    its share."""
    engine = Engine(policy, places, 16)
    hungry = defaultdict(int)

    def look():
        held, weights = defaultdict(int), {}
        for seq in engine.scheduler.running:
            held[seq.request.spec.client] += engine.scheduler._places_of(seq)
            weights[seq.request.spec.client] = seq.request.spec.weight
        waiting = {seq.request.spec.client: seq for seq in engine.scheduler.waiting.in_order()}
        weights |= {client: seq.request.spec.weight for client, seq in waiting.items()}
        total = sum(weights.values())
        rich = [
            client
            for client, count in held.items()
            if count > places * weights[client] / total
            and sum(seq.request.spec.client == client and seq.length < seq.max_length
                    for seq in engine.scheduler.running) > 1
        ]  # fmt: skip
        for client in WEIGHTS:
            starved = client in waiting and not held.get(client) and rich and engine.scheduler.held_back == "places"
            hungry[client] = hungry[client] + 1 if starved else 0
            assert hungry[client] <= places + 2 * len(WEIGHTS), (
                f"{client} has no place, and {rich} have more than their shares"
            )

    long = [Coming(each.step, each.client, each.prompt, each.outputs + 14, each.priority, 1) for each in schedule]
    engine.run(long, look)
    assert len(engine.admitted) == len(engine.states)
