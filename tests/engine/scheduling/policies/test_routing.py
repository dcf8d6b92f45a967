"""Which engine gets a request."""

import pytest

from transect.engine.scheduling.policies.routing import Router

BOTH = (0, 1)
LONG = list(range(100))


def test_load_is_spread_and_given_back():
    router = Router([1000, 1000], 4)
    tickets = [router.send([i] * 10, 5, BOTH) for i in range(4)]
    assert [ticket.engine for ticket in tickets] == [0, 1, 0, 1]
    assert router.load(0) == router.load(1) == 30
    router.drawn(tickets[0], 2)
    assert router.load(0) == 18  # the prompt is computed, and three tokens are left
    router.drawn(tickets[0], 9)  # more than was expected
    router.done(tickets[0])
    assert router.load(0) == 15
    assert router.send([9] * 10, 5, BOTH).engine == 0


def test_a_prefix_draws_until_the_queue_is_longer_than_what_it_saves():
    router = Router([1000, 1000], 4)
    first = router.send(LONG, 10, BOTH)
    router.drawn(first, 10)
    where = [router.send([*LONG, i], 10, BOTH).engine for i in range(12)]
    assert where[:8] == [first.engine] * 8 and 1 - first.engine in where
    router.forget()
    idlest = min(BOTH, key=router.load)
    assert router.load(0) != router.load(1) and router.send(LONG, 1, BOTH).engine == idlest


def test_what_the_cache_cannot_hold_is_forgotten_oldest_first():
    router = Router([8 * 4, 8 * 4], 4)
    for prompt in (LONG[:32], LONG[40:72]):
        router.done(router.send(prompt, 1, [0]))
    assert router.send(LONG[40:72], 1, [0]).prompt == 1  # the last token is computed in any case
    assert router.send(LONG[:32], 1, [0]).prompt == 32


def test_a_prompt_that_an_engine_refused_is_not_expected_there():
    router = Router([1000, 1000], 4)
    router.done(router.send(LONG[:40], 1, [0]))
    router.refused(router.send(LONG, 10, [0]))
    assert router.load(0) == 0
    assert router.send(LONG, 10, [0]).prompt == 60  # what was computed before stays there


def test_only_living_engines():
    router = Router([1000, 1000], 4)
    router.done(router.send(LONG, 1, [0]))
    assert router.send(LONG, 1, [1]).engine == 1
    with pytest.raises(ValueError, match="no engine to choose from"):
        router.send(LONG, 1, [])


def test_an_adapter_draws_to_the_engine_that_has_it_while_there_is_room():
    router = Router([1000, 1000], 4, slots=2)
    first = router.send(LONG, 10, BOTH, "a").engine
    assert router.send([5] * 20, 10, BOTH, "b").engine == 1 - first
    for turn in range(3):  # other prompts of the same adapter, and those of the base, which go where least waits
        assert router.send([turn] * 20, 10, BOTH, "a").engine == first
    assert router.send([6] * 20, 10, BOTH).engine == 1 - first
    where = [router.send([turn] * 40, 60, BOTH, "a").engine for turn in range(10, 30)]
    assert where[0] == first and set(where) == set(BOTH)  # at last the queue is longer than a load takes
    router.renew(0, 1000)
    router.renew(1, 1000)
    assert {len(each.adapters) for each in router._engines} == {0}


def test_a_prefix_of_one_adapter_is_none_of_another():
    router = Router([1000], 4, slots=1)
    router.done(router.send(LONG, 1, [0], "a"))
    assert router.send(LONG, 1, [0], "a").prompt == 1
    assert router.send(LONG, 1, [0], "b").prompt == len(LONG) + Router.ADAPTER
    assert router.send(LONG, 1, [0]).prompt == len(LONG)
    assert router.send(LONG, 1, [0], "a").prompt == 1 + Router.ADAPTER  # its slot went to b


def test_tokens_of_a_slow_engine_weigh_more():
    router = Router([1000, 1000], 4)
    router.weigh(1, 3.0)
    where = [router.send([number] * 10, 20, BOTH).engine for number in range(12)]
    assert where.count(0) == 9 and where.count(1) == 3 and router.pace(1) == 3.0
    router.renew(1, 1000)  # another engine is there: its pace is not known yet
    assert router.pace(1) == 1.0 and router.send([99] * 10, 20, BOTH).engine == 1


def test_a_session_returns_to_its_engine_while_that_one_is_little_behind():
    router = Router([1000, 1000], 4)
    first = router.send([1] * 10, 10, BOTH, session="a")
    where = [router.send([number] * 10, 10, BOTH, session="a").engine for number in range(2, 12)]
    assert where[:6] == [first.engine] * 6 and 1 - first.engine in where
    home = router.send([20] * 10, 10, BOTH, session="a").engine
    assert router.send([21] * 10, 10, [1 - home], session="a").engine == 1 - home  # its engine has ended
    other = Router([1000, 1000], 4)
    assert [other.send([number] * 10, 10, BOTH, session=f"{number}").engine for number in range(4)] == [0, 1, 0, 1]


def test_the_number_of_remembered_sessions_is_bounded(monkeypatch):
    monkeypatch.setattr(Router, "MOST_SESSIONS", 2)
    router = Router([1000, 1000], 4)
    for number in range(5):
        router.done(router.send([number], 1, [number % 2], session=str(number)))
    assert list(router._sessions.items()) == [("3", 1), ("4", 0)]
