"""Threads that clients share by time, and processes of which one is always warm."""

import threading

import pytest
from byte_grammar import vocabulary

from transect.text.grammar.checkers import Checkers
from transect.text.grammar.fair_pool import MOST_CLIENTS, FairPool
from transect.text.grammar.params import StructuredOutputsParams
from transect.text.grammar.sources import grammar_of

PATIENCE_S = 100


class Work:
    """Pieces of work that end when they are told to, on a clock of their own."""

    def __init__(self, threads=1):
        self.now, self.order = 0.0, []
        self.pool = FairPool(threads, "test", lambda: self.now)

    def add(self, client, seconds, expected=0.0):
        gate = threading.Event()

        def run():
            self.order.append(client)
            assert gate.wait(PATIENCE_S)
            self.now += seconds
            return client

        return self.pool.submit(client, run, expected), gate

    def rest(self):
        """Wait until nothing runs."""
        with self.pool._changed:
            self.pool._changed.wait_for(lambda: not self.pool._running, PATIENCE_S)


@pytest.fixture
def work():
    made = Work()
    yield made
    made.pool.close()


def test_whoever_has_had_least_comes_next(work):
    pieces = [work.add("greedy", 10.0) for _ in range(5)]
    while not work.order:
        pass
    pieces += [work.add("modest", 1.0) for _ in range(2)]
    pieces.append(work.add("newcomer", 1.0))
    for _, gate in pieces:
        gate.set()
    for future, _ in pieces:
        future.result(PATIENCE_S)
    assert work.order[0] == "greedy" and work.order[4:] == ["greedy"] * 4
    assert sorted(work.order[1:4]) == ["modest", "modest", "newcomer"]


def test_a_short_piece_goes_before_the_long_ones_of_clients_that_have_had_nothing(work):
    """It waited for a round of all of them, because its client had had some time before."""
    future, gate = work.add("victim", 0.1)
    gate.set()
    future.result(PATIENCE_S)
    work.rest()
    pieces = [work.add(f"hostile {number}", 4.0, 4.0) for number in range(16)]
    while len(work.order) < 2:
        pass
    pieces.append(work.add("victim", 0.1, 0.01))
    for _, gate in pieces:
        gate.set()
    for future, _ in pieces:
        future.result(PATIENCE_S)
    assert work.order[2] == "victim"


def test_long_pieces_come_although_new_clients_bring_short_ones(work):
    current, opened = work.add("first", 0.1)
    while not work.order:
        pass
    long, gate = work.add("long", 4.0, 4.0)
    gate.set()
    for number in range(200):
        following, gate = work.add(f"new {number}", 1.0, 0.1)  # there is always one that is short
        opened.set()
        current.result(PATIENCE_S)
        if "long" in work.order:
            break
        current, opened = following, gate
    gate.set()
    assert long.result(PATIENCE_S) == "long" and 4 < number < 40


def test_one_thread_is_for_short_pieces():
    """Also where two long ones come first; and a client whose pieces took long is expected to bring more of them."""
    work = Work(threads=2)
    try:
        long = [work.add(name, 4.0, 4.0) for name in ("a", "b")]
        while not work.order:
            pass
        short, gate = work.add("c", 0.1, 0.01)
        gate.set()
        assert short.result(PATIENCE_S) == "c" and work.order == ["a", "c"]
        for _, gate in long:
            gate.set()
        for future, _ in long:
            future.result(PATIENCE_S)
        work.rest()
        again = [work.add(name, 4.0, 0.01) for name in ("a", "b")]
        while len(work.order) < 4:
            pass
        short, gate = work.add("d", 0.1, 0.01)
        gate.set()
        assert short.result(PATIENCE_S) == "d" and len(work.order) == 5
        for _, gate in again:
            gate.set()
    finally:
        work.pool.close()


def test_errors_and_cancelled_work_harm_nobody(work):
    blocked, gate = work.add("a", 1.0)
    cancelled = work.pool.submit("a", lambda: work.order.append("cancelled"))

    def fails():
        raise ValueError("no")

    failing, fine = work.pool.submit("b", fails), work.pool.submit("c", lambda: 5)
    assert cancelled.cancel()
    gate.set()
    assert blocked.result(PATIENCE_S) == "a" and fine.result(PATIENCE_S) == 5
    with pytest.raises(ValueError, match="no"):
        failing.result(PATIENCE_S)
    assert "cancelled" not in work.order


def test_what_waits_is_cancelled_at_the_end(work):
    running, gate = work.add("a", 1.0)
    waits = work.pool.submit("a", lambda: 1)
    while not work.order:
        pass
    work.pool.close()
    gate.set()
    assert running.result(PATIENCE_S) == "a" and waits.cancelled()
    with pytest.raises(RuntimeError, match="closed"):
        work.pool.submit("a", lambda: 1)


def test_few_clients_are_remembered():
    made = Work()
    for number in range(MOST_CLIENTS + 50):
        made.pool.submit(f"c{number}", lambda: None).result(PATIENCE_S)
        made.rest()
    assert len(made.pool._clients) <= MOST_CLIENTS
    made.pool.close()


def grammar(regex):
    return grammar_of(StructuredOutputsParams(regex=regex))


def test_a_process_that_was_ended_is_replaced_and_the_spare_serves_meanwhile():
    checkers = Checkers(vocabulary(), 1)
    try:
        with checkers.one() as first:
            assert first.check(grammar("a")) is None
            with checkers.one() as second:
                assert second is not first and second.check(grammar("b")) is None
        with checkers.one() as lent:
            lent.close()  # as one that took too long is
        with checkers.one() as other, checkers.one() as again:
            assert {other, again} == {first, second}
            assert other.check(grammar("c")) is None and again.check(grammar("d")) is None
    finally:
        checkers.close()
    assert not first.alive and not second.alive


def test_a_long_check_leaves_a_process_for_others():
    checkers = Checkers(vocabulary(), 1)
    try:
        with checkers.one(long=True) as first:
            waits = threading.Thread(target=lambda: checkers.one(long=True).__enter__(), daemon=True)
            waits.start()
            with checkers.one() as second:
                assert second is not first and second.check(grammar("b")) is None and second.nbytes > 0
        waits.join(PATIENCE_S)
        assert not waits.is_alive()
    finally:
        checkers.close()


def test_a_process_that_has_grown_is_not_kept(monkeypatch):
    monkeypatch.setattr("transect.text.grammar.checkers.MOST_KEPT", -1)
    checkers = Checkers(vocabulary(), 0)
    try:
        with checkers.one() as checker:
            assert checker.check(grammar("a")) is None
            pid = checker._process.pid
        with checkers.one() as checker:
            assert checker.check(grammar("a")) is None and checker._process.pid != pid
    finally:
        checkers.close()
