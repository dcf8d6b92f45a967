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

    def add(self, client, seconds):
        gate = threading.Event()

        def run():
            self.order.append(client)
            assert gate.wait(PATIENCE_S)
            self.now += seconds
            return client

        return self.pool.submit(client, run), gate


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


def test_time_that_a_client_has_had_is_forgotten_slowly(work):
    future, gate = work.add("greedy", 10.0)
    gate.set()
    future.result(PATIENCE_S)
    while work.pool._running:
        pass
    before = work.pool._had("greedy")
    work.now += 600.0
    assert before == pytest.approx(10.0) and work.pool._had("greedy") < 0.01


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
        made.pool._charge(f"c{number}", 1.0)
    assert len(made.pool._used) <= MOST_CLIENTS


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
